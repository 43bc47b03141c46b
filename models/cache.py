"""The paged KV cache: its layout for each target, its size, how tokens are written to it and queries read it.

Only this module and the kernels know how a page looks.

CPU: one array a layer and side, K transposed, k ``[pages, kv_heads, head_dim, page_size]`` and v ``[pages,
  kv_heads, page_size, head_dim]``, so that a page of one head is the right-hand side of a small matrix product as
  it lies.  A bfloat16 cache is held as its uint16 bits, because XLA's CPU backend converts a whole bfloat16 pool
  to float32 around a scatter; for the native kernels in pairs (``native.paged_attention.page_shapes``).

Accelerators: one array for all layers, ``[layers * pages, page_size, lanes]`` as ``kernels_pallas.layout``
  describes; layer i's page p is number ``i * pages + p``.  It stays in the carry of the scan over layers and is
  updated in place.

Page 0 (of each layer) is a scratch page: padding tokens are written there and nothing reads it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from precast.kernels_pallas import layout
from precast.kernels_pallas.cache_update import cache_update
from precast.kernels_pallas.native import paged_attention as native
from precast.kernels_pallas.native.paged_attention import cache_write
from precast.kernels_pallas.paged_attention import AttentionConfig, cpu, paged_attention
from precast.models.config import ModelConfig
from precast.models.placement import Placement
from precast.sharding.rules import Axes, partition

SCRATCH_PAGE = 0

# Pairs (keys, values) a layer on CPU, one array on accelerators.
Cache = Any
# A jax.Array in a program, a NumPy array where the host packs it.
Packed = Any


@flax.struct.dataclass
class Segment:
    """Rows of equal width within a step: decode rows (one query each) or blocks of a prefill.

    On accelerators no two rows may write to one page.

    Attributes:
      token_ids: ``[rows, q]`` int32.
      starts: ``[rows]`` int32, position of a row's first query.
      lengths: ``[rows]`` int32, live queries of a row; the rest is padding, and 0 makes the whole row padding.
      page_table: ``[rows, width]`` int32.
    """

    token_ids: Packed
    starts: Packed
    lengths: Packed
    page_table: Packed

    @property
    def num_tokens(self) -> int:
        rows, width = self.token_ids.shape
        return rows * width

    def positions(self) -> jax.Array:
        """``[rows, q]`` int32."""
        return self.starts[:, None] + jnp.arange(self.token_ids.shape[1], dtype=jnp.int32)

    def is_live(self) -> jax.Array:
        """``[rows, q]`` bool: no padding."""
        return jnp.arange(self.token_ids.shape[1], dtype=jnp.int32)[None, :] < self.lengths[:, None]

    def context_lens(self) -> jax.Array:
        """``[rows]`` int32: tokens of the row in the cache, those of this step included; 0 for padding."""
        return jnp.where(self.lengths > 0, self.starts + self.lengths, 0)

    def destinations(self, page_size: int) -> tuple[jax.Array, jax.Array]:
        """(page ids, offsets) each ``[rows * q]``: where each token's keys and values go, padding to scratch."""
        positions, live = self.positions(), self.is_live()
        column = jnp.where(live, positions // page_size, 0)
        page_ids = jnp.take_along_axis(self.page_table, column, axis=1, mode="promise_in_bounds")
        page_ids = jnp.where(live, page_ids, SCRATCH_PAGE)
        return page_ids.reshape(-1), (positions % page_size).reshape(-1)


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What the cache of one deployment looks like.

    Attributes:
      num_layers: of the model.
      num_pages: the scratch page included.
      page_size: tokens a page.
      num_kv_heads: on all devices together, padding and copies included.
      head_dim: of a key; of the latent form (one head) the latent and the rotary key.
      dtype: of the values, "float32" or "bfloat16".
      value_dim: of the latent form, whose values are the first so many of a key's; None otherwise.
      placement: for which target and mesh.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    value_dim: int | None = None
    placement: Placement = Placement()

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: str,
        placement: Placement = Placement(),
    ) -> CacheSpec:
        """The cache that ``config`` needs: for latent attention one head on every device."""
        mla = config.mla
        if mla is None:
            heads = placement.local_heads(config)[1] * placement.shard.degree("kv_heads")
            return cls(config.num_layers, num_pages, page_size, heads, config.head_dim, dtype, None, placement)
        key_dim = mla.kv_lora_rank + mla.qk_rope_head_dim
        return cls(config.num_layers, num_pages, page_size, 1, key_dim, dtype, mla.kv_lora_rank, placement)

    @property
    def axes(self) -> Axes:
        """Logical axes of the cache's arrays."""
        heads = "kv_heads" if self.value_dim is None else None
        return (None, heads, None, None) if self.placement.is_cpu else (None, None, heads)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device, over all layers, both sides."""
        leaves = jax.tree.leaves(shapes(dataclasses.replace(self, num_pages=1), None))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // self._degree

    @property
    def _degree(self) -> int:
        return 1 if self.value_dim is not None else self.placement.shard.degree("kv_heads")


def shapes(spec: CacheSpec, mesh: jax.sharding.Mesh | None) -> Cache:
    """The cache's arrays as shapes only, for lowering, on all devices together."""
    sharding = None if mesh is None else jax.sharding.NamedSharding(mesh, partition(spec.axes))
    if spec.placement.is_cpu:
        page_shapes = native.page_shapes if spec.placement.is_native else cpu.page_shapes
        value_dim = spec.value_dim or spec.head_dim
        sides = page_shapes(
            spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim, value_dim, jnp.dtype(spec.dtype)
        )
        return (tuple(side.update(sharding=sharding) for side in sides),) * spec.num_layers
    local = spec.num_kv_heads // spec._degree
    lanes = layout.page_lanes(local, spec.head_dim, spec.value_dim) * spec._degree
    shape = (spec.num_layers * spec.num_pages, spec.page_size, lanes)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype), sharding=sharding)


