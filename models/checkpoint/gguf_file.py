"""The head of a GGUF file: metadata and the table of tensors.

The format is described in ggml's ``docs/gguf.md``.  The gguf library has a reader too, but it makes a
NumPy view of every string and takes seconds over a vocabulary; its dequantisation is what we use.
Every length is checked against the file's end, so a file cut anywhere is an error and never a read
beyond it.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from precast.models.checkpoint.base import Header
from precast.models.checkpoint.slices import Index
from precast.models.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_RANK = 4
_PLAIN = {"F32": np.float32, "F16": np.float16}

DTYPES = frozenset(
    {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    header: Header
    offset: int


class GgufFile:
    """One file, mapped.

    Attributes:
      metadata: key -> value.
      headers: tensor name -> Header, shapes in row-major order ([out, in]).
    """

    def __init__(self, path: str):
        self.path = path
        try:
            with open(path, "rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                if self._size < 24 or file.read(4) != _MAGIC:
                    raise CheckpointError(f"{path} is not a GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        self._at = 4
        try:
            self.metadata, self._tensors = self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise CheckpointError(f"{path} is damaged or cut short ({error!r}): download it again") from None
        self.headers = {name: tensor.header for name, tensor in self._tensors.items()}

    def fetch(self, name: str, index: Index) -> np.ndarray:
        """Part of one tensor: F32 and F16 as they are, the other types as float32.

        Only the blocks that hold the part are dequantised.
        """
        tensor = self._tensors[name]
        shape, dtype = tensor.header.shape, GGMLQuantizationType[tensor.header.dtype]
        data = np.frombuffer(self._map, np.uint8, tensor.header.num_bytes, tensor.offset)
        if dtype.name in _PLAIN:
            return data.view(_PLAIN[dtype.name]).reshape(shape)[index]
        block, block_bytes = GGML_QUANT_SIZES[dtype]
        columns = index[-1]
        first, last = columns.start // block, -(-columns.stop // block)
        blocks = data.reshape(*shape[:-1], shape[-1] // block, block_bytes)[(*index[:-1], slice(first, last))]
        values = dequantize(blocks.reshape(-1, (last - first) * block_bytes), dtype)
        values = values.reshape(*blocks.shape[:-2], (last - first) * block)
        return values[..., columns.start - first * block : columns.stop - first * block]

    def _parse(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        (version,) = self._scalars("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self.path}: GGUF version {version} is not implemented; implemented: {_VERSIONS}")
        num_tensors, num_keys = self._scalars("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise CheckpointError(f"{self.path}: metadata key {key} is there twice")
            metadata[key] = self._value(*self._scalars("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment}: it must be a power of two")
        start = -(-self._at // alignment) * alignment
        return metadata, self._place(infos, start)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (rank,) = self._scalars("I")
        if not 1 <= rank <= _MAX_RANK:
            raise CheckpointError(f"{self.path}: {name} has {rank} dimensions: it must have 1 to {_MAX_RANK}")
        shape = self._scalars("Q" * rank)[::-1]
        dtype, offset = self._scalars("IQ")
        return name, shape, dtype, offset

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int) -> dict[str, _Tensor]:
        tensors: dict[str, _Tensor] = {}
        for name, shape, number, offset in infos:
            if name in tensors:
                raise CheckpointError(f"{self.path}: 1 tensor is there twice: {name}")
            try:
                dtype = GGMLQuantizationType(number)
            except ValueError:
                raise CheckpointError(f"{self.path}: {name} has type {number}, which GGUF does not define") from None
            block, block_bytes = GGML_QUANT_SIZES[dtype]
            if min(shape) < 1 or shape[-1] % block:
                raise CheckpointError(
                    f"{self.path}: {name} has shape {list(shape)}: rows must be multiples of {block} for {dtype.name}"
                )
            num_bytes = math.prod(shape) // block * block_bytes
            if start + offset + num_bytes > self._size:
                raise CheckpointError(
                    f"{self.path} is cut short: {name} ends at byte {start + offset + num_bytes}, "
                    f"the file at {self._size}: download it again"
                )
            tensors[name] = _Tensor(Header(shape, dtype.name, num_bytes), start + offset)
        return tensors

    def _scalars(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return values

    def _bytes(self, count: int) -> bytes:
        if self._at + count > self._size:
            raise struct.error(f"{count} bytes are needed at {self._at} of {self._size}")
        self._at += count
        return self._map[self._at - count : self._at]

    def _string(self) -> str:
        return self._bytes(*self._scalars("Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            value = self._scalars(_SCALARS[kind])[0]
            # The decimal that was meant: 1e-05 is stored as 9.99999974737875e-06.
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        inner, count = self._scalars("IQ")
        if inner in (_STRING, _ARRAY):
            if count > self._size:
                raise struct.error(f"an array of {count}")
            return [self._value(inner) for _ in range(count)]
        code = _SCALARS[inner]
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize("<" + code))))
