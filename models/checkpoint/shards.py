"""The safetensors files of a Hugging Face directory: which there are, and what each holds."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from precast.models.checkpoint.base import Header, fail_if, load_json
from precast.models.errors import CheckpointError

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class Shards:
    """All tensors of a directory, by name.  Opening reads the files' headers; ``fetch`` reads one tensor.

    Where there is an index it is authoritative: each tensor comes from the file that it names.

    Attributes:
      headers: name -> Header.
      files: full paths of the files in use.
    """

    def __init__(self, directory: str):
        self.directory = directory
        self._assigned = _index(directory)
        names = sorted(set(self._assigned.values())) if self._assigned is not None else [_single(directory)]
        self.files = [os.path.join(directory, name) for name in names]
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.headers: dict[str, Header] = {}
        self._file_of: dict[str, str] = {}
        fail_if(directory, "in the index but their files are absent", self._absent())
        for file in self.files:
            self._open_file(file)
        self._match_index()

    def fetch(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """One tensor, or some of its rows, in the dtype that the file holds."""
        try:
            with self._lock:
                view = self._open[self._file_of[name]].get_slice(name)
                return view[slice(*rows)] if rows else view[:]
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self._file_of[name]}: {name} cannot be read: {error}") from None

    def _absent(self) -> list[str]:
        missing = [file for file in self.files if not os.path.exists(file)]
        if self._assigned is None:
            return missing
        gone = {os.path.basename(file) for file in missing}
        return [f"{name} in {file}" for name, file in sorted(self._assigned.items()) if file in gone]

    def _open_file(self, file: str) -> None:
        _refuse_pointer(file)
        try:
            opened = safe_open(file, framework="numpy")
            names = opened.keys()
            slices = {name: opened.get_slice(name) for name in names}
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file} is not a complete safetensors file ({error}): download it again") from None
        fail_if(file, "in two files", [name for name in names if name in self.headers])
        for name, view in slices.items():
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            self.headers[name] = Header(shape, dtype, int(np.prod(shape, dtype=np.int64)) * _ITEM_BYTES.get(dtype, 1))
            self._file_of[name] = file
        self._open[file] = opened

    def _match_index(self) -> None:
        if self._assigned is None:
            return
        for name, file in self._assigned.items():
            if name not in self.headers:
                raise CheckpointError(
                    f"{self.directory}: 1 tensor is missing: the index puts {name} in {file}, which has no such tensor"
                )
        wrong = [
            f"{name} ({os.path.basename(file)})"
            for name, file in self._file_of.items()
            if self._assigned.get(name) != os.path.basename(file)
        ]
        fail_if(self.directory, "in a file that the index does not name for them", wrong)


def _index(directory: str) -> dict[str, str] | None:
    """The index's tensor name -> file name, or None where there is no index."""
    path = os.path.join(directory, _INDEX)
    if not os.path.exists(path):
        return None
    weight_map = load_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):
            raise CheckpointError(f"{path}: {name} is in {str(file)[:80]!r}: files must lie in the same folder")
    used = set(weight_map.values())
    stray = [file for file in sorted(os.listdir(directory)) if file.endswith(".safetensors") and file not in used]
    if stray:
        _log.info("%s: files that the index does not name are not used: %s", directory, ", ".join(stray))
    return weight_map


def _single(directory: str) -> str:
    found = sorted(file for file in os.listdir(directory) if file.endswith(".safetensors"))
    if _SINGLE in found:
        return _SINGLE
    if not found:
        other = sorted(file for file in os.listdir(directory) if file.endswith((".bin", ".pt", ".pth")))
        hint = f" ({other[0]} is a pickle: convert it to safetensors)" if other else ""
        raise CheckpointError(f"{directory}: {_SINGLE} is missing{hint}")
    if len(found) > 1 or "-of-" in found[0]:
        raise CheckpointError(
            f"{directory}: there are shards ({', '.join(found[:3])}) but {_INDEX} is missing: download it too"
        )
    return found[0]


def _refuse_pointer(file: str) -> None:
    try:
        with open(file, "rb") as opened:
            start = opened.read(24)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull`, or download it again"
        )
