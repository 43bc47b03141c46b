"""What the two Hopper kernels share: their static description, the part of the context that a block of the grid works
on, and the copies of its pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from precast.kernels_pallas import layout
from precast.kernels_pallas.gpu_ops import Ops

# A masked score, and where a running top starts: far enough above it that exp2(MASKED - top) is always zero.
MASKED = -1e30
LOWEST_TOP = -1e29
# Heads of a token lie side by side: neighbours in time should be neighbours in memory.
GRID = ("row", "split", "tile", "head")
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Spec:
    """A query block of the grid is ``tile`` of a row's ``q * group`` (query, head) pairs of one KV head.

    ``block``: tokens of the cache folded at a time; ``slots``: blocks in shared memory at a time.
    """

    q: int
    group: int
    head_dim: int
    value_dim: int
    latent: bool
    page_size: int
    width: int
    tile: int
    tiles: int
    block: int
    slots: int
    splits: int
    scale: float
    window: int | None
    soft_cap: float | None
    kv_dtype: str
    compute_dtype: str
    out_dtype: str

    @property
    def quantized(self) -> bool:
        return layout.is_quantized(self.kv_dtype)

    @property
    def chunk(self) -> int:
        """Tokens that one bulk copy brings: a page, or the part of a larger page that is a block."""
        return min(self.page_size, self.block)

    @property
    def lanes(self) -> int:
        """Lanes of a token that one KV head needs: its K and V side by side, or the latent."""
        return self.head_dim if self.latent else 2 * self.head_dim

    @property
    def value_lanes(self):
        return pl.ds(0 if self.latent else self.head_dim, self.value_dim)

    @property
    def copies(self) -> int:
        """Bulk copies that bring one block."""
        return self.block // self.chunk * (3 if self.quantized else 1)


def swizzle_bytes(inner: int, dtype) -> int:
    """The widest swizzle whose tiles divide ``inner`` elements."""
    return next(s for s in (128, 64, 32) if inner * jnp.dtype(dtype).itemsize % s == 0)


def tiled(shape: tuple[int, ...], dtype, inner: int):
    """Shared memory that the tensor cores can read; slices of the last axis start at multiples of ``inner``."""
    swizzle, itemsize = swizzle_bytes(inner, dtype), jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)


@dataclass(frozen=True)
class Part:
    """The blocks ``[first, first + count)`` of a row's context, and which keys its queries see."""

    row: jax.Array
    tile: jax.Array
    first: jax.Array
    count: jax.Array
    # of these, the first ones that every query of the tile sees whole
    whole: jax.Array
    first_pair: jax.Array
    first_query: jax.Array
    begin: jax.Array
    end: jax.Array
    context: jax.Array


def part(spec: Spec, lens, starts) -> Part:
    """What this block of the grid works on. The last tile of a row sees the most keys, so it is begun first."""
    row, split = lax.axis_index("row"), lax.axis_index("split")
    tile = spec.tiles - 1 - lax.axis_index("tile")
    first_pair = tile * spec.tile
    start, context = starts[row], lens[row]
    first_query = start + first_pair // spec.group
    last_query = start + jnp.minimum((first_pair + spec.tile - 1) // spec.group, spec.q - 1)
    end = jnp.minimum(context, last_query + 1)
    begin = jnp.int32(0) if spec.window is None else jnp.maximum(first_query - spec.window + 1, 0)
    first = begin // spec.block
    blocks = jnp.maximum((end + spec.block - 1) // spec.block - first, 0)
    share = (blocks + spec.splits - 1) // spec.splits
    count = jnp.clip(blocks - split * share, 0, share)
    first += split * share
    whole = jnp.minimum(context, first_query + 1) // spec.block if spec.window is None else first
    return Part(row, tile, first, count, jnp.clip(whole - first, 0, count), first_pair, start, begin, end, context)


def fetch(spec: Spec, here: Part, block, slot, refs) -> None:
    """Start the copies of a block into a slot: ``spec.copies`` arrivals on the slot's barrier.

    Past the context the last page is copied again, so that the number of arrivals does not depend on data.
    """
    head = lax.axis_index("head")
    last_page = (here.context - 1) // spec.page_size
    barrier = refs["full"].at[slot]
    for j in range(spec.block // spec.chunk):
        position = block * spec.block + j * spec.chunk
        page = refs["table"][here.row, jnp.minimum(position // spec.page_size, last_page)]
        offset = position % spec.page_size
        target = pl.ds(j * spec.chunk, spec.chunk)
        source = refs["pages"].at[page, pl.ds(offset, spec.chunk), pl.ds(head * spec.lanes, spec.lanes)]
        plgpu.copy_gmem_to_smem(source, refs["kv"].at[slot, target], barrier)
        for side in range(2) if spec.quantized else ():
            lane = (0 if spec.latent else 2 * head + side) * spec.page_size + offset
            source = refs["scales"].at[page, 0, pl.ds(lane, spec.chunk)]
            plgpu.copy_gmem_to_smem(source, refs["kv_scales"].at[slot, side, target], barrier)


def visible(spec: Spec, here: Part, key, pair):
    """Which keys each (query, head) pair sees; ``key`` and ``pair`` are iotas over the scores' axes."""
    seen = key < here.end
    if spec.q == 1:
        return seen if spec.window is None else seen & (key >= here.begin)
    query = here.first_query + lax.div(here.first_pair + pair, jnp.int32(spec.group))
    seen &= key <= query
    return seen if spec.window is None else seen & (key > query - spec.window)


def scaled(spec: Spec, scores):
    """Scores in units of log2(e), so that exp2 gives the weights."""
    if spec.soft_cap is None:
        return scores * (spec.scale * LOG2E)
    return jnp.tanh(scores * (spec.scale / spec.soft_cap)) * (spec.soft_cap * LOG2E)


def normalised(spec: Spec, ops: Ops, acc, total, axis: int):
    """A part's output: zeros where no key was seen. ``total`` lies along ``axis`` of ``acc``."""
    return (acc / ops.spread(jnp.where(total > 0, total, 1.0), acc.shape, axis)).astype(spec.out_dtype)


def clear_tail(spec: Spec, ops: Ops, values, block, context, warpgroup=0, groups: int = 1) -> None:
    """Zero the values past the context: they may be NaN, which a weight of zero would not silence.

    Each of ``groups`` warpgroups takes its share, a small piece at a time: registers are short where this is called.
    """
    lanes = min(swizzle_bytes(spec.head_dim, spec.kv_dtype) // jnp.dtype(spec.kv_dtype).itemsize, spec.value_dim)
    rows = 64
    across = spec.value_dim // lanes
    pieces = across * (spec.block // rows)

    @pl.loop(0, (pieces - warpgroup + groups - 1) // groups)
    def _(i):
        piece = i * groups + warpgroup
        row, lane = piece // across * rows, piece % across * lanes
        ref = values.at[pl.ds(row, rows), pl.ds(lane, lanes)]
        key = block * spec.block + row + ops.iota((rows, lanes), 0, plgpu.Layout.WGMMA)
        held = ops.load(ref, plgpu.Layout.WGMMA)
        ref[...] = jnp.where(key < context, held, jnp.zeros_like(held))

    plgpu.commit_smem()
