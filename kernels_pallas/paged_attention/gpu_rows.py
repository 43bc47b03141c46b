"""The Hopper kernel for many queries: scores are ``q @ K^T``, outputs ``P @ V``.

One warpgroup copies blocks of the cache into shared memory, one or two others each fold them into 64 (query, head)
pairs: while one is busy with its softmax the other has the tensor cores.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from precast.kernels_pallas.gpu_ops import Ops
from precast.kernels_pallas.paged_attention import gpu_common
from precast.kernels_pallas.paged_attention.gpu_common import GRID, LOG2E, LOWEST_TOP, MASKED, Spec

_ROWS = 64


def attend(spec: Spec, ops: Ops, queries, pages, page_table, context_lens, q_starts, scales, cost):
    """Queries ``[rows, kv_heads, tiles * tile, head_dim]`` -> the parts that ``gpu._combine`` joins."""
    assert scales is None, "quantised pages go to gpu_swapped"
    rows, kv_heads = queries.shape[:2]
    groups = spec.tile // _ROWS
    inputs = {"queries": queries, "pages": pages, "table": page_table, "lens": context_lens, "starts": q_starts}
    pairs = (spec.splits, rows, kv_heads, spec.tiles * spec.tile)
    outputs = {
        "out": jax.ShapeDtypeStruct((*pairs, spec.value_dim), jnp.dtype(spec.out_dtype)),
        "top": jax.ShapeDtypeStruct(pairs, jnp.float32),
        "total": jax.ShapeDtypeStruct(pairs, jnp.float32),
    }
    scratch = {
        "kv": gpu_common.tiled((spec.slots, spec.block, spec.lanes), spec.kv_dtype, spec.head_dim),
        "q": gpu_common.tiled((groups, _ROWS, spec.head_dim), spec.compute_dtype, spec.head_dim),
        "full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=spec.slots),
        "used": plgpu.Barrier(num_arrivals=groups, num_barriers=spec.slots),
        "q_full": plgpu.Barrier(num_barriers=groups),
        "cleared": plgpu.Barrier(num_arrivals=groups),
    }
    names = (*inputs, *outputs, *scratch)

    def body(*refs):
        _kernel(spec, ops, dict(zip(names, refs, strict=True)))

    return ops.kernel(
        body,
        cost,
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        grid=(rows, spec.splits, spec.tiles, kv_heads),
        grid_names=GRID,
        num_threads=groups + 1,
        thread_name="warpgroup",
    )(*inputs.values())


def _kernel(spec: Spec, ops: Ops, refs) -> None:
    groups = spec.tile // _ROWS
    warpgroup = lax.axis_index("warpgroup")
    here = gpu_common.part(spec, refs["lens"], refs["starts"])

    @pl.when(warpgroup < groups)
    def _():
        plgpu.set_max_registers(232 if groups == 2 else 248, action="increase")
        _compute(spec, ops, refs, here, warpgroup)

    @pl.when(warpgroup == groups)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        for slot in range(spec.slots):

            @pl.when(slot < here.count)
            def _(slot=slot):
                gpu_common.fetch(spec, here, here.first + slot, slot, refs)

        @pl.loop(0, here.count - spec.slots)
        def _(i):
            slot = i % spec.slots
            plgpu.barrier_wait(refs["used"].at[slot])
            gpu_common.fetch(spec, here, here.first + i + spec.slots, slot, refs)


def _compute(spec: Spec, ops: Ops, refs, here, warpgroup) -> None:
    first_pair = here.first_pair + warpgroup * _ROWS
    split, head = lax.axis_index("split"), lax.axis_index("head")
    own = pl.ds(first_pair, _ROWS)
    query = refs["q"].at[warpgroup]
    plgpu.copy_gmem_to_smem(refs["queries"].at[here.row, head, own], query, refs["q_full"].at[warpgroup])
    plgpu.barrier_wait(refs["q_full"].at[warpgroup])

    def fold(i, carry, masked):
        slot = i % spec.slots
        plgpu.barrier_wait(refs["full"].at[slot])
        carry = _fold(spec, ops, refs, here, here.first + i, slot, warpgroup, carry, masked=masked)
        plgpu.barrier_arrive(refs["used"].at[slot])
        return carry

    acc = ops.full((_ROWS, spec.value_dim), 0.0, ops.layout)
    top = ops.full((_ROWS,), LOWEST_TOP, ops.layout.reduce(1))
    total = ops.full((_ROWS,), 0.0, ops.layout.reduce(1))
    carry = lax.fori_loop(0, here.whole, functools.partial(fold, masked=False), (acc, top, total))
    acc, top, total = lax.fori_loop(here.whole, here.count, functools.partial(fold, masked=True), carry)
    ops.store(refs["out"].at[split, here.row, head, own], gpu_common.normalised(spec, ops, acc, total, 0))
    # back from units of log2(e)
    ops.store(refs["top"].at[split, here.row, head, own], top / LOG2E)
    ops.store(refs["total"].at[split, here.row, head, own], total)


def _fold(spec: Spec, ops: Ops, refs, here, block, slot, warpgroup, carry, *, masked: bool):
    """Fold one block of the cache into the running softmax of a warpgroup's pairs."""
    acc, top, total = carry
    shape = (_ROWS, spec.block)
    keys = refs["kv"].at[slot, :, pl.ds(0, spec.head_dim)]
    scores = gpu_common.scaled(spec, ops.product(refs["q"].at[warpgroup], keys, shape, refs, b_t=True))
    if masked:
        key = block * spec.block + ops.iota(shape, 1)
        pair = warpgroup * _ROWS + ops.iota(shape, 0)
        scores = jnp.where(gpu_common.visible(spec, here, key, pair), scores, MASKED)
    top_before, top = top, jnp.maximum(top, scores.max(axis=1))
    weights = jnp.exp2(scores - ops.spread(top, shape, 0))
    shrink = jnp.exp2(top_before - top)
    total = total * shrink + weights.sum(axis=1)
    acc *= ops.spread(shrink, acc.shape, 0)
    values = refs["kv"].at[slot, :, spec.value_lanes]

    if masked:

        @pl.when((block + 1) * spec.block > here.context)
        def _():
            gpu_common.clear_tail(spec, ops, values, block, here.context, warpgroup, spec.tile // _ROWS)
            plgpu.barrier_arrive(refs["cleared"])
            plgpu.barrier_wait(refs["cleared"])

    narrow = weights.astype(spec.compute_dtype)
    # nothing of the scores may be kept past here: registers are short
    acc, top, total, narrow = lax.optimization_barrier((acc, top, total, narrow))
    acc = ops.product(narrow, values, acc.shape, refs, acc=acc)
    return acc, top, total
