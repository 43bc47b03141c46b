"""Keys for the content of full pages: equal keys mean equal tokens from the start of the sequence on.

A page's key is the SHA-256 of its parent's key and its token ids, so it stands for the whole prefix.  The chain
starts from the salt, which keeps prompts of different tenants apart where they ask for it.
"""

from __future__ import annotations

import hashlib

import numpy as np


def root_key(salt: str) -> bytes:
    """Parent of a sequence's first page."""
    return hashlib.sha256(b"salt\0" + salt.encode()).digest()


def next_key(parent: bytes, token_ids: np.ndarray) -> bytes:
    """Key of a full page holding ``token_ids [page_size]`` after the prefix that ``parent`` stands for."""
    return hashlib.sha256(parent + b"page\0" + token_ids.astype("<i4").tobytes()).digest()
