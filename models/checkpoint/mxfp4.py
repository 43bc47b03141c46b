"""Experts in MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats, 32 to a shared power of two.

A weight ``x`` lies in the file as ``x_blocks [experts, out, in / 32, 16]`` uint8, two values a byte with the
low half first, and ``x_scales [experts, out, in / 32]`` uint8, exponents with bias 127.  The plain form of the
same checkpoints is ``x [experts, in, out]``.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from precast.models import buffers
from precast.models.checkpoint.base import Header
from precast.models.checkpoint.slices import Fetch, Index, extent
from precast.models.errors import CheckpointError

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)


def unpacked_headers(headers: Mapping[str, Header], where: str) -> dict[str, Header]:
    """``headers`` with each pair of blocks and scales replaced by the tensor that they stand for."""
    plain = dict(headers)
    for name, blocks in headers.items():
        if not name.endswith(_BLOCKS) or blocks.dtype != "U8":
            continue
        stem = name.removesuffix(_BLOCKS)
        scales = headers.get(stem + _SCALES)
        if scales is None or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, _BLOCK // 2):
            raise CheckpointError(f"{where}: {name} {list(blocks.shape)} has no {stem}{_SCALES} that fits it")
        experts, out, groups, _ = blocks.shape
        del plain[name], plain[stem + _SCALES]
        plain[stem] = Header((experts, groups * _BLOCK, out), "BF16", blocks.num_bytes + scales.num_bytes)
    return plain


def unpack(name: str, index: Index, fetch: Fetch) -> np.ndarray:
    """Part of ``[experts, in, out]`` as bfloat16, which holds every MXFP4 value exactly; one expert at a time."""
    experts, into, out = index
    groups = slice(into.start // _BLOCK, -(-into.stop // _BLOCK), 1)
    columns = slice(into.start - groups.start * _BLOCK, into.stop - groups.start * _BLOCK, into.step)
    array = buffers.empty(extent(index), ml_dtypes.bfloat16)
    for number, expert in enumerate(range(experts.start, experts.stop)):
        part = (slice(expert, expert + 1, 1), out, groups)
        blocks, scales = fetch(name + _BLOCKS, (*part, slice(0, _BLOCK // 2, 1)))[0], fetch(name + _SCALES, part)[0]
        pairs = np.stack([blocks & 0xF, blocks >> 4], axis=-1)
        values = np.ldexp(_VALUES[pairs], scales.astype(np.int32)[..., None, None] - _EXPONENT_BIAS)
        array[number] = values.reshape(len(values), -1)[:, columns].T
    return array
