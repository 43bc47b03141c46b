"""The paged KV cache: its layout for each target, its size, and how new tokens are written.

Only this module and the attention backends know how a page looks.

``blocked`` (XLA's CPU backend): one array a layer and side, K transposed,
  k ``[pages, kv_heads, head_dim, page_size]`` and v ``[pages, kv_heads, page_size, head_dim]``, so that a page
  of one head is the right-hand side of a small matrix product as it lies.  A bfloat16 cache is held as its
  uint16 bits, because XLA's CPU backend converts a whole bfloat16 pool to float32 around a scatter.

Page 0 is a scratch page: padding tokens are written there and nothing reads it.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from precast.models.config import ModelConfig

SCRATCH_PAGE = 0


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What the cache of one deployment looks like.

    num_pages counts the scratch page; dtype is that of the values ("float32" or "bfloat16").  value_dim is the
    size of a value where it is not that of a key.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    value_dim: int | None = None

    @classmethod
    def of(cls, config: ModelConfig, *, num_pages: int, page_size: int, dtype: str) -> CacheSpec:
        """The cache that ``config`` needs: for latent attention one head, the latent and the rotary key."""
        mla = config.mla
        if mla is None:
            return cls(config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim, dtype)
        key_dim = mla.kv_lora_rank + mla.qk_rope_head_dim
        return cls(config.num_layers, num_pages, page_size, 1, key_dim, dtype, mla.kv_lora_rank)

    @property
    def storage_dtype(self) -> np.dtype:
        return np.dtype(np.uint16) if self.dtype == "bfloat16" else np.dtype(self.dtype)

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        return (self.num_pages, self.num_kv_heads, self.head_dim, self.page_size)

    @property
    def value_shape(self) -> tuple[int, int, int, int]:
        return (self.num_pages, self.num_kv_heads, self.page_size, self.value_dim or self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, both sides."""
        one = math.prod(self.key_shape[1:]) + math.prod(self.value_shape[1:])
        return self.num_layers * one * self.storage_dtype.itemsize


# A cache is a tuple with one (keys, values) pair a layer.
LayerCache = tuple[jax.Array, jax.Array]
Cache = tuple[LayerCache, ...]


def shapes(spec: CacheSpec) -> tuple[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct], ...]:
    """The cache's arrays as shapes only, for lowering."""
    key = jax.ShapeDtypeStruct(spec.key_shape, spec.storage_dtype)
    value = jax.ShapeDtypeStruct(spec.value_shape, spec.storage_dtype)
    return ((key, value),) * spec.num_layers


def create(spec: CacheSpec) -> Cache:
    """An empty cache."""
    return tuple(
        (jnp.zeros(spec.key_shape, spec.storage_dtype), jnp.zeros(spec.value_shape, spec.storage_dtype))
        for _ in range(spec.num_layers)
    )


def write(layer: LayerCache, keys: jax.Array, values: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> LayerCache:
    """Writes new tokens into a layer's pages, in place when the cache is donated.

    Args:
      layer: one layer's (keys, values).
      keys, values: ``[tokens, kv_heads, head_dim]`` of the new tokens, float32.
      page_ids, offsets: ``[tokens]`` int32, where each token goes; padding goes to the scratch page.
    """
    key_pages, value_pages = layer
    return (
        key_pages.at[page_ids, :, :, offsets].set(_encode(keys, key_pages.dtype), mode="promise_in_bounds"),
        value_pages.at[page_ids, :, offsets, :].set(_encode(values, value_pages.dtype), mode="promise_in_bounds"),
    )


def _encode(x: jax.Array, storage: np.dtype) -> jax.Array:
    if storage == np.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(storage)
