"""A model's layers as runs of like ones, which can be stacked under a scan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from precast.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Position:
    """Layers that share one set of leaves: one layer, or like ones that are stacked in the order of ``layers``."""

    layers: tuple[int, ...]

    @property
    def is_stacked(self) -> bool:
        return len(self.layers) > 1


@dataclasses.dataclass(frozen=True)
class Run:
    """``repeats`` times the same few kinds of layers, from layer ``first`` on; one position for each kind."""

    first: int
    positions: tuple[Position, ...]

    @property
    def repeats(self) -> int:
        return len(self.positions[0].layers)


@functools.lru_cache
def runs(config: ModelConfig, stacked: bool) -> tuple[Run, ...]:
    """The model's layers as runs in order; without stacking each layer is a run of its own.

    So is each layer with experts: compilers copy a layer's experts out of a stack before the grouped product.
    """
    kinds = [
        (config.layer_window(i), config.layer_rope_kind(i), i if config.layer_is_moe(i) else None)
        for i in range(config.num_layers)
    ]
    found: list[Run] = []
    first = 0
    while first < config.num_layers:
        period, repeats = _longest_repeat(kinds[first:]) if stacked else (1, 1)
        positions = [Position(tuple(range(first + i, first + period * repeats, period))) for i in range(period)]
        found.append(Run(first, tuple(positions)))
        first += period * repeats
    return tuple(found)


def _longest_repeat(kinds: Sequence[Any]) -> tuple[int, int]:
    """(period, repeats) from the start of ``kinds`` that cover most layers, the shortest period of those."""
    best = (1, 1)
    for period in range(1, len(kinds) // 2 + 1):
        repeats = 1
        while kinds[repeats * period : (repeats + 1) * period] == kinds[:period]:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best
