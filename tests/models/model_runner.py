"""Runs a checkpoint through the shared transformer as the engine would: paged cache, chunks, decode rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from precast.models import cache as kv_cache
from precast.models import layout, transformer
from precast.models.cache import Segment
from precast.models.checkpoint import Checkpoint

PAGE_SIZE = 16


class ModelRunner:
    """One sequence in a cache of its own.  Rows are blocks of ``PAGE_SIZE`` queries, or one query to decode."""

    def __init__(self, checkpoint: Checkpoint, *, num_positions: int, dtype: str = "float32"):
        self.config = checkpoint.config
        self.weights = layout.build(self.config, checkpoint.read, dtype=dtype, num_positions=num_positions)
        self._width = -(-num_positions // PAGE_SIZE)
        self._spec = kv_cache.CacheSpec.of(self.config, num_pages=self._width + 1, page_size=PAGE_SIZE, dtype=dtype)
        # The pages of the sequence in descending order: a position never lies where it would by chance.
        self._table = np.arange(self._width, 0, -1, dtype=np.int32)
        self._prefill_rows = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the sequence."""
        self.cache = kv_cache.create(self._spec)
        self.length = 0

    def prefill(self, token_ids: list[int], chunk: int | None = None) -> np.ndarray:
        """Appends tokens, ``chunk`` a step (None: all at once); logits ``[tokens, vocab]`` float32."""
        chunk = chunk or len(token_ids)
        parts = [token_ids[first : first + chunk] for first in range(0, len(token_ids), chunk)]
        return np.concatenate([self._append(part, PAGE_SIZE) for part in parts])

    def decode(self, token_id: int) -> np.ndarray:
        """Appends one token; logits ``[vocab]`` float32."""
        return self._append([token_id], 1)[0]

    def greedy(self, token_ids: list[int], steps: int) -> list[int]:
        """Ids of ``steps`` greedy tokens after the prompt."""
        logits = self.prefill(token_ids)[-1]
        chosen = []
        for _ in range(steps):
            chosen.append(int(np.argmax(logits)))
            logits = self.decode(chosen[-1])
        return chosen

    def _append(self, token_ids: list[int], width: int) -> np.ndarray:
        # Never fewer than two rows: one row would take another path through the matrix products.
        rows = max(-(-len(token_ids) // width), 2)
        if width > 1:
            # Shorter chunks run in the program of the longest so far: compiling is what takes time here.
            rows = self._prefill_rows = max(rows, self._prefill_rows)
        ids = np.zeros(rows * width, np.int32)
        ids[: len(token_ids)] = token_ids
        starts = self.length + np.arange(rows, dtype=np.int32) * width
        lengths = np.clip(len(token_ids) - np.arange(rows, dtype=np.int32) * width, 0, width)
        segment = Segment(
            token_ids=jnp.asarray(ids.reshape(rows, width)),
            starts=jnp.asarray(starts),
            lengths=jnp.asarray(lengths),
            page_table=jnp.asarray(np.tile(self._table, (rows, 1))),
        )
        self.cache, logits = _step(self.weights, self.cache, segment, config=self.config)
        self.length += len(token_ids)
        return np.asarray(logits)[: len(token_ids)]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _step(weights, cache, segment, *, config):
    cache, hidden = transformer.forward(weights, cache, (segment,), config=config)
    return cache, transformer.unembed(weights, hidden, config)
