"""Weights as they lie in memory, kept beside the plans: the next start maps the file and converts nothing.

For checkpoints that are slow to lay out (a quantised GGUF file is dequantised and fused first).  ``weights.bin`` is
the arrays one after the other at multiples of _ALIGNMENT, where XLA's CPU client uses a NumPy array where it lies,
then a pickled index; ``weights.json`` has the checkpoint's fingerprint and the file's SHA-256, which must match
before the index is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import pathlib
import pickle
from typing import Any

import jax
import numpy as np
from absl import logging

from precast.models import transformer
from precast.runtime import files

# What XLA's CPU client asks of a buffer that it takes without a copy.
_ALIGNMENT = 64
_ARRAYS = "weights.bin"
_ABOUT = "weights.json"


def load(folder: pathlib.Path, fingerprint: str) -> transformer.Weights | None:
    """The weights of the checkpoint with this fingerprint, or None where they are not there or damaged."""
    try:
        about = json.loads((folder / _ABOUT).read_bytes())
        if about["fingerprint"] != fingerprint:
            return None
        with (folder / _ARRAYS).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hashlib.sha256(mapped).hexdigest() != about["sha256"]:
            logging.warning("%s does not match its digest and is made again", folder / _ARRAYS)
            return None
        treedef, entries = pickle.loads(mapped[about["index"] :])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logging.warning("%s cannot be read and is made again: %s", folder / _ARRAYS, error)
        return None
    leaves = [np.frombuffer(mapped, dtype, math.prod(shape), offset).reshape(shape) for shape, dtype, offset in entries]
    return jax.tree.unflatten(treedef, [jax.device_put(leaf) for leaf in leaves])


def store(folder: pathlib.Path, fingerprint: str, weights: transformer.Weights) -> None:
    """Keeps the weights for the next start; a folder that cannot be written only costs time then."""
    leaves, treedef = jax.tree.flatten(weights)
    entries: list[tuple[tuple[int, ...], Any, int]] = []
    digest = hashlib.sha256()
    at = 0
    try:
        with files.replacing(folder / _ARRAYS) as file:

            def write(content: Any, size: int) -> None:
                nonlocal at
                file.write(content)
                digest.update(content)
                at += size

            for leaf in leaves:
                array = np.ascontiguousarray(leaf)
                entries.append((array.shape, array.dtype, at))
                write(array.reshape(-1).view(np.uint8), array.nbytes)
                write(bytes(-at % _ALIGNMENT), -at % _ALIGNMENT)
            index = at
            write(pickle.dumps((treedef, entries)), 0)
        about = {"fingerprint": fingerprint, "sha256": digest.hexdigest(), "index": index}
        with files.replacing(folder / _ABOUT) as file:
            file.write(json.dumps(about).encode())
    except OSError as error:
        logging.warning("weights cannot be kept for the next start: %s", error)
