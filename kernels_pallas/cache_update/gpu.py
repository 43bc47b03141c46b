"""The cache write for NVIDIA Hopper and Blackwell (Pallas, Mosaic GPU): each block of the grid stores a token's lanes.

The few scales of quantised pages are left to XLA's scatter, which updates donated float32 arrays in place.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from precast.kernels_pallas import costs, layout
from precast.kernels_pallas.cache_update import reference
from precast.kernels_pallas.gpu_ops import Ops


def cache_update(pages, keys, values, page_table, context_lens, q_starts, *, target, scales=None):
    """See ``api.cache_update``.

    Raises:
        NotImplementedError: a chip that is neither Hopper nor Blackwell.
    """
    if target.gpu.sm not in ("sm_90a", "sm_100a"):
        raise NotImplementedError(
            f"cache update on {target.gpu.name}: Mosaic GPU compiles for Hopper and Blackwell, not for "
            f"{target.gpu.sm}; choose the backend 'reference' there"
        )
    rows, q = keys.shape[:2]
    page_size = pages.shape[1]
    lanes, token_scales = layout.quantize_tokens(keys, values, pages.dtype)

    def write_token(cache, lens, starts, table, new):
        row, i = lax.axis_index("row"), lax.axis_index("token")
        position = starts[row] + i

        @pl.when(position < lens[row])
        def _():
            page = table[row, position // page_size]
            cache.at[page, position % page_size][...] = new.at[row, i][...]

    ops = Ops(target.gpu.sm, target.interpret)
    cache = jax.new_ref(pages, memory_space=plgpu.GMEM)
    write: Any = pl.kernel(
        write_token,
        out_type=(),
        mesh=plgpu.Mesh(grid=(rows, q), grid_names=("row", "token")),
        compiler_params=ops.compiler_params,
        cost_estimate=costs.update(pages, rows * q),
        interpret=ops.params,
    )
    with jax.named_scope("precast_cache_update"):
        write(cache, context_lens, q_starts, page_table, lanes)
    if scales is not None and token_scales is not None:
        page, offset = reference.places(page_table, context_lens, q_starts, q, pages)
        scales = reference.scatter_scales(scales, token_scales, page, offset, page_size)
    return jax.freeze(cache), scales
