"""The signature of the cache write, its checks, and the choice of backend."""

from __future__ import annotations

import importlib

import jax

from precast.kernels_pallas import layout
from precast.kernels_pallas.targets import Target

_BACKENDS = {name: f"precast.kernels_pallas.cache_update.{name}" for name in ("reference", "tpu", "gpu")}


def cache_update(
    pages: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    page_table: jax.Array,
    context_lens: jax.Array,
    q_starts: jax.Array,
    *,
    target: Target,
    scales: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Write ``q`` new tokens a row into the row's pages.

    Token ``i`` of a row goes to position ``q_starts[row] + i`` when that is below ``context_lens[row]`` and is dropped
    otherwise, so a row with context 0 writes nothing.  No two rows may write to one page; several may write to pages of
    one sequence.  ``pages`` and ``scales`` are updated in place when the caller donates them.

    Args:
        pages: ``[pages, page_size, lanes]`` as ``layout`` describes.
        keys: ``[rows, q, kv_heads, head_dim]``, cast or quantised to the dtype of ``pages``.
        values: the same, or None for the latent form.
        page_table: ``[rows, width]`` int32.
        context_lens: ``[rows]`` int32, tokens of the row in the cache after this write.
        q_starts: ``[rows]`` int32, position of the row's first new token.
        scales: ``[pages, 1, scale_lanes]`` float32 for quantised pages.

    Returns:
        ``(pages, scales)`` after the write; ``scales`` is None where none was given.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: a case that the target's kernel does not cover; the message names the limit.
    """
    if target.backend not in _BACKENDS:
        raise NotImplementedError(
            f"cache_update: backend {target.backend!r} has pages of its own layout; whoever laid them out writes them"
        )
    _check(pages, keys, values, page_table, context_lens, q_starts, scales)
    update = importlib.import_module(_BACKENDS[target.backend]).cache_update
    if target.backend != "reference" and not target.interpret:
        # like layers of a program share one trace and one lowering; the interpreter works best by itself
        update = jax.jit(update, static_argnames="target")
    return update(pages, keys, values, page_table, context_lens, q_starts, target=target, scales=scales)


def _check(pages, keys, values, page_table, context_lens, q_starts, scales):
    rows, _, kv_heads, head_dim = keys.shape
    num_pages, page_size, lanes = pages.shape
    latent = head_dim if values is None else None
    expected = {
        "pages lanes": (lanes, layout.page_lanes(kv_heads, head_dim, latent)),
        "page_table rows": (page_table.shape[0], rows),
        "context_lens shape": (context_lens.shape, (rows,)),
        "q_starts shape": (q_starts.shape, (rows,)),
    }
    if values is not None:
        expected["values shape"] = (values.shape, keys.shape)
    if scales is not None:
        expected["scales shape"] = (scales.shape, (num_pages, 1, layout.scale_lanes(kv_heads, page_size, latent)))
    for name, (got, want) in expected.items():
        if got != want:
            raise ValueError(f"cache_update: {name} is {got}, must be {want}")
    if layout.is_quantized(pages.dtype) != (scales is not None):
        raise ValueError(f"cache_update: pages are {pages.dtype.name}; scales go with int8 and float8_e4m3fn only")
