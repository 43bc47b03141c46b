"""Host arrays for weights: made quickly, and taken by XLA's CPU backend as they are."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of zeros on pages of its own, given back as soon as nothing refers to it.

    ``jax.device_put`` shares it with a CPU device (it copies arrays that do not begin at a multiple of 64 bytes, as
    NumPy's do not), so it must not change after that.  NumPy's own arrays of this size ask for huge pages: where
    memory is full of cached files the system then spends longer on finding those than the file takes to read.
    """
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    pages = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype, count).reshape(shape)
