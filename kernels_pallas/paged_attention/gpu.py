"""Paged attention for NVIDIA Hopper and Blackwell (Pallas, Mosaic GPU).

Two kernels share this entry.  ``gpu_swapped`` puts the keys on the 64-row side of the tensor cores, so that few queries
waste nothing: decode, verify, quantised pages, the latent form, and on Blackwell all calls.  ``gpu_rows`` puts the
queries there: prefill chunks and head sizes that are no multiple of 64.  Both cut a row's context into ``splits``
parts (flash decoding), each block of the grid leaving its part's output with the softmax's top and total;
``_combine`` joins the parts in XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from precast.kernels_pallas import costs, layout
from precast.kernels_pallas.gpu_ops import Ops
from precast.kernels_pallas.paged_attention import gpu_rows, gpu_swapped
from precast.kernels_pallas.paged_attention.gpu_common import Spec
from precast.kernels_pallas.paged_attention.tuning import gpu_blocks


def paged_attention(queries, pages, page_table, context_lens, q_starts, *, config, target, sinks=None, scales=None):
    """See ``api.paged_attention``.

    Raises:
        NotImplementedError: a chip that is neither Hopper nor Blackwell, float32, or sizes that the tensor cores or
            the shared memory do not take; the message says which.
    """
    rows, q, heads, head_dim = queries.shape
    kv_heads, group = config.num_kv_heads, heads // config.num_kv_heads
    _check(queries, pages, config, target)
    compute = "float16" if jnp.float16 in (queries.dtype, pages.dtype) else "bfloat16"
    if pages.dtype == jnp.float8_e4m3fn:
        # the chip converts 8-bit floats to float16 only
        compute = "float16"
    choice = gpu_blocks(queries, pages, page_table.shape[1] * pages.shape[1], config, target.gpu)
    spec = Spec(
        q=q,
        group=group,
        head_dim=head_dim,
        value_dim=config.value_dim or head_dim,
        latent=config.value_dim is not None,
        page_size=pages.shape[1],
        width=page_table.shape[1],
        tile=choice.tile,
        tiles=-(-q * group // choice.tile),
        block=choice.block,
        slots=choice.slots,
        splits=choice.splits,
        scale=config.scale,
        window=config.window,
        soft_cap=config.soft_cap,
        kv_dtype=pages.dtype.name,
        compute_dtype=compute,
        # parts that are to be joined keep their precision
        out_dtype=queries.dtype.name if choice.splits == 1 else "float32",
    )
    grouped = queries.astype(compute).reshape(rows, q, kv_heads, group, head_dim).swapaxes(1, 2)
    grouped = grouped.reshape(rows, kv_heads, q * group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, spec.tiles * spec.tile - q * group), (0, 0)))
    kernel = gpu_swapped if choice.swapped else gpu_rows
    ops = Ops(target.gpu.sm, target.interpret)
    cost = costs.attention(queries, pages, config, page_table.size * pages.shape[1])
    with jax.named_scope("precast_paged_attention"):
        parts = kernel.attend(spec, ops, grouped, pages, page_table, context_lens, q_starts, scales, cost)
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, group), (1, q))
    out = _combine(*(part[:, :, :, : q * group] for part in parts), sinks=sinks)
    out = out.reshape(rows, kv_heads, q, group, spec.value_dim).swapaxes(1, 2)
    return out.reshape(rows, q, heads, spec.value_dim).astype(queries.dtype)


def _combine(out, top, total, *, sinks) -> jax.Array:
    """Join the splits: ``out [splits, rows, kv_heads, pairs, value_dim]``, ``top`` and ``total`` without the last axis,
    ``sinks [kv_heads, pairs]``."""
    highest = jnp.max(top, axis=0)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks)
    weight = jnp.exp(top - highest) * total
    sum_total = jnp.sum(weight, axis=0)
    if sinks is not None:
        sum_total += jnp.exp(sinks - highest)
    joined = jnp.sum(weight[..., None] * out, axis=0)
    return joined / jnp.where(sum_total > 0, sum_total, 1.0)[..., None]


def _check(queries, pages, config, target):
    chip, head_dim = target.gpu, queries.shape[3]
    if chip.sm not in ("sm_90a", "sm_100a"):
        raise NotImplementedError(
            f"paged attention on {chip.name}: Mosaic GPU compiles for Hopper and Blackwell, not for {chip.sm}; "
            "choose the backend 'reference' there"
        )
    if jnp.float32 in (pages.dtype, queries.dtype):
        raise NotImplementedError("paged attention on GPU: tensor cores have no float32; use bfloat16 or float16")
    if chip.sm == "sm_100a" and (head_dim != 128 or config.value_dim or layout.is_quantized(pages.dtype)):
        raise NotImplementedError(
            f"paged attention on {chip.name}: the kernel's accumulators are 128 rows of tensor memory: pages must be "
            f"16-bit with head size 128, got {pages.dtype.name} with {head_dim}"
        )
    if head_dim % 16 or head_dim > (256 if config.value_dim is None else 576):
        raise NotImplementedError(
            f"paged attention on GPU: head size is {head_dim}, must be a multiple of 16 up to 256 (latent: 576)"
        )
    quantized = layout.is_quantized(pages.dtype)
    if (quantized or config.value_dim) and (head_dim % 64 or (config.value_dim or 64) % 64):
        raise NotImplementedError(
            f"paged attention on GPU: quantised or latent pages need head sizes in multiples of 64, got {head_dim}"
        )
    if quantized and pages.shape[1] < 32:
        raise NotImplementedError(
            f"paged attention on GPU: page size is {pages.shape[1]}; quantised pages need at least 32 tokens, since a "
            "bulk copy of their scales moves multiples of 128 bytes"
        )
