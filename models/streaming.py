"""A device's part of a parameter, read a little at a time straight to where it belongs.

Neither a whole array in the file's dtype nor a copy beside the array being made is ever held: beyond what the
devices keep, loading needs a few megabytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from precast.models.placement import Piece

# Small enough to stay in a cache, and in memory that the allocator hands out again, until it is copied.
_READ_ELEMENTS = 2 << 20


class Read(Protocol):
    """Canonical name -> array (see ``models.params``), or the part of it at ``index``, a slice a dimension."""

    def __call__(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray: ...


def shape_of(pieces: Sequence[Sequence[Piece]]) -> tuple[int, ...]:
    """Shape of what ``pieces`` of each dimension make, padding included."""
    return tuple(sum(piece if isinstance(piece, int) else piece.stop - piece.start for piece in one) for one in pieces)


def fill(out: np.ndarray, read: Read, name: str, pieces: Sequence[Sequence[Piece]]) -> None:
    """Reads a parameter's pieces into ``out``, cast to its dtype; the padding between them is left as it is."""
    for (first, rows), *others in itertools.product(*map(_placed, pieces)):
        width = math.prod(part.stop - part.start for _, part in others)
        columns = tuple(slice(at, at + part.stop - part.start) for at, part in others)
        height = max(1, _READ_ELEMENTS // width)
        for start in range(rows.start, rows.stop, height):
            stop = min(start + height, rows.stop)
            to = slice(first + start - rows.start, first + stop - rows.start)
            out[(to, *columns)] = read(name, (slice(start, stop), *(part for _, part in others)))


def _placed(pieces: Sequence[Piece]) -> list[tuple[int, slice]]:
    """(where it goes, what it is) of each run of a dimension, without the padding."""
    placed: list[tuple[int, slice]] = []
    at = 0
    for piece in pieces:
        if not isinstance(piece, int):
            placed.append((at, piece))
        at += piece if isinstance(piece, int) else piece.stop - piece.start
    return placed
