"""Paged attention for TPU (Pallas, Mosaic): one kernel for decode, verify and chunk prefill.

The grid walks over (row, block of queries).  Each step copies the row's live pages from HBM, a block of pages at a
time into one of two buffers, and folds the block into a running softmax (FlashAttention, arXiv:2205.14135) for every
KV head while the next block is on its way.  The first block of the next step is asked for during the last block of
this one, so short rows do not wait for memory.  Work follows the live context: neither the width of the table nor the
longest row of the batch costs anything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from precast.kernels_pallas import costs, layout
from precast.kernels_pallas.paged_attention.tuning import tpu_blocks

# Table entries that fit in scalar memory (1 MiB) beside what the compiler keeps there.
_TABLE_LIMIT = 200_000
# A masked score, and where a running top starts: far enough above it that exp(_MASKED - top) is always zero.
_MASKED = -1e30
_LOWEST_TOP = -1e29


@dataclass(frozen=True)
class _Spec:
    """What the kernel body is specialised on. ``m`` is the rows of a product: queries of a block times the group."""

    q: int
    q_block: int
    q_blocks: int
    group: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent: bool
    page_size: int
    block_pages: int
    width: int
    steps: int
    scale: float
    window: int | None
    soft_cap: float | None
    compute_dtype: str

    @property
    def m(self) -> int:
        return self.q_block * self.group

    @property
    def block(self) -> int:
        return self.block_pages * self.page_size

    def lanes(self, head: int, side: int) -> slice:
        """Where a token's K (side 0) or V (side 1) of a head lies."""
        first = 0 if self.latent else (2 * head + side) * self.head_dim
        return slice(first, first + (self.value_dim if side else self.head_dim))

    def scale_row(self, head: int, side: int) -> slice:
        first = 0 if self.latent else (2 * head + side) * self.page_size
        return slice(first, first + self.page_size)


def paged_attention(queries, pages, page_table, context_lens, q_starts, *, config, target, sinks=None, scales=None):
    """See ``api.paged_attention``.

    Raises:
        NotImplementedError: float16, a page table beyond scalar memory, or buffers beyond the chip's VMEM.
    """
    rows, q, heads, head_dim = queries.shape
    kv_heads, group = config.num_kv_heads, heads // config.num_kv_heads
    page_size, width = pages.shape[1], page_table.shape[1]
    if jnp.float16 in (pages.dtype, queries.dtype):
        raise NotImplementedError("paged attention on TPU: float16 has no matrix product there; use bfloat16")
    if rows * width > _TABLE_LIMIT:
        raise NotImplementedError(
            f"paged attention on TPU: a page table of {rows} x {width} entries is over the {_TABLE_LIMIT} that scalar "
            f"memory holds; use pages larger than {page_size} tokens or fewer rows"
        )
    kv_block, q_block = tpu_blocks(queries, pages, config, target.tpu)
    spec = _Spec(
        q=q,
        q_block=q_block,
        q_blocks=-(-q // q_block),
        group=group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=config.value_dim or head_dim,
        latent=config.value_dim is not None,
        page_size=page_size,
        block_pages=kv_block // page_size,
        width=width,
        steps=rows * -(-q // q_block),
        scale=config.scale,
        window=config.window,
        soft_cap=config.soft_cap,
        compute_dtype="float32" if pages.dtype == jnp.float32 else "bfloat16",
    )
    padded = spec.q_blocks * q_block
    grouped = jnp.pad(queries, ((0, 0), (0, padded - q), (0, 0), (0, 0)))
    grouped = grouped.reshape(rows, padded, kv_heads, group, head_dim).swapaxes(1, 2)
    grouped = grouped.reshape(rows, kv_heads, padded * group, head_dim)
    # at most: every table entry live
    cost = costs.attention(queries, pages, config, page_table.size * page_size)
    out = _call(spec, grouped, pages, page_table, context_lens, q_starts, sinks, scales, target, cost)
    out = out.reshape(rows, kv_heads, padded, group, spec.value_dim).swapaxes(1, 2)
    return out[:, :q].reshape(rows, q, heads, spec.value_dim)


def _call(spec, queries, pages, page_table, context_lens, q_starts, sinks, scales, target, cost):
    """Queries ``[rows, kv_heads, q * group, head_dim]`` -> ``[rows, kv_heads, q * group, value_dim]``."""
    kv_heads = queries.shape[1]
    parts = target.tpu.cores if spec.steps % target.tpu.cores == 0 else 1
    per_part = spec.steps // parts

    def q_index(part, i, *_):
        step = part * per_part + i
        return step // spec.q_blocks, 0, step % spec.q_blocks, 0

    inputs = [queries]
    in_specs = [pl.BlockSpec((1, kv_heads, spec.m, spec.head_dim), q_index)]
    if sinks is not None:
        by_head = sinks.astype(jnp.float32).reshape(kv_heads, 1, spec.group)
        inputs.append(jnp.tile(by_head, (1, spec.q_block, 1)).reshape(kv_heads, spec.m, 1))
        in_specs.append(pl.BlockSpec((kv_heads, spec.m, 1), lambda *_: (0, 0, 0)))
    lanes = pages.shape[2]
    scratch = {
        "buffers": pltpu.VMEM((2, spec.block_pages, spec.page_size, lanes), pages.dtype),
        "semaphores": pltpu.SemaphoreType.DMA((2, 2)),
        "slot": pltpu.SMEM((1,), jnp.int32),
        "acc": pltpu.VMEM((kv_heads, spec.m, spec.value_dim), jnp.float32),
        "top": pltpu.VMEM((kv_heads, spec.m, layout.LANES), jnp.float32),
        "total": pltpu.VMEM((kv_heads, spec.m, layout.LANES), jnp.float32),
    }
    inputs.append(pages)
    in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
    if scales is not None:
        inputs.append(scales)
        in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        scratch["scale_buffers"] = pltpu.VMEM((2, spec.block_pages, 1, scales.shape[2]), jnp.float32)

    names = ["queries"] + ["sinks"] * (sinks is not None) + ["pages"] + ["scales"] * (scales is not None)
    return pl.pallas_call(
        functools.partial(_named_kernel, spec, per_part, (*names, "out", *scratch)),
        out_shape=jax.ShapeDtypeStruct((*queries.shape[:3], spec.value_dim), queries.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(parts, per_part),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, kv_heads, spec.m, spec.value_dim), q_index),
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=int(target.tpu.vmem_bytes * 0.9)
        ),
        cost_estimate=cost,
        interpret=pltpu.InterpretParams(detect_races=True) if target.interpret else False,
        name="precast_paged_attention",
    )(context_lens, q_starts, page_table.reshape(-1), *inputs)


