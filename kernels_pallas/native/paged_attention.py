"""Attention over the CPU target's pages, and writing to them: the same work as ``paged_attention.cpu`` does with
XLA's operations, which are some twenty a page where this is one call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from precast.kernels_pallas.native import library


def page_shapes(
    pages: int, kv_heads: int, page_size: int, head_dim: int, value_dim: int, dtype: np.dtype
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Key and value pages: float32 ``[pages, kv_heads, head_dim, page_size]`` and ``[pages, kv_heads, page_size,
    value_dim]``; bfloat16 as its uint16 bits, pairs along what attention sums over side by side, ``[pages, kv_heads,
    head_dim / 2, page_size, 2]`` and ``[pages, kv_heads, page_size / 2, value_dim, 2]``, halves rounded up."""
    sides = [(head_dim, page_size), (page_size, value_dim)]
    if dtype == np.float32:
        key, value = (jax.ShapeDtypeStruct((pages, kv_heads, *side), np.float32) for side in sides)
    else:
        key, value = (
            jax.ShapeDtypeStruct((pages, kv_heads, -(-rows // 2), columns, 2), np.uint16) for rows, columns in sides
        )
    return key, value


def paged_attention(
    queries: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    q_starts: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Arguments and result as of ``paged_attention.cpu.paged_attention``, pages of ``page_shapes``; queries beyond the
    context give zeros.  With bfloat16 pages, processors that have bfloat16 products round queries and weights to it."""
    result = jax.ShapeDtypeStruct((*queries.shape[:3], value_pages.shape[3]), jnp.float32)
    call = jax.ffi.ffi_call(library.target(library.ATTENTION, key_pages), result)
    settings = {"scale": np.float32(scale), "soft_cap": np.float32(soft_cap or 0), "window": np.int64(window or 0)}
    no_sinks = jnp.zeros(0, jnp.float32)
    return call(
        queries, key_pages, value_pages, page_table, context_lens, q_starts, no_sinks if sinks is None else sinks,
        **settings,
    )  # fmt: skip


def cache_write(
    key_pages: jax.Array,
    value_pages: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes tokens into one layer's pages, in place where those are donated.

    Args:
      key_pages, value_pages: of ``page_shapes``.
      keys: ``[tokens, kv_heads, head_dim]`` float32.
      values: ``[tokens, kv_heads, value_dim]`` float32.
      page_ids, offsets: ``[tokens]`` int32, where each token goes; of two with one place either may stay.

    Returns:
      The pages.
    """
    results = [jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in (key_pages, value_pages)]
    name = library.target(library.WRITE, key_pages)
    call = jax.ffi.ffi_call(name, results, input_output_aliases={0: 0, 1: 1})
    key_pages, value_pages = call(key_pages, value_pages, keys, values, page_ids, offsets)
    return key_pages, value_pages
