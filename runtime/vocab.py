"""Rows over the vocabulary, one device's part of it at a time.

Over a mesh each device has the logits of its own token ids; what is asked of the whole vocabulary here (sums, the
best, the likeliest k) exchanges a few numbers a row, never the logits.  Sums run in an order that the number of rows
does not change (``layers.row_sums``).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from precast.models.layers import row_sums
from precast.sharding.shard import Shard

LANES = 64


@dataclasses.dataclass(frozen=True)
class Vocab:
    """One device's part of the vocabulary: arrays ``[rows, width]`` hold token ids ``first`` to ``first + width - 1``.

    Attributes:
      size: token ids of the whole vocabulary.
      width: those of this device, padding included.
      shard: the devices that hold the rest.
    """

    size: int
    width: int
    shard: Shard

    @property
    def first(self) -> jax.Array | int:
        return self.shard.index("vocab") * self.width

    def local(self, token_ids: jax.Array) -> jax.Array:
        """Columns of token ids; ``width``, which a scatter drops, for those of other devices and for negative ones."""
        if self.shard.degree("vocab") == 1:
            return jnp.where(token_ids < 0, self.width, token_ids)
        columns = token_ids - self.first
        return jnp.where((token_ids >= 0) & (columns >= 0) & (columns < self.width), columns, self.width)

    def at(self, x: jax.Array, token_ids: jax.Array) -> jax.Array:
        """``x [rows, width]`` at ``token_ids [rows]``: ``[rows, 1]``."""
        if self.shard.degree("vocab") == 1:
            return jnp.take_along_axis(x, token_ids[:, None], axis=1)
        columns = self.local(token_ids)[:, None]
        found = jnp.take_along_axis(x, jnp.minimum(columns, self.width - 1), axis=1)
        return self.shard.sum(jnp.where(columns < self.width, found, 0), "vocab")

    def max(self, x: jax.Array) -> jax.Array:
        """``[rows, width]`` -> ``[rows]``."""
        return self.shard.max(blocked(x).max(axis=(1, 2)), "vocab")

    def min(self, x: jax.Array) -> jax.Array:
        """``[rows, width]`` -> ``[rows]``."""
        return self.shard.min(x.min(axis=-1), "vocab")

    def count(self, kept: jax.Array) -> jax.Array:
        """How many of ``[rows, width]`` bool are true, ``[rows]`` int32."""
        return self.shard.sum(kept.sum(axis=-1), "vocab")

    def total(self, x: jax.Array) -> jax.Array:
        """Sum of ``[rows, width]`` float32, ``[rows]``."""
        return self.shard.sum(row_sums(_block_sums(blocked(x, fill=0.0)))[:, 0], "vocab")

    def argmax(self, x: jax.Array) -> jax.Array:
        """``[rows, width]`` -> token ids ``[rows]`` int32, the lowest on ties: first the block, then the lane in it."""
        blocks = blocked(x)
        block = jnp.argmax(blocks.max(axis=-1), axis=-1)
        lanes = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
        best = (block * LANES + jnp.argmax(lanes, axis=-1)).astype(jnp.int32)
        if self.shard.degree("vocab") == 1:
            return best
        values = self.shard.gather(lanes.max(axis=-1)[:, None], "vocab", 1)
        ids = self.shard.gather((best + self.first)[:, None], "vocab", 1)
        return jnp.take_along_axis(ids, jnp.argmax(values, axis=-1)[:, None], axis=1)[:, 0]

    def top(self, x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The k likeliest of ``[rows, width]``: values and token ids ``[rows, k]``, best first, low ids first on ties.

        k is at most ``size``.
        """
        # Through the indices: a top_k of which only the values are used becomes a sort of the whole row on CPU.
        columns = jax.lax.top_k(x, min(k, x.shape[1]))[1]
        values = jnp.take_along_axis(x, columns, axis=1)
        if self.shard.degree("vocab") == 1:
            return values, columns
        values = self.shard.gather(values, "vocab", 1)
        ids = self.shard.gather(columns + self.first, "vocab", 1)
        order = jax.lax.top_k(values, min(k, values.shape[1]))[1]
        return jnp.take_along_axis(values, order, axis=1), jnp.take_along_axis(ids, order, axis=1)

    def pick(self, weights: jax.Array, uniform: jax.Array) -> jax.Array:
        """Inverse of the cumulative distribution of ``weights [rows, width]`` at ``uniform [rows]``: first the block,
        then the lane.  Only an entry of positive weight is ever picked, whatever the sums round to."""
        blocks = blocked(weights, fill=0.0)
        masses = self.shard.gather(_block_sums(blocks), "vocab", 1)
        cumulative = jnp.cumsum(masses, axis=-1)
        target = uniform * cumulative[:, -1]
        block = _first(cumulative > target[:, None], masses > 0)
        before = jnp.take_along_axis(cumulative - masses, block[:, None], axis=1)[:, 0]
        holder, block = block // blocks.shape[1], block % blocks.shape[1]
        lanes = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
        lane = _first(jnp.cumsum(lanes, axis=-1) > (target - before)[:, None], lanes > 0)
        token_ids = (self.first + block * LANES + lane).astype(jnp.int32)
        return self.shard.sum(jnp.where(holder == self.shard.index("vocab"), token_ids, 0), "vocab")


def blocked(x: jax.Array, fill: float = -jnp.inf) -> jax.Array:
    """``[rows, width]`` -> ``[rows, blocks, LANES]``, the last block filled up."""
    x = whole_vectors(x, fill)
    return x.reshape(x.shape[0], -1, LANES)


def whole_vectors(x: jax.Array, fill: float = -jnp.inf) -> jax.Array:
    """Fills rows up to a multiple of LANES: exp rounds alike in whole vectors only, not in a loop's scalar tail."""
    rest = -x.shape[1] % LANES
    return jnp.pad(x, ((0, 0), (0, rest)), constant_values=fill) if rest else x


def _block_sums(blocks: jax.Array) -> jax.Array:
    """``[rows, blocks, LANES]`` -> ``[rows, blocks]``."""
    return row_sums(blocks.reshape(-1, LANES)).reshape(blocks.shape[:2])


def _first(reached: jax.Array, possible: jax.Array) -> jax.Array:
    """Index of the first entry both reached and possible; the last possible one where there is none."""
    both = reached & possible
    last = possible.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    return jnp.where(jnp.any(both, axis=-1), jnp.argmax(both, axis=-1), last)