def create(spec: CacheSpec) -> Cache:
    """An empty cache: the part of one device."""
    degrees = [1 if axis is None else spec.placement.shard.degree(axis) for axis in spec.axes]

    def zeros(one: jax.ShapeDtypeStruct) -> jax.Array:
        sizes = itertools.zip_longest(one.shape, degrees, fillvalue=1)
        return jnp.zeros([size // degree for size, degree in sizes], one.dtype)

    return jax.tree.map(zeros, shapes(spec, None))


def page_size(cache: Cache) -> int:
    """Tokens a page."""
    return cache[0][0].shape[3] if isinstance(cache, tuple) else cache.shape[1]


@flax.struct.dataclass
class Places:
    """Where a step's tokens go, worked out once for all layers.

    page_ids, offsets: ``[tokens]`` int32 of each token in a layer's pages; padding goes to the scratch page.
    """

    segments: tuple[Segment, ...]
    page_ids: jax.Array
    offsets: jax.Array

    @classmethod
    def of(cls, segments: tuple[Segment, ...], page_size: int) -> Places:
        places = [segment.destinations(page_size) for segment in segments]
        page_ids = jnp.concatenate([page_ids for page_ids, _ in places])
        return cls(segments, page_ids, jnp.concatenate([offsets for _, offsets in places]))


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is static about how one layer's queries read the cache.

    scale multiplies the scores; window, soft_cap and value_dim as in ``kernels_pallas.paged_attention``.
    """

    scale: float
    window: int | None
    soft_cap: float | None
    value_dim: int | None


def update_and_attend(
    cache: Cache,
    layer: int | jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    places: Places,
    reading: Reading,
    placement: Placement,
    *,
    num_layers: int,
    sinks: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """Writes a step's tokens into a layer's pages, then attends each segment over its pages.

    Args:
      cache: this device's part; updated in place when it is donated.
      layer: the layer's number; on CPU a Python integer.
      queries: ``[tokens, heads, key_dim]`` float32.
      keys: ``[tokens, kv_heads, key_dim]`` float32 of the new tokens.
      values: the same of ``head_dim``, or None for the latent form.
      places: of the step.
      reading: of the layer.
      placement: for which target.
      num_layers: that the cache holds.
      sinks: ``[heads]`` float32 or None.

    Returns:
      The cache, and ``[tokens, heads, value_dim]`` float32.
    """
    if placement.is_cpu:
        assert isinstance(layer, int)
        return _on_cpu(cache, layer, queries, keys, values, places, reading, sinks, placement.is_native)
    num_pages = cache.shape[0] // num_layers
    settings = AttentionConfig(keys.shape[1], reading.scale, reading.window, reading.soft_cap, reading.value_dim)
    parts = _by_segment((queries, keys, values), places.segments)
    # All writes come first: a chunk's rows read one another's tokens.
    for segment, (_, new_keys, new_values) in zip(places.segments, parts, strict=True):
        table, lengths = segment.page_table + layer * num_pages, segment.context_lens()
        cache, _ = cache_update(cache, new_keys, new_values, table, lengths, segment.starts, target=placement.target)
    outputs = []
    for segment, (asked, _, _) in zip(places.segments, parts, strict=True):
        table, lengths = segment.page_table + layer * num_pages, segment.context_lens()
        mixed = paged_attention(
            asked.astype(cache.dtype), cache, table, lengths, segment.starts,
            config=settings, target=placement.target, sinks=sinks,
        )  # fmt: skip
        outputs.append(mixed.reshape(segment.num_tokens, *mixed.shape[2:]).astype(jnp.float32))
    return cache, jnp.concatenate(outputs)


def _by_segment(arrays: tuple[jax.Array | None, ...], segments: tuple[Segment, ...]) -> list[tuple[Any, ...]]:
    """Each array ``[tokens, …]`` cut into the segments' ``[rows, q, …]``."""
    parts, first = [], 0
    for segment in segments:
        last, shape = first + segment.num_tokens, segment.token_ids.shape
        parts.append(tuple(x if x is None else x[first:last].reshape(*shape, *x.shape[1:]) for x in arrays))
        first = last
    return parts


def _on_cpu(cache, layer, queries, keys, values, places, reading, sinks, is_native):
    values = keys[..., : reading.value_dim] if values is None else values
    write, attend = (cache_write, native.paged_attention) if is_native else (_write, cpu.paged_attention)
    key_pages, value_pages = cache[layer]
    key_pages, value_pages = write(key_pages, value_pages, keys, values, places.page_ids, places.offsets)
    outputs = []
    for segment, (asked,) in zip(places.segments, _by_segment((queries,), places.segments), strict=True):
        mixed = attend(
            asked, key_pages, value_pages, segment.page_table, segment.context_lens(), segment.starts,
            scale=reading.scale, window=reading.window, soft_cap=reading.soft_cap, sinks=sinks,
        )  # fmt: skip
        outputs.append(mixed.reshape(segment.num_tokens, *mixed.shape[2:]))
    return (*cache[:layer], (key_pages, value_pages), *cache[layer + 1 :]), jnp.concatenate(outputs)


def _write(
    key_pages: jax.Array,
    value_pages: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """``cache_write`` with XLA's operations."""
    return (
        key_pages.at[page_ids, :, :, offsets].set(_encode(keys, key_pages.dtype), mode="promise_in_bounds"),
        value_pages.at[page_ids, :, offsets, :].set(_encode(values, value_pages.dtype), mode="promise_in_bounds"),
    )


def _encode(x: jax.Array, storage: np.dtype) -> jax.Array:
    if storage == np.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(storage)
