"""The safetensors files of a Hugging Face directory: which there are, and what each holds.

The library checks a file's header; what is read then goes straight into an array of its own, because the library
maps files, and what was read of a mapped file counts as the process's memory for as long as it is open.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from precast.models.checkpoint.base import Header, fail_if, load_json
from precast.models.checkpoint.slices import Index, extent
from precast.models.errors import CheckpointError

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "U8": np.uint8}


class Shards:
    """All tensors of a directory, by name.  Opening reads the files' headers; ``fetch`` reads from one tensor.

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
        self.headers: dict[str, Header] = {}
        self._file_of: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        fail_if(directory, "in the index but their files are absent", self._absent())
        for file in self.files:
            self._open_file(file)
        self._match_index()

    def fetch(self, name: str, index: Index) -> np.ndarray:
        """Part of one tensor, in the dtype that the file holds; no more than that is read."""
        header, file, offset = self.headers[name], self._file_of[name], self._offsets[name]
        if header.dtype not in _TYPES:
            raise CheckpointError(f"{file}: {name} is {header.dtype}: only {', '.join(_TYPES)} are implemented")
        dtype = np.dtype(_TYPES[header.dtype])
        try:
            with open(file, "rb", buffering=0) as opened:
                if os.fstat(opened.fileno()).st_size < offset + header.num_bytes:
                    raise OSError("the file has become shorter")
                start = _start_of_run(index, header.shape)
                if start is None:
                    return np.array(np.memmap(opened, dtype, "r", offset, header.shape)[index])
                array = np.empty(extent(index), dtype)
                _read_into(array, opened, offset + start * dtype.itemsize)
                return array
        except OSError as error:
            raise CheckpointError(f"{file}: {name} cannot be read: {error}") from None

    def _absent(self) -> list[str]:
        missing = [file for file in self.files if not os.path.exists(file)]
        if self._assigned is None:
            return missing
        gone = {os.path.basename(file) for file in missing}
        return [f"{name} in {file}" for name, file in sorted(self._assigned.items()) if file in gone]

    def _open_file(self, file: str) -> None:
        _refuse_pointer(file)
        try:
            with safe_open(file, framework="numpy"), open(file, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                tensors = json.loads(opened.read(size))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file} is not a complete safetensors file ({error}): download it again") from None
        tensors.pop("__metadata__", None)
        fail_if(file, "in two files", [name for name in tensors if name in self.headers])
        for name, tensor in tensors.items():
            start, stop = tensor["data_offsets"]
            self.headers[name] = Header(tuple(tensor["shape"]), tensor["dtype"], stop - start)
            self._file_of[name] = file
            self._offsets[name] = 8 + size + start

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


def _start_of_run(index: Index, shape: tuple[int, ...]) -> int | None:
    """The element at which ``index`` begins, where what it selects lies in one run; None where it does not."""
    sizes = extent(index)
    cut = [axis for axis, size in enumerate(sizes) if size != shape[axis]]
    if cut and (math.prod(sizes[: cut[-1]]) > 1 or index[cut[-1]].step != 1):
        return None
    return sum(part.start * math.prod(shape[axis + 1 :]) for axis, part in enumerate(index))


def _read_into(array: np.ndarray, file: io.FileIO, offset: int) -> None:
    """Fills ``array`` from ``offset`` bytes into the file; a single call reads less than 2 GiB."""
    rest = array.reshape(-1).view(np.uint8).data
    while rest:
        count = os.preadv(file.fileno(), [rest], offset)
        if not count:
            raise OSError("the file has become shorter")
        rest, offset = rest[count:], offset + count


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
