"""What a kernel call moves and computes, for its cost estimate (every table entry live) and for planners (live tokens).

XLA counts a kernel as nothing unless it is told; a plan's predictions would miss the cache.
"""

from __future__ import annotations

from jax.experimental import pallas as pl

from precast.kernels_pallas import layout


def attention(queries, pages, config, tokens: int) -> pl.CostEstimate:
    """Cost of ``paged_attention`` over ``tokens`` of the cache, summed over rows: each is read once, with its scales.

    Args:
        queries, pages: the arrays of one shard's call, or their shapes; queries ``[rows, q, heads, head_dim]``.
        config: its AttentionConfig.
        tokens: tokens that the rows' queries see; a chunk's causal half is not subtracted from the flops.
    """
    _, q, heads, head_dim = queries.shape
    value_dim = config.value_dim or head_dim
    pairs = tokens * q * heads
    ends = queries.size // head_dim * (head_dim + value_dim) * queries.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * pairs * (head_dim + value_dim),
        bytes_accessed=tokens * token_bytes(pages, config) + ends,
        transcendentals=pairs,
    )


def token_bytes(pages, config) -> int:
    """Bytes of one token in the pages of one shard ``[pages, page_size, lanes]``, its scales included."""
    row = pages.shape[2] * pages.dtype.itemsize
    if not layout.is_quantized(pages.dtype):
        return row
    page_size = pages.shape[1]
    return row + layout.scale_lanes(config.num_kv_heads, page_size, config.value_dim) * 4 // page_size


def update(pages, tokens: int) -> pl.CostEstimate:
    """Cost of ``cache_update`` where it reads and writes ``tokens`` of the pages ``[pages, page_size, lanes]``."""
    moved = 2 * tokens * pages.shape[2] * pages.dtype.itemsize
    return pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0)
