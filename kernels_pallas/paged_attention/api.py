"""The signature of paged attention, its checks, and the choice of backend."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from precast.kernels_pallas import layout
from precast.kernels_pallas.paged_attention import cpu
from precast.kernels_pallas.targets import Target

# A backend of Pallas is imported when it is first asked for: each brings its own part of it.
_BACKENDS = {name: f"precast.kernels_pallas.paged_attention.{name}" for name in ("reference", "tpu", "gpu")}


@dataclass(frozen=True)
class AttentionConfig:
    """What is static about one attention call.

    num_kv_heads: KV heads in this shard.
    scale: multiplies the scores (before the soft cap).
    window: a query sees only the last ``window`` positions, its own included; None sees all.
    soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``.
    value_dim: the latent form (MLA): values are the first ``value_dim`` lanes of each key. Needs one KV head.
    kv_block: tokens of the cache that a kernel handles at a time; None takes the tuned or analytic choice.
    q_block: queries of a row that a kernel handles at a time; None likewise.
    splits: parts into which a GPU cuts a row's context; None likewise.
    """

    num_kv_heads: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    kv_block: int | None = None
    q_block: int | None = None
    splits: int | None = None

    def __post_init__(self):
        if self.num_kv_heads < 1:
            raise ValueError(f"attention: num_kv_heads must be at least 1, got {self.num_kv_heads}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention: window must be at least 1 or None, got {self.window}")
        if self.value_dim is not None and self.num_kv_heads != 1:
            raise ValueError(f"attention: the latent form has one KV head, got {self.num_kv_heads}")


def paged_attention(
    queries: jax.Array,
    pages: jax.Array | tuple[jax.Array, jax.Array],
    page_table: jax.Array,
    context_lens: jax.Array,
    q_starts: jax.Array,
    *,
    config: AttentionConfig,
    target: Target,
    sinks: jax.Array | None = None,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Attend from ``q`` new queries a row to that row's tokens in the cache.

    Query ``i`` of a row sits at position ``q_starts[row] + i`` and sees the keys at positions not after its own, not
    before its window, and below ``context_lens[row]``.  A query that sees no key gets zeros; so does every query of a
    row whose context is 0.  Table entries past the context and what the pages hold there are never used.

    Args:
        queries: ``[rows, q, heads, head_dim]``; query head ``h`` reads KV head ``h // (heads / num_kv_heads)``.
        pages: ``[pages, page_size, lanes]`` as ``layout`` describes; for the ``cpu`` backend its own layout, a pair of
            key pages and value pages as ``cpu.paged_attention`` describes.
        page_table: ``[rows, width]`` int32, ids of a row's pages in the order of positions.
        context_lens: ``[rows]`` int32, tokens of the row in the cache, those of this call included.
        q_starts: ``[rows]`` int32, position of the row's first query.
        sinks: ``[heads]`` float32 logits that join each softmax without a value.
        scales: ``[pages, 1, scale_lanes]`` float32 for quantised pages, as ``layout`` describes.

    Returns:
        ``[rows, q, heads, head_dim or value_dim]`` in the dtype of ``queries``.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: a case that the target's kernel does not cover; the message names the limit.
    """
    if target.backend == "cpu":
        keys, values = pages
        out = cpu.paged_attention(
            queries.astype(jnp.float32), keys, values, page_table, context_lens, q_starts,
            scale=config.scale, window=config.window, soft_cap=config.soft_cap, sinks=sinks,
        )  # fmt: skip
        return out.astype(queries.dtype)
    _check(queries, pages, page_table, context_lens, q_starts, config, sinks, scales)
    attend = importlib.import_module(_BACKENDS[target.backend]).paged_attention
    if target.backend != "reference" and not target.interpret:
        # like layers of a program share one trace and one lowering; the interpreter works best by itself
        attend = jax.jit(attend, static_argnames=("config", "target"))
    return attend(
        queries, pages, page_table, context_lens, q_starts, config=config, target=target, sinks=sinks, scales=scales
    )


def _check(queries, pages, page_table, context_lens, q_starts, config, sinks, scales):
    rows, _, heads, head_dim = queries.shape
    num_pages, page_size, lanes = pages.shape
    expected = {
        "pages lanes": (lanes, layout.page_lanes(config.num_kv_heads, head_dim, config.value_dim)),
        "page_table rows": (page_table.shape[0], rows),
        "context_lens shape": (context_lens.shape, (rows,)),
        "q_starts shape": (q_starts.shape, (rows,)),
    }
    if sinks is not None:
        expected["sinks shape"] = (sinks.shape, (heads,))
    if scales is not None:
        row = layout.scale_lanes(config.num_kv_heads, page_size, config.value_dim)
        expected["scales shape"] = (scales.shape, (num_pages, 1, row))
    for name, (got, want) in expected.items():
        if got != want:
            raise ValueError(f"paged_attention: {name} is {got}, must be {want}")
    if heads % config.num_kv_heads:
        raise ValueError(f"paged_attention: {heads} heads do not divide over {config.num_kv_heads} KV heads")
    if page_size < 8 or page_size & (page_size - 1):
        raise ValueError(f"paged_attention: page size is {page_size}, must be a power of two of at least 8")
    if layout.is_quantized(pages.dtype) != (scales is not None):
        raise ValueError(f"paged_attention: pages are {pages.dtype.name}; scales go with int8 and float8_e4m3fn only")
    if not layout.is_quantized(pages.dtype) and not jnp.issubdtype(pages.dtype, jnp.floating):
        raise ValueError(f"paged_attention: pages are {pages.dtype.name}, must be floating, int8 or float8_e4m3fn")
