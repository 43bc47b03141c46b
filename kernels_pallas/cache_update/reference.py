"""The cache write as one scatter. The readable twin of every backend."""

from __future__ import annotations

import jax.numpy as jnp

from precast.kernels_pallas import layout


def cache_update(pages, keys, values, page_table, context_lens, q_starts, *, target, scales=None):
    """See ``api.cache_update``."""
    del target
    lanes, token_scales = layout.quantize_tokens(keys, values, pages.dtype)
    page, offset = places(page_table, context_lens, q_starts, keys.shape[1], pages)
    if scales is not None and token_scales is not None:
        scales = scatter_scales(scales, token_scales, page, offset, pages.shape[1])
    return pages.at[page, offset].set(lanes, mode="drop"), scales


def places(page_table, context_lens, q_starts, q: int, pages):
    """Where each of ``q`` new tokens goes: its page (past the last one when it is to be dropped) and its place there,
    ``[rows, q]`` each."""
    num_pages, page_size, _ = pages.shape
    position = q_starts[:, None] + jnp.arange(q)
    page = jnp.take_along_axis(page_table, position // page_size, axis=1, mode="clip")
    return jnp.where(position < context_lens[:, None], page, num_pages), position % page_size


def scatter_scales(scales, token_scales, page, offset, page_size: int):
    """Put the scales ``[rows, q, kv_heads * sides]`` of new tokens into ``scales [pages, 1, lanes]``."""
    lane = jnp.arange(token_scales.shape[-1]) * page_size + offset[..., None]
    return scales.at[page[..., None], 0, lane].set(token_scales, mode="drop")
