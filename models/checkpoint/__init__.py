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
      path_or_id: a Hugging Face directory or a ``.gguf`` file.

    Raises:
      CheckpointError: one line that says what is wrong and what to do.
    """
    if os.path.isdir(path_or_id):
        return HuggingFaceCheckpoint(path_or_id)
    if os.path.isfile(path_or_id):
        return GgufCheckpoint(path_or_id)
    raise CheckpointError(f"{path_or_id}: there is no such file or directory")
