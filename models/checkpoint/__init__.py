"""Models on disk: opened in one place, read one array at a time.

``open_checkpoint`` looks at what a path is and returns a ``Checkpoint``; nothing else in the project
knows the formats.
"""

from __future__ import annotations

import os

from precast.models.checkpoint.base import Checkpoint, TextAssets
from precast.models.checkpoint.gguf_model import GgufCheckpoint
from precast.models.checkpoint.huggingface_model import HuggingFaceCheckpoint
from precast.models.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "TextAssets", "open_checkpoint"]


def open_checkpoint(path_or_id: str) -> Checkpoint:
    """Opens a model: reads its config and its files' headers, no weights.

    Args:
      path_or_id: a Hugging Face directory, a ``.gguf`` file (the first of a split), a directory that
        ``runtime-convert`` wrote, or a hub id (owner/model), which is downloaded.

    Raises:
      CheckpointError: one line that says what is wrong and what to do.
    """
    if os.path.isdir(path_or_id):
        return _open_directory(path_or_id)
    if os.path.isfile(path_or_id):
        return GgufCheckpoint(path_or_id)
    # Imported only where it is needed: each takes long to load and a server starts without them.
    from precast.models.checkpoint import hub

    if hub.is_hub_id(path_or_id):
        return _open_directory(hub.download(path_or_id))
    raise CheckpointError(f"{path_or_id}: there is no such file or directory")


def _open_directory(path: str) -> Checkpoint:
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if "precast.json" in names:
        from precast.models.checkpoint.native import NativeCheckpoint

        return NativeCheckpoint(path)
    if "config.json" in names:
        return HuggingFaceCheckpoint(path)
    if "weights" in names:
        raise CheckpointError(f"{path}: precast.json is missing: its conversion was not finished, convert again")
    if not names:
        raise CheckpointError(f"{path} is an empty directory")
    single = [name for name in names if name.endswith(".gguf")]
    hint = f": open {os.path.join(path, sorted(single)[0])} instead" if single else ""
    raise CheckpointError(f"{path}: config.json is missing{hint}")
