"""Paged attention for XLA's CPU backend: a loop over page columns with a running softmax.

Plain XLA operations, no Pallas: on a CPU the compiler's own small matrix products are the fastest kernel at
hand.  The loop's trip count follows the longest live context of the call, not the width of the page table.
The running softmax is that of FlashAttention (arXiv:2205.14135), one page a block.

A column in which a row has no visible key leaves that row's accumulators bit for bit as they were, so a row's
result does not depend on how long its neighbours are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_MASKED = -1e30


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
    stacked = group * num_queries
    batch = rows * kv_heads

    grouped = queries.reshape(rows, num_queries, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = (grouped * scale).reshape(batch, stacked, head_dim)
    query_positions = q_starts[:, None] + jnp.arange(num_queries, dtype=jnp.int32)
    in_page = jnp.arange(page_size, dtype=jnp.int32)

    def column(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        top, total, mixed = carry
        page_ids = jax.lax.dynamic_index_in_dim(page_table, index, axis=1, keepdims=False)
        positions = index * page_size + in_page
        written = positions[None, :] < context_lens[:, None]
        visible = (positions[None, None, :] <= query_positions[:, :, None]) & written[:, None, :]
        if window is not None:
            visible &= positions[None, None, :] > query_positions[:, :, None] - window
        visible = jnp.broadcast_to(visible[:, None, None], (rows, kv_heads, group, num_queries, page_size))
        visible = visible.reshape(batch, stacked, page_size)

        keys = _decode(key_pages[page_ids]).reshape(batch, head_dim, page_size)
        values = jnp.where(written[:, None, :, None], _decode(value_pages[page_ids]), 0.0)
        values = values.reshape(batch, page_size, value_dim)
        scores = jax.lax.dot_general(grouped, keys, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, _MASKED)

        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        part = jax.lax.dot_general(weights, values, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        return new_top, total * shrink + _row_sums(weights), mixed * shrink[..., None] + part

    if sinks is None:
        top = jnp.full((batch, stacked), _MASKED, jnp.float32)
        total = jnp.zeros((batch, stacked), jnp.float32)
    else:
        sink = jnp.broadcast_to(sinks.reshape(1, kv_heads, group, 1), (rows, kv_heads, group, num_queries))
        top = sink.reshape(batch, stacked).astype(jnp.float32)
        total = jnp.ones((batch, stacked), jnp.float32)
    mixed = jnp.zeros((batch, stacked, value_dim), jnp.float32)
    columns = (jnp.max(context_lens) + page_size - 1) // page_size
    _, total, mixed = jax.lax.fori_loop(0, columns, column, (top, total, mixed))

    out = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.reshape(rows, kv_heads, group, num_queries, value_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, num_queries, heads, value_dim)


def _row_sums(weights: jax.Array) -> jax.Array:
    """Sums ``[batch, rows, page_size]`` over the page as a product with ones: unlike a reduction, whose loop XLA
    arranges by the shape, it adds in one order however many rows there are."""
    batch, rows, page_size = weights.shape
    flat = weights.reshape(batch * rows, page_size)
    ones = jnp.ones((8, page_size), jnp.float32)
    sums = jax.lax.dot_general(flat, ones, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return sums[:, 0].reshape(batch, rows)


def _decode(pages: jax.Array) -> jax.Array:
    if pages.dtype == np.uint16:
        pages = jax.lax.bitcast_convert_type(pages, jnp.bfloat16)
    return pages.astype(jnp.float32)
