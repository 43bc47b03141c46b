"""From a part of a parameter to the parts of a checkpoint's tensors that hold it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from precast.models import buffers
from precast.models.families.base import Source

Index = tuple[slice, ...]
# (tensor name, which part of it) -> that part, read from the file.
Fetch = Callable[[str, Index], np.ndarray]


def resolve(index: Index | None, shape: tuple[int, ...], name: str) -> Index:
    """``index`` with its starts and stops spelled out; None is all of the array.

    Raises:
      ValueError: not one slice a dimension, or a slice that is not a run within the array.
    """
    index = (slice(None),) * len(shape) if index is None else tuple(index)
    if len(index) != len(shape):
        raise ValueError(f"{name}: the index has {len(index)} slices: the array has {len(shape)} dimensions")
    return tuple(_run(part, size, name) for part, size in zip(index, shape, strict=True))


def _run(part: slice, size: int, name: str) -> slice:
    start, stop = part.start or 0, size if part.stop is None else part.stop
    if not 0 <= start <= stop <= size or part.step not in (None, 1):
        raise ValueError(f"{name}: {part} of {size}: an index must be a run within the array, without steps")
    return slice(start, stop, 1)


def extent(index: Index) -> tuple[int, ...]:
    """Shape of what a resolved index selects."""
    return tuple(len(range(part.start, part.stop, part.step)) for part in index)


def assemble(source: Source, name: str, index: Index, fetch: Fetch) -> np.ndarray:
    """Reads a part of a parameter in canonical form.

    Args:
      source: where the parameter lies.
      name: its canonical name.
      index: resolved, over the canonical array.
      fetch: reads from a tensor; its slices may have a step.
    """
    sizes = extent(index)
    if 0 in sizes:
        # Of an empty part only the dtype is asked.
        return np.empty(sizes, assemble(source, name, (slice(0, 1, 1),) * len(sizes), fetch).dtype)
    if "{e}" not in source.stored.name:
        return _part(source, name, source.names[0], index, fetch)
    tensors = source.names[index[0]]
    first = _part(source, name, tensors[0], index[1:], fetch)
    # Filled one expert at a time: all of a layer's experts are held once, never twice.
    array = buffers.empty((len(tensors), *first.shape), first.dtype)
    array[0] = first
    for number, tensor in enumerate(tensors[1:], 1):
        array[number] = _part(source, name, tensor, index[1:], fetch)
    return array


def _part(source: Source, name: str, tensor: str, index: Index, fetch: Fetch) -> np.ndarray:
    """A part of the parameter, or of one expert's, from one tensor."""
    stored = source.stored
    wanted = list(index)
    axis = len(wanted) - (1 if name.endswith(".bias") or len(wanted) == 1 else 2)
    rows, order = wanted[axis], None
    if source.order is not None:
        picked = source.order[rows]
        rows = slice(int(picked.min()), int(picked.max()) + 1, 1)
        order = picked - rows.start
    if source.rows is not None:
        rows = slice(rows.start + source.rows[0], rows.stop + source.rows[0], 1)
    if stored.every is not None:
        first, step = stored.every
        rows = slice(first + rows.start * step, first + (rows.stop - 1) * step + 1, step)
    wanted[axis] = rows
    if stored.transposed:
        wanted[-1], wanted[-2] = wanted[-2], wanted[-1]
    array = fetch(tensor, tuple(wanted))
    if stored.transposed:
        array = np.swapaxes(array, -1, -2)
    return array if order is None else np.take(array, order, axis=axis)
