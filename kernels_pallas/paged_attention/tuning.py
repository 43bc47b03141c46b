"""Block sizes: from the caller, else from what was measured, else from what is known of the chip.

What was measured lies in ``tuned/<chip>.json``, written by ``scripts/tune_kernels`` on a host that has the chip:
``{"few-128-bfloat16": {"kv_block": 256}, ...}``.  A key names the kind of call (``few`` queries a row: decode and
verify; a ``chunk`` of them), the head size and the pages' dtype.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

import jax.numpy as jnp

from precast.kernels_pallas import layout

_MIB = 1 << 20
# up to this many queries a row are "few"
FEW_QUERIES = 16


def tuned_key(q: int, head_dim: int, kv_dtype) -> str:
    return f"{'few' if q <= FEW_QUERIES else 'chunk'}-{head_dim}-{jnp.dtype(kv_dtype).name}"


@functools.cache
def tuned(chip_name: str) -> dict[str, dict[str, int]]:
    """What was measured on a chip; empty where nothing was."""
    file = resources.files("precast.kernels_pallas.paged_attention").joinpath("tuned", f"{chip_name}.json")
    return json.loads(file.read_text()) if file.is_file() else {}


def _chosen(queries, pages, config, chip) -> tuple[int | None, int | None]:
    """(kv_block, q_block) by the caller or by measurement, else None."""
    measured = tuned(chip.name).get(tuned_key(queries.shape[1], queries.shape[3], pages.dtype), {})
    return config.kv_block or measured.get("kv_block"), config.q_block or measured.get("q_block")


def tpu_blocks(queries, pages, config, chip) -> tuple[int, int]:
    """Tokens of the cache and queries of a row that the TPU kernel handles at a time.

    A block of the cache is about a MiB, what HBM delivers while a copy's latency passes; the query block is the
    largest of 128 and below that leaves the kernel's buffers within the chip's VMEM.

    Raises NotImplementedError where even the smallest blocks do not fit.
    """
    q, heads = queries.shape[1:3]
    page_size, lanes = pages.shape[1], pages.shape[2]
    token_bytes = lanes * pages.dtype.itemsize
    kv_block, q_block = _chosen(queries, pages, config, chip)
    kv_block = layout.pad_to(kv_block or min(max(_MIB // token_bytes // 128 * 128, 128), 512), page_size)
    choices = [q_block] if q_block else [q] if q <= FEW_QUERIES else [128, 64, 32, 16]
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


@dataclass(frozen=True)
class GpuChoice:
    """Which Hopper kernel, its sizes (see ``gpu_common.Spec``), and the shared memory of a block of its grid."""

    swapped: bool
    tile: int
    block: int
    slots: int
    splits: int
    smem_bytes: int


def gpu_blocks(queries, pages, table_tokens: int, config, chip) -> GpuChoice:
    """The kernel and its sizes for a call with a page table of ``table_tokens`` tokens a row.

    Splits are as many as it takes to give every SM four blocks of the grid (one where no two fit at a time), as
    long as each split of a full page table still has eight blocks of the cache.  Slots are up to four; where two blocks
    of the grid can share an SM with three or two slots each, they do.

    Raises NotImplementedError where even one block of the grid does not fit the shared memory.
    """
    rows, q, heads, head_dim = queries.shape
    pairs, value_dim = q * heads // config.num_kv_heads, config.value_dim or head_dim
    quantized = layout.is_quantized(pages.dtype)
    special = quantized or config.value_dim is not None
    blackwell = chip.sm == "sm_100a"
    swapped = special or blackwell or (pairs <= 64 and head_dim % 64 == 0)
    if swapped:
        tile = min(layout.pad_to(pairs, 16 if blackwell else 8), 32 if special or blackwell else 64)
    else:
        # two warpgroups of 64 pairs, while their registers suffice
        tile = 128 if pairs > 64 and head_dim <= 192 else 64
    block = _chosen(queries, pages, config, chip)[0] or (128 if blackwell or (not swapped and head_dim <= 64) else 64)
    lanes = head_dim if config.value_dim else 2 * head_dim
    fixed = tile * head_dim * 2 + 2048
    if swapped:
        fixed += tile * block * 2 + (block * value_dim * 2 if quantized else 0)
    slot = block * lanes * pages.dtype.itemsize + (2 * block * 4 if quantized else 0)
    # an SM keeps a KiB for itself for each block of the grid
    shared = chip.smem_bytes // 2 - 1024 if swapped else chip.smem_bytes
    slots = max(min((shared - fixed) // slot, 4), min((chip.smem_bytes - fixed) // slot, 2))
    if slots < 2:
        raise NotImplementedError(
            f"paged attention on {chip.name}: two blocks of {block} tokens with {lanes} lanes need "
            f"{fixed + 2 * slot} bytes of shared memory, the limit is {chip.smem_bytes}"
        )
    grid = rows * config.num_kv_heads * -(-pairs // tile)
    most = max(table_tokens // (8 * block), 1)
    smem_bytes = fixed + slots * slot
    wanted = chip.num_sms * (4 if smem_bytes <= shared and swapped else 1)
    splits = config.splits or min(-(-wanted // grid), most)
    return GpuChoice(swapped, tile, block, slots, splits, smem_bytes)
