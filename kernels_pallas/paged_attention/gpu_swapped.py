"""The kernel for few queries: scores are ``K @ q^T``, outputs ``V^T @ P``.

One warpgroup a block of the grid, several blocks an SM: while one waits for memory the others compute, and each keeps
``slots`` blocks of the cache in flight.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from precast.kernels_pallas.gpu_ops import Ops
from precast.kernels_pallas.paged_attention import gpu_common
from precast.kernels_pallas.paged_attention.gpu_common import GRID, LOG2E, LOWEST_TOP, MASKED, Spec


def attend(spec: Spec, ops: Ops, queries, pages, page_table, context_lens, q_starts, scales, cost):
    """Queries ``[rows, kv_heads, tiles * tile, head_dim]`` -> the parts that ``gpu._combine`` joins."""
    rows, kv_heads = queries.shape[:2]
    scratch = {
        "kv": gpu_common.tiled((spec.slots, spec.block, spec.lanes), spec.kv_dtype, spec.head_dim),
        "q": gpu_common.tiled((spec.tile, spec.head_dim), spec.compute_dtype, spec.head_dim),
        "p": gpu_common.tiled((spec.tile, spec.block), spec.compute_dtype, spec.block),
        "full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=spec.slots),
        "q_full": plgpu.Barrier(),
        **ops.product_scratch((spec.block, spec.tile)),
    }
    inputs = {"queries": queries, "pages": pages, "table": page_table, "lens": context_lens, "starts": q_starts}
    if spec.quantized:
        inputs["scales"] = scales
        scratch["kv_scales"] = plgpu.SMEM((spec.slots, 2, spec.block), jnp.float32)
        scratch["values"] = gpu_common.tiled((spec.block, spec.value_dim), spec.compute_dtype, spec.value_dim)
    each = (spec.splits, rows, kv_heads, spec.tiles)
    outputs = {
        "out": jax.ShapeDtypeStruct((*each, spec.value_dim, spec.tile), jnp.dtype(spec.out_dtype)),
        "top": jax.ShapeDtypeStruct((*each, spec.tile), jnp.float32),
        "total": jax.ShapeDtypeStruct((*each, spec.tile), jnp.float32),
    }
    names = (*inputs, *outputs, *scratch)

    def body(*refs):
        _kernel(spec, ops, dict(zip(names, refs, strict=True)))

    out, top, total = ops.kernel(
        body,
        cost,
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        grid=(rows, spec.splits, spec.tiles, kv_heads),
        grid_names=GRID,
    )(*inputs.values())
    pairs = (spec.splits, rows, kv_heads, spec.tiles * spec.tile)
    out = jnp.swapaxes(out, -1, -2).reshape(*pairs, spec.value_dim)
    return out, top.reshape(pairs), total.reshape(pairs)


def _kernel(spec: Spec, ops: Ops, refs) -> None:
    here = gpu_common.part(spec, refs["lens"], refs["starts"])
    index = lax.axis_index("split"), here.row, lax.axis_index("head"), here.tile
    queries = refs["queries"].at[here.row, index[2], pl.ds(here.first_pair, spec.tile)]

    for slot in range(spec.slots):

        @pl.when(slot < here.count)
        def _(slot=slot):
            gpu_common.fetch(spec, here, here.first + slot, slot, refs)

    plgpu.copy_gmem_to_smem(queries, refs["q"], refs["q_full"])
    plgpu.barrier_wait(refs["q_full"])

    def fold(i, carry):
        slot = i % spec.slots
        plgpu.barrier_wait(refs["full"].at[slot])
        carry = _fold(spec, ops, refs, here, here.first + i, slot, carry)

        @pl.when(i + spec.slots < here.count)
        def _():
            gpu_common.fetch(spec, here, here.first + i + spec.slots, slot, refs)

        return carry

    acc = ops.full((spec.value_dim, spec.tile), 0.0, ops.layout)
    top = ops.full((spec.tile,), LOWEST_TOP, ops.layout.reduce(0))
    total = ops.full((spec.tile,), 0.0, ops.layout.reduce(0))
    acc, top, total = lax.fori_loop(0, here.count, fold, (acc, top, total))
    ops.store(refs["out"].at[index], gpu_common.normalised(spec, ops, acc, total, 1))
    # back from units of log2(e)
    ops.store(refs["top"].at[index], top / LOG2E)
    ops.store(refs["total"].at[index], total)


def _fold(spec: Spec, ops: Ops, refs, here, block, slot, carry):
    """Fold one block of the cache into the running softmax of every (query, head) pair."""
    acc, top, total = carry
    shape = (spec.block, spec.tile)
    keys = refs["kv"].at[slot, :, pl.ds(0, spec.head_dim)]
    if spec.quantized:
        keys = _dequantized(spec, ops, keys)
    scores = ops.product(keys, refs["q"], shape, refs, b_t=True)
    if spec.quantized:
        k_scale = ops.load(refs["kv_scales"].at[slot, 0], ops.layout.reduce(1))
        scores *= ops.spread(k_scale, shape, 0)
    scores = gpu_common.scaled(spec, scores)
    key = block * spec.block + ops.iota(shape, 0)
    pair = ops.iota(shape, 1)
    seen = gpu_common.visible(spec, here, key, pair)
    scores = jnp.where(seen, scores, MASKED)
    top_before, top = top, jnp.maximum(top, scores.max(axis=0))
    weights = jnp.exp2(scores - ops.spread(top, shape, 1))
    shrink = jnp.exp2(top_before - top)
    total = total * shrink + weights.sum(axis=0)
    acc *= ops.spread(shrink, acc.shape, 1)
    if spec.quantized:
        v_scale = ops.load(refs["kv_scales"].at[slot, 1], ops.layout.reduce(1))
        weights = jnp.where(seen, weights * ops.spread(v_scale, shape, 0), 0.0)
    values = _values(spec, ops, refs, here, block, slot)
    ops.store_transposed(refs["p"], weights.astype(spec.compute_dtype))
    acc = ops.product(values, refs["p"], acc.shape, refs, a_t=True, b_t=True, acc=acc)
    return acc, top, total


def _dequantized(spec: Spec, ops: Ops, ref):
    """8-bit shared memory -> 16-bit registers that the tensor cores take as their left operand."""
    held = ops.load(ref, plgpu.Layout.WGMMA_UPCAST_2X)
    return ops.cast(held.astype(spec.compute_dtype), plgpu.Layout.WGMMA)


def _values(spec: Spec, ops: Ops, refs, here, block, slot):
    """The block's values as a 16-bit ref without what lies past the context."""
    ref = refs["kv"].at[slot, :, spec.value_lanes]
    if not spec.quantized:

        @pl.when((block + 1) * spec.block > here.context)
        def _():
            gpu_common.clear_tail(spec, ops, ref, block, here.context)

        return ref

    values = _dequantized(spec, ops, ref)
    if spec.kv_dtype.startswith("float8"):
        key = block * spec.block + ops.iota(values.shape, 0)
        values = jnp.where(key < here.context, values, jnp.zeros_like(values))
    refs["values"][...] = values
    return refs["values"]
