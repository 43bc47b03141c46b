"""Paged attention for XLA's CPU backend: a loop over page columns with a running softmax.

Plain XLA operations, no Pallas: on a CPU the compiler's own small matrix products are the fastest kernel at
hand.  The loop's trip count follows the longest live context of the call, not the width of the page table.
The running softmax is that of FlashAttention (arXiv:2205.14135), one page a block.

A row's result is the same bit for bit whatever the other rows are, however many there are and however many queries
a row has.  A column in which a row has no visible key leaves its accumulators as they were.  Sums go through matrix
products, whose order does not change with the shape where their width is a multiple of _WIDTH (16 is enough for AVX2,
64 for AVX-512); the compiler's reductions change theirs.  Accumulators of one number a query carry it in _LANES
copies: a loop over whole vectors rounds alike everywhere, its scalar tail does not (multiply and add are contracted
in one and not in the other).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_MASKED = -1e30
_WIDTH = 64
_LANES = 8
# The largest score so far and the sum of exponentials, ``[batch, stacked, _LANES]``, and the values weighed by them,
# ``[batch, stacked, value_width]``.
_Running = tuple[jax.Array, jax.Array, jax.Array]


def page_shapes(
    pages: int, kv_heads: int, page_size: int, head_dim: int, value_dim: int, dtype: np.dtype
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Key and value pages as ``paged_attention`` takes them."""
    storage = np.dtype(np.uint16) if dtype == jnp.bfloat16 else dtype
    key = jax.ShapeDtypeStruct((pages, kv_heads, head_dim, page_size), storage)
    return key, jax.ShapeDtypeStruct((pages, kv_heads, page_size, value_dim), storage)


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
    """Causal attention of each row's queries over the row's pages.

    Args:
      queries: ``[rows, q, heads, head_dim]`` float32; query i of a row stands at position ``q_starts + i``.
      key_pages: ``[pages, kv_heads, head_dim, page_size]``; uint16 holds bfloat16 bits.
      value_pages: ``[pages, kv_heads, page_size, value_dim]``, same dtype.
      page_table: ``[rows, width]`` int32, the pages of a row in order.
      context_lens: ``[rows]`` int32, tokens of the row in the cache, the new ones included; 0 for an empty row.
      q_starts: ``[rows]`` int32.
      scale: multiplies the scores.
      window: a query sees the last ``window`` positions, its own included; None is all.
      soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.
      sinks: ``[heads]`` float32, one more logit a head in the softmax's denominator.

    Returns:
      ``[rows, q, heads, value_dim]`` float32; rows with an empty context give zeros.
    """
    rows, num_queries, heads, head_dim = queries.shape
    kv_heads, page_size, value_dim = value_pages.shape[1:]
    group = heads // kv_heads
    # All query heads of a KV head side by side: one small product a row and KV head.
    batch, stacked = rows * kv_heads, group * num_queries
    grouped = queries.reshape(rows, num_queries, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = (grouped * scale).reshape(batch, stacked, head_dim)
    query_positions = q_starts[:, None] + jnp.arange(num_queries, dtype=jnp.int32)
    width, value_width = -(-page_size // _WIDTH) * _WIDTH, -(-value_dim // _WIDTH) * _WIDTH
    in_page = jnp.arange(width, dtype=jnp.int32)

    def column(index: jax.Array, carry: _Running) -> _Running:
        page_ids = jax.lax.dynamic_index_in_dim(page_table, index, axis=1, keepdims=False)
        positions = index * page_size + in_page
        written = (positions[None, :] < context_lens[:, None]) & (in_page < page_size)
        visible = (positions[None, None, :] <= query_positions[:, :, None]) & written[:, None, :]
        if window is not None:
            visible &= positions[None, None, :] > query_positions[:, :, None] - window
        visible = jnp.broadcast_to(visible[:, None, None], (rows, kv_heads, group, num_queries, width))

        keys = _widen(_take_pages(key_pages, page_ids), width, axis=3).reshape(batch, head_dim, width)
        values = _widen(_widen(_take_pages(value_pages, page_ids), width, axis=2), value_width, axis=3)
        values = jnp.where(written[:, None, :, None], values, 0.0).reshape(batch, width, value_width)
        scores = jax.lax.dot_general(grouped, keys, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        return _accumulate(carry, scores, values, visible.reshape(batch, stacked, width))

    running = _start(sinks, (rows, kv_heads, group, num_queries), value_width)
    columns = (jnp.max(context_lens) + page_size - 1) // page_size
    _, total, mixed = jax.lax.fori_loop(0, columns, column, running)

    out = (mixed / jnp.where(total > 0, total, 1.0)[..., :1])[..., :value_dim]
    out = out.reshape(rows, kv_heads, group, num_queries, value_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, num_queries, heads, value_dim)


def _start(sinks: jax.Array | None, shape: tuple[int, int, int, int], value_width: int) -> _Running:
    """Accumulators before the first column, for ``shape`` (rows, kv_heads, group, queries)."""
    rows, kv_heads, group, num_queries = shape
    flat = (rows * kv_heads, group * num_queries, _LANES)
    mixed = jnp.zeros((*flat[:2], value_width), jnp.float32)
    if sinks is None:
        return jnp.full(flat, _MASKED, jnp.float32), jnp.zeros(flat, jnp.float32), mixed
    sink = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1, 1)
    return jnp.broadcast_to(sink, (*shape, _LANES)).reshape(flat), jnp.ones(flat, jnp.float32), mixed


def _accumulate(running: _Running, scores: jax.Array, values: jax.Array, visible: jax.Array) -> _Running:
    """Takes in one column's ``scores [batch, stacked, width]`` and ``values [batch, width, value_width]``."""
    top, total, mixed = running
    scores = jnp.where(visible, scores, _MASKED)
    new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - new_top[..., :1]), 0.0)
    shrink = jnp.exp(top - new_top)
    part = jax.lax.dot_general(weights, values, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return new_top, total * shrink + _row_sums(weights), mixed * shrink[..., :1] + part


def _row_sums(weights: jax.Array) -> jax.Array:
    """``[batch, rows, width]`` -> ``[batch, rows, _LANES]``, each sum in every lane: a product with ones."""
    batch, rows, width = weights.shape
    flat = weights.reshape(batch * rows, width)
    ones = jnp.ones((_LANES, width), jnp.float32)
    sums = jax.lax.dot_general(flat, ones, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return sums.reshape(batch, rows, _LANES)


def _widen(x: jax.Array, width: int, axis: int) -> jax.Array:
    """Zeros at the end of ``axis``, up to ``width``."""
    if x.shape[axis] == width:
        return x
    return jnp.pad(x, [(0, width - x.shape[axis] if axis == a else 0) for a in range(x.ndim)])


def _take_pages(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """``pages[page_ids]`` as float32.

    uint16 pages are gathered, taken for the bfloat16 numbers that they hold and converted in one loop.  float32
    pages have nothing to convert; there a gather of flat rows, copied in whole, takes a third of the time.
    """
    if pages.dtype == np.uint16:
        return jax.lax.bitcast_convert_type(pages[page_ids], jnp.bfloat16).astype(jnp.float32)
    flat = pages.reshape(pages.shape[0], -1)[page_ids]
    return flat.reshape(-1, *pages.shape[1:]).astype(jnp.float32)
