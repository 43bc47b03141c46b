"""Block sizes: from the caller, else from what was measured (``tuned/*.json``), else from what is known of the chip."""

from __future__ import annotations

import jax.numpy as jnp

from precast.kernels_pallas import layout

_MIB = 1 << 20


def tpu_blocks(queries, pages, config, chip) -> tuple[int, int]:
    """Tokens of the cache and queries of a row that the TPU kernel handles at a time.

    A block of the cache is about a MiB, what HBM delivers while a copy's latency passes; the query block is the
    largest of 128 and below that leaves the kernel's buffers within the chip's VMEM.

    Raises NotImplementedError where even the smallest blocks do not fit.
    """
    rows, q, heads, head_dim = queries.shape
    page_size, lanes = pages.shape[1], pages.shape[2]
    token_bytes = lanes * pages.dtype.itemsize
    kv_block = config.kv_block or min(max(_MIB // token_bytes // 128 * 128, 128), 512)
    kv_block = layout.pad_to(kv_block, page_size)
    choices = [config.q_block] if config.q_block else [q] if q <= 16 else [128, 64, 32, 16]
    budget = int(chip.vmem_bytes * 0.75)
    need = 0
    for q_block in choices:
        need = tpu_vmem_bytes(queries, pages, config, kv_block, q_block)
        if need <= budget:
            return kv_block, min(q_block, q)
    raise NotImplementedError(
        f"paged attention on {chip.name}: blocks of {kv_block} tokens and {choices[-1]} queries of {heads} heads need "
        f"{need} bytes of VMEM, the limit is {budget}; shard the heads further"
    )


def tpu_vmem_bytes(queries, pages, config, kv_block: int, q_block: int) -> int:
    """VMEM that the TPU kernel needs: its buffers exactly, its temporaries for one head roughly."""
    heads, head_dim = queries.shape[2:]
    value_dim = config.value_dim or head_dim
    rows = layout.pad_to(q_block * heads // config.num_kv_heads, 8)
    wide_q, wide_v = layout.pad_to(head_dim, layout.LANES), layout.pad_to(value_dim, layout.LANES)
    buffers = 2 * kv_block * pages.shape[2] * pages.dtype.itemsize
    state = config.num_kv_heads * rows * 4 * (wide_v + 2 * layout.LANES)
    moved = 2 * config.num_kv_heads * rows * jnp.dtype(queries.dtype).itemsize * (wide_q + wide_v)
    temporaries = 4 * rows * kv_block * 4 + 2 * kv_block * (wide_q + wide_v) * 4
    return buffers + state + moved + temporaries
