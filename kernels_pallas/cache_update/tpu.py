"""The cache write for TPU (Pallas, Mosaic): read a tile of a page, put the new tokens into it, write it back.

A tile is the fewest tokens that HBM's layout lets a copy address (8, 16 or 32 by dtype, or a page that is smaller).
A row's new tokens are contiguous, so a tile takes all of them that fall into it at once and no tile is touched twice;
the tiles of a grid step are in flight together.  A copy of single rows would be right in the interpreter and refused by
the compiler; XLA's own scatter copies the whole cache when its dtype has 8 bits.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from precast.kernels_pallas import costs, layout

# Up to this many new tokens a row are put into a tile one by one; more are first aligned to tiles by a gather.
_ONE_BY_ONE = 8
_TABLE_LIMIT = 200_000
# What one grid step may hold in VMEM: its copies are in flight together, so the more the better.
_BATCH_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class _Spec:
    """How new tokens meet tiles: an entry brings ``tokens`` tokens to ``tiles`` tiles, a row has ``entries`` of them.

    A few new tokens a row are one entry for all tiles of the row; many are an entry a tile, aligned with it.
    """

    q: int
    tokens: int
    span: int
    tiles: int
    entries: int
    per_page: int
    width: int
    by_lane: bool = False


def cache_update(pages, keys, values, page_table, context_lens, q_starts, *, target, scales=None):
    """See ``api.cache_update``.

    Raises:
        NotImplementedError: a page table beyond scalar memory.
    """
    rows, q = keys.shape[:2]
    page_size, width = pages.shape[1], page_table.shape[1]
    if rows * width > _TABLE_LIMIT:
        raise NotImplementedError(
            f"cache update on TPU: a page table of {rows} x {width} entries is over the {_TABLE_LIMIT} that scalar "
            f"memory holds; use pages larger than {page_size} tokens or fewer rows"
        )
    lanes, token_scales = layout.quantize_tokens(keys, values, pages.dtype)
    run = functools.partial(_write, page_table=page_table, lens=context_lens, starts=q_starts, target=target)
    tile = min(32 // pages.dtype.itemsize, page_size)
    spec = _Spec(q=q, tokens=tile, span=tile, per_page=page_size, width=width, tiles=1, entries=_tiles(q, tile))
    if q <= _ONE_BY_ONE:
        pages = run(dataclasses.replace(spec, tokens=q, tiles=spec.entries, entries=1), pages, lanes)
    else:
        pages = run(spec, pages, _aligned(spec, lanes, q_starts))
    if scales is not None and token_scales is not None:
        # a page's scales are one row, in which each token has every page_size-th lane
        spec = _Spec(q, 1, page_size, 1, _tiles(q, page_size), page_size, width, by_lane=True)
        wide = _aligned(spec, token_scales, q_starts).swapaxes(1, 2).reshape(-1, 1, token_scales.shape[2] * page_size)
        scales = run(spec, scales, jnp.pad(wide, ((0, 0), (0, 0), (0, scales.shape[2] - wide.shape[2]))))
    return pages, scales


def _tiles(q: int, span: int) -> int:
    """Tiles of ``span`` tokens that ``q`` contiguous tokens can touch."""
    return (q + span - 2) // span + 1


def _aligned(spec, new, starts):
    """``[rows, q, lanes]`` -> ``[rows * entries, span, lanes]``: the tokens where they lie in their tiles."""
    source = (-(starts % spec.span))[:, None] + jnp.arange(spec.entries * spec.span)
    new = jnp.take_along_axis(new, jnp.clip(source, 0, spec.q - 1)[..., None], axis=1)
    return new.reshape(-1, spec.span, new.shape[2])


def _write(spec, cache, new, *, page_table, lens, starts, target):
    """Merge ``new [entries, tokens, lanes]`` into ``cache [pages, page_size, lanes]``, or into one row a page
    (``cache [pages, 1, lanes]``) whose lanes repeat a page's tokens."""
    entries, tokens, lanes = new.shape
    tile = 1 if spec.by_lane else spec.span
    entry_bytes = lanes * (spec.tiles * tile * cache.dtype.itemsize + 2 * layout.pad_to(tokens, 8) * 4)
    most = max(_BATCH_BYTES // entry_bytes, 1)
    batch = max(n for n in range(1, min(most, entries) + 1) if entries % n == 0)
    return pl.pallas_call(
        functools.partial(_merge_tiles, spec, batch),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(entries // batch,),
            in_specs=[
                pl.BlockSpec((batch, tokens, lanes), lambda step, *_: (step, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((batch * spec.tiles, tile, lanes), cache.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=costs.update(cache, entries * spec.tiles * tile),
        interpret=pltpu.InterpretParams(detect_races=True) if target.interpret else False,
        name="precast_cache_update",
    )(lens, starts, page_table.reshape(-1), new, cache)


def _merge_tiles(spec, batch, lens, starts, table, new, _, cache, held, semaphores):
    step = pl.program_id(0)

    def each_tile(act):
        """Call ``act`` for every tile of this step that gets a token."""

        def one(item, _):
            entry = step * batch + item // spec.tiles
            row = entry // spec.entries
            start = starts[row]
            first = start // spec.span * spec.span + (entry % spec.entries + item % spec.tiles) * spec.span
            end = jnp.minimum(lens[row], start + spec.q)

            @pl.when((first < end) & (start < end))
            def _():
                page = table[row * spec.width + first // spec.per_page]
                offset = pl.multiple_of(first % spec.per_page, spec.span)
                place = cache.at[page] if spec.by_lane else cache.at[page, pl.ds(offset, spec.span)]
                act(item, place, first, start, end)

        lax.fori_loop(0, batch * spec.tiles, one, None)

    def read(item, place):
        return pltpu.make_async_copy(place, held.at[item], semaphores.at[0])

    def write(item, place):
        return pltpu.make_async_copy(held.at[item], place, semaphores.at[1])

    def merge(item, place, first, start, end):
        held[item] = _merged(spec, held[item], new[item // spec.tiles], first, start, end)
        write(item, place).start()

    each_tile(lambda item, place, *_: read(item, place).start())
    # copies share a semaphore: none may be used before all have come
    each_tile(lambda item, place, *_: read(item, place).wait())
    each_tile(merge)
    each_tile(lambda item, place, *_: write(item, place).wait())


def _merged(spec, held, new, first, start, end):
    """A tile ``[tile, lanes]`` with the tokens of ``new`` that belong to positions ``[start, end)`` put in."""
    index = lax.broadcasted_iota(jnp.int32, held.shape, 1 if spec.by_lane else 0)
    position = first + (index % spec.per_page if spec.by_lane else index)
    # selects work on 32-bit lanes on every generation
    merged, new = held.astype(jnp.float32), new.astype(jnp.float32)
    if spec.tiles == 1:
        merged = jnp.where((position >= start) & (position < end), new, merged)
    else:
        for i in range(spec.tokens):
            token = jnp.broadcast_to(new[i : i + 1], merged.shape)
            merged = jnp.where((position == start + i) & (position < end), token, merged)
    return merged.astype(held.dtype)