def _named_kernel(spec, per_part, names, lens, starts, table, *arrays):
    refs = dict(zip(names, arrays, strict=True))
    part, i = pl.program_id(0), pl.program_id(1)
    step = part * per_part + i
    copies = _Copies(spec, lens, starts, table, refs)
    first, last, end = copies.span(step)
    slot = jnp.where(i == 0, jnp.int32(0), refs["slot"][0])
    first_before, last_before = copies.span(jnp.maximum(step - 1, 0))[:2]
    asked_for = (i > 0) & (last_before > first_before)

    @pl.when((last > first) & ~asked_for)
    def _():
        copies.start(step, first, slot)

    _reset(spec, refs)

    def fold_block(b, carry):
        here = (slot + b - first) % 2

        @pl.when(b + 1 < last)
        def _():
            copies.start(step, b + 1, 1 - here)

        @pl.when((b + 1 == last) & (i + 1 < per_part))
        def _():
            following = jnp.minimum(step + 1, spec.steps - 1)
            copies.start(following, copies.span(following)[0], 1 - here)

        copies.wait(step, b, here)

        @pl.when((b + 1) * spec.block > end)
        def _():
            _clear_tail(spec, refs, here, end - b * spec.block)

        first_query = starts[step // spec.q_blocks] + (step % spec.q_blocks) * spec.q_block
        seen = _visible(spec, first_query, b * spec.block, end)
        for head in range(spec.kv_heads):
            _fold_head(spec, refs, here, head, seen)
        return carry

    lax.fori_loop(first, last, fold_block, 0)
    refs["slot"][0] = (slot + last - first) % 2
    for head in range(spec.kv_heads):
        total = refs["total"][head][:, :1]
        out = refs["acc"][head] / jnp.where(total > 0, total, 1.0)
        refs["out"][0, head] = out.astype(refs["out"].dtype)


class _Copies:
    """The copies of a step's pages from HBM to the buffers."""

    def __init__(self, spec, lens, starts, table, refs):
        self.spec, self.lens, self.starts, self.table, self.refs = spec, lens, starts, table, refs

    def span(self, step):
        """(first block, block after the last, token after the last) that the step's queries see."""
        spec, row = self.spec, step // self.spec.q_blocks
        first_query = self.starts[row] + (step % spec.q_blocks) * spec.q_block
        after_query = jnp.minimum(first_query + spec.q_block, self.starts[row] + spec.q)
        end = jnp.minimum(self.lens[row], after_query)
        begin = 0 if spec.window is None else jnp.maximum(first_query - spec.window + 1, 0)
        first = begin // spec.block
        return first, jnp.maximum(pl.cdiv(end, spec.block), first), end

    def start(self, step, block, slot):
        self._each_page(step, block, slot, lambda copy: copy.start())

    def wait(self, step, block, slot):
        self._each_page(step, block, slot, lambda copy: copy.wait())

    def _each_page(self, step, block, slot, act):
        spec, refs = self.spec, self.refs
        first, last, end = self.span(step)
        count = jnp.minimum(pl.cdiv(end, spec.page_size) - block * spec.block_pages, spec.block_pages)
        count = jnp.where(last > first, count, 0)
        entry = step // spec.q_blocks * spec.width + block * spec.block_pages

        def one(j, _):
            page = self.table[entry + j]
            semaphores = refs["semaphores"].at[slot]
            act(pltpu.make_async_copy(refs["pages"].at[page], refs["buffers"].at[slot, j], semaphores.at[0]))
            if "scales" in refs:
                source, target = refs["scales"].at[page], refs["scale_buffers"].at[slot, j]
                act(pltpu.make_async_copy(source, target, semaphores.at[1]))

        lax.fori_loop(0, count, one, None)


def _reset(spec, refs):
    refs["acc"][...] = jnp.zeros_like(refs["acc"])
    if "sinks" in refs:
        refs["top"][...] = jnp.broadcast_to(refs["sinks"][...], refs["top"].shape)
        refs["total"][...] = jnp.ones_like(refs["total"])
    else:
        refs["top"][...] = jnp.full_like(refs["top"], _LOWEST_TOP)
        refs["total"][...] = jnp.zeros_like(refs["total"])


def _clear_tail(spec, refs, slot, live):
    """Zero what a buffer holds past its ``live`` tokens: never copied, or written by nobody, it may be NaN."""
    buffer = refs["buffers"].at[slot]
    shape = (spec.block_pages, spec.page_size, 1)
    token = lax.broadcasted_iota(jnp.int32, shape, 0) * spec.page_size + lax.broadcasted_iota(jnp.int32, shape, 1)
    held = buffer[...]
    wide = held.astype(jnp.float32)
    buffer[...] = jnp.where(token < live, wide, 0.0).astype(held.dtype)


def _visible(spec, first_query, first_key, end):
    """``[m, block]``: which keys of a block each query sees."""
    # a division is dear: one for each query, not for each score
    query = first_query + lax.broadcasted_iota(jnp.int32, (spec.m, 1), 0) // spec.group
    key = first_key + lax.broadcasted_iota(jnp.int32, (1, spec.block), 1)
    seen = (key <= query) & (key < end)
    return seen if spec.window is None else seen & (key > query - spec.window)


def _fold_head(spec, refs, slot, head, seen):
    """Fold one block of one KV head into the running softmax."""
    dtype = jnp.dtype(spec.compute_dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def load(side):
        held = refs["buffers"][slot, :, :, spec.lanes(head, side)]
        return held.reshape(spec.block, held.shape[-1]).astype(dtype)

    def load_scales(side):
        rows = refs["scale_buffers"][slot, :, :, spec.scale_row(head, side)]
        return jnp.concatenate([rows[page] for page in range(spec.block_pages)], axis=1)

    query = refs["queries"][0, head].astype(dtype)
    scores = product(query, load(0), (((1,), (1,)), ((), ()))) * spec.scale
    if "scales" in refs:
        scores *= load_scales(0)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(seen, scores, _MASKED)
    top_before = refs["top"][head][:, :1]
    top = jnp.maximum(top_before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - top)
    shrink = jnp.exp(top_before - top)
    total = refs["total"][head][:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    if "scales" in refs:
        weights = jnp.where(seen, weights * load_scales(1), 0.0)
    added = product(weights.astype(dtype), load(1), (((1,), (0,)), ((), ())))
    refs["acc"][head] = refs["acc"][head] * shrink + added
    refs["top"][head] = jnp.broadcast_to(top, refs["top"].shape[1:])
    refs["total"][head] = jnp.broadcast_to(total, refs["total"].shape[1:])
