"""The cache write as one scatter. The readable twin of every backend."""

from __future__ import annotations

import jax.numpy as jnp

from precast.kernels_pallas import layout


def cache_update(pages, keys, values, page_table, context_lens, q_starts, *, target, scales=None):
    """See ``api.cache_update``."""
    del target
    num_pages, page_size, _ = pages.shape
    position = q_starts[:, None] + jnp.arange(keys.shape[1])
    page = jnp.take_along_axis(page_table, position // page_size, axis=1, mode="clip")
    page = jnp.where(position < context_lens[:, None], page, num_pages)
    offset = position % page_size

    lanes, token_scales = layout.quantize_tokens(keys, values, pages.dtype)
    pages = pages.at[page, offset].set(lanes, mode="drop")
    if scales is not None and token_scales is not None:
        column = jnp.arange(token_scales.shape[-1]) * page_size + offset[..., None]
        scales = scales.at[page[..., None], 0, column].set(token_scales, mode="drop")
    return pages, scales
