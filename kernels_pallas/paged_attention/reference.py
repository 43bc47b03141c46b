"""Paged attention in plain jax.numpy: gather, mask, softmax. The readable twin of every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from precast.kernels_pallas import layout


def paged_attention(queries, pages, page_table, context_lens, q_starts, *, config, target, sinks=None, scales=None):
    """See ``api.paged_attention``. All arithmetic is float32; the memory is that of a dense copy of the context."""
    del target
    rows, q, heads, head_dim = queries.shape
    kv_heads, page_size = config.num_kv_heads, pages.shape[1]
    tokens = page_table.shape[1] * page_size

    lanes = pages.at[page_table].get(mode="clip").astype(jnp.float32)
    keys, values = layout.unpack_tokens(lanes, kv_heads, head_dim, config.value_dim)
    if scales is not None:
        row = scales[:, 0].at[page_table].get(mode="clip")
        k_scale, v_scale = layout.unpack_scales(row, kv_heads, page_size, config.value_dim is not None)
        keys, values = keys * k_scale[..., None], values * v_scale[..., None]
    keys = keys.reshape(rows, tokens, kv_heads, -1)
    values = values.reshape(rows, tokens, kv_heads, -1)

    key_pos = jnp.arange(tokens)
    query_pos = q_starts[:, None] + jnp.arange(q)
    live = key_pos < context_lens[:, None]
    seen = live[:, None, :] & (key_pos <= query_pos[:, :, None])
    if config.window is not None:
        seen &= key_pos > query_pos[:, :, None] - config.window
    seen = seen[:, None, None]
    keys = jnp.where(live[:, :, None, None], keys, 0.0)
    values = jnp.where(live[:, :, None, None], values, 0.0)

    grouped = queries.astype(jnp.float32).reshape(rows, q, kv_heads, heads // kv_heads, head_dim)
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("rqhgd,rthd->rhgqt", grouped, keys, precision=precision) * config.scale
    if config.soft_cap is not None:
        scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    # without sinks the top of an unseen row is -inf: any finite stand-in gives weights of zero
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink - top)
    weights /= jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("rhgqt,rthd->rqhgd", weights, values, precision=precision)
    return out.reshape(rows, q, heads, -1).astype(queries.dtype)
