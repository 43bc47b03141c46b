"""The float64 NumPy oracle of the kernels, and the random cases that every backend is held to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from precast.kernels_pallas import layout
from precast.kernels_pallas.paged_attention import AttentionConfig


@dataclass(frozen=True)
class Case:
    """One attention call. ``contexts`` has one entry a row; the last ``q`` tokens of a row are its queries unless
    ``q_starts`` says otherwise."""

    q: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    contexts: tuple[int, ...] = (0, 1, 15, 16, 17, 100)
    q_starts: tuple[int, ...] | None = None
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    value_dim: int | None = None
    kv_block: int | None = None
    q_block: int | None = None
    splits: int | None = None
    # updates only: the rows are the pages of one sequence after its first, ``q`` a page, and a row that writes nothing
    by_page: bool = False
    seed: int = 0

    def __str__(self):
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != vars(Case())[k]]
        return ",".join(changed).replace(" ", "") or "default"

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(
            num_kv_heads=self.kv_heads,
            scale=self.head_dim**-0.5,
            window=self.window,
            soft_cap=self.soft_cap,
            value_dim=self.value_dim,
            kv_block=self.kv_block,
            q_block=self.q_block,
            splits=self.splits,
        )


@dataclass(frozen=True)
class Inputs:
    queries: np.ndarray
    pages: np.ndarray
    page_table: np.ndarray
    context_lens: np.ndarray
    q_starts: np.ndarray
    sinks: np.ndarray | None
    scales: np.ndarray | None
    # what the pages stand for, float64 [pages, page_size, kv_heads, dim]
    keys: np.ndarray
    values: np.ndarray

    def arrays(self) -> dict[str, jax.Array | None]:
        """The arguments of ``paged_attention`` that are arrays."""
        names = ("queries", "pages", "page_table", "context_lens", "q_starts", "sinks", "scales")
        return {name: None if (a := getattr(self, name)) is None else jnp.asarray(a) for name in names}


def _place(case: Case, rng) -> tuple[np.ndarray, np.ndarray]:
    """A page table, and which places ``[pages, page_size]`` hold a token."""
    owned = [-(-c // case.page_size) for c in case.contexts]
    num_pages = sum(owned) + 3
    ids = rng.permutation(np.arange(1, num_pages - 1))[: sum(owned)]
    table = np.zeros((len(owned), max(*owned, 1) + 2), np.int32)
    table[:, -1] = num_pages + 7
    live = np.zeros((num_pages, case.page_size), bool)
    taken = 0
    for row, count in enumerate(owned):
        table[row, :count] = ids[taken : taken + count]
        taken += count
        at = np.arange(case.contexts[row])
        live[table[row, at // case.page_size], at % case.page_size] = True
    return table, live


def make_inputs(case: Case) -> Inputs:
    """Random inputs. Pages that no row owns, and the tails of those that are owned, are poisoned; so are the table's
    entries past a row's context (they point at poisoned pages, the last of them out of range)."""
    rng = np.random.default_rng(case.seed)
    table, live = _place(case, rng)
    num_pages = len(live)
    kv_dtype = np.dtype(getattr(ml_dtypes, case.kv_dtype, case.kv_dtype))
    shape = (num_pages, case.page_size, case.kv_heads, case.head_dim)
    keys, values = rng.standard_normal(shape), rng.standard_normal(shape)
    sides = [keys] if case.value_dim else [keys, values]
    stored, scale_rows = [], []
    for side in sides:
        scale = np.ones(shape[:-1])
        if layout.is_quantized(kv_dtype):
            scale = rng.uniform(0.5, 2.0, shape[:-1]) * 3 / layout.QUANTIZED_MAX[kv_dtype.name]
        raw = side / scale[..., None]
        raw = np.round(raw) if kv_dtype == np.int8 else raw
        top = layout.QUANTIZED_MAX.get(kv_dtype.name, np.inf)
        raw = np.clip(raw, -top, top).astype(kv_dtype)
        stored.append(raw)
        scale_rows.append(scale.astype(np.float32))
    real = [s.astype(np.float64) * c.astype(np.float64)[..., None] for s, c in zip(stored, scale_rows, strict=True)]
    keys, values = real[0], real[-1][..., : case.value_dim]

    lanes = np.stack(stored, axis=-2).reshape(*shape[:2], -1)
    lanes = np.pad(lanes, ((0, 0), (0, 0), (0, -lanes.shape[-1] % 128)))
    poison = 100 if kv_dtype == np.int8 else np.nan
    lanes[~live] = np.asarray(poison, kv_dtype)
    scales = None
    if layout.is_quantized(kv_dtype):
        both = np.stack(scale_rows, axis=-1)
        both[~live] = np.nan
        scales = both.transpose(0, 2, 3, 1).reshape(num_pages, 1, -1)
        scales = np.pad(scales, ((0, 0), (0, 0), (0, -scales.shape[-1] % 128)))

    q_starts = case.q_starts or [max(c - case.q, 0) for c in case.contexts]
    queries = rng.standard_normal((len(table), case.q, case.heads, case.head_dim))
    return Inputs(
        queries=queries.astype(np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))),
        pages=lanes,
        page_table=table,
        context_lens=np.asarray(case.contexts, np.int32),
        q_starts=np.asarray(q_starts, np.int32),
        sinks=rng.standard_normal(case.heads).astype(np.float32) if case.sinks else None,
        scales=scales,
        keys=keys,
        values=values,
    )


def attend(case: Case, inputs: Inputs) -> np.ndarray:
    """The oracle: one query and one head at a time, float64."""
    out = np.zeros((*inputs.queries.shape[:3], case.value_dim or case.head_dim))
    group = case.heads // case.kv_heads
    for row, context in enumerate(case.contexts):
        if context == 0:
            continue
        positions = np.arange(context)
        page = inputs.page_table[row, positions // case.page_size]
        keys = inputs.keys[page, positions % case.page_size]
        values = inputs.values[page, positions % case.page_size]
        for i in range(case.q):
            at = inputs.q_starts[row] + i
            seen = positions <= at
            if case.window is not None:
                seen &= positions > at - case.window
            if not seen.any():
                continue
            for head in range(case.heads):
                query = inputs.queries[row, i, head].astype(np.float64)
                scores = keys[seen, head // group] @ query * case.config.scale
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                sink = [inputs.sinks[head]] if inputs.sinks is not None else []
                top = max([scores.max(), *sink])
                weights = np.exp(scores - top)
                total = weights.sum() + sum(np.exp(s - top) for s in sink)
                out[row, i, head] = weights @ values[seen, head // group] / total
    return out


def relative_error(got, want: np.ndarray) -> float:
    """Largest error over the largest magnitude; NaN and infinity count as infinite."""
    got = np.asarray(got).astype(np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))


SHAPES = [
    *(Case(head_dim=d) for d in (64, 80, 96, 128, 192, 256)),
    Case(heads=9, kv_heads=3, head_dim=64),
    Case(heads=4, kv_heads=4, head_dim=64),
    Case(heads=32, kv_heads=8),
    Case(heads=64, kv_heads=8, head_dim=64, contexts=(5, 33)),
    Case(heads=128, kv_heads=1, contexts=(5, 33)),
    *(Case(page_size=p, contexts=(0, 1, p - 1, p, p + 1, 300)) for p in (8, 32, 64, 128, 256)),
]
OPTIONS = [
    Case(window=20, contexts=(0, 1, 19, 20, 21, 200)),
    Case(window=1),
    Case(soft_cap=5.0),
    Case(sinks=True),
    Case(q=4, sinks=True, window=33, soft_cap=8.0, contexts=(0, 4, 37, 130)),
]
QUERIES = [
    Case(q=3, contexts=(0, 3, 16, 17, 100), heads=9, kv_heads=3, head_dim=64),
    Case(q=16, contexts=(16, 31, 32, 0, 200)),
    Case(q=4, contexts=(2, 40), q_starts=(0, 38)),
    Case(q=64, contexts=(64, 100, 0, 40), q_starts=(0, 36, 0, 10)),
    Case(q=64, contexts=(64, 190), window=50, sinks=True),
    Case(q=48, contexts=(48, 150), head_dim=80, heads=4, kv_heads=2),
]
QUANTIZED = [
    replace(c, kv_dtype=dtype)
    for dtype in ("int8", "float8_e4m3fn")
    for c in (Case(page_size=32), Case(page_size=32, q=3, heads=9, kv_heads=3, head_dim=64, contexts=(0, 3, 130)))
]
LATENT = [
    Case(heads=16, kv_heads=1, head_dim=192, value_dim=128),
    Case(heads=16, kv_heads=1, head_dim=192, value_dim=128, q=3, contexts=(3, 90)),
]

UPDATES = [
    Case(contexts=(1, 16, 17, 0, 40)),
    Case(q=3, contexts=(3, 17, 2, 0, 40), q_starts=(0, 14, 0, 5, 37), heads=9, kv_heads=3, head_dim=64),
    Case(q=40, contexts=(40, 100, 0, 65), q_starts=(0, 60, 0, 30), page_size=8),
    *(Case(q=5, kv_dtype=d, contexts=(5, 33, 0, 64), page_size=32) for d in ("int8", "float8_e4m3fn", "float32")),
    Case(q=2, heads=4, kv_heads=1, head_dim=192, value_dim=192, contexts=(2, 33)),
    Case(q=16, contexts=(70,), by_page=True),
    Case(q=32, page_size=32, kv_dtype="int8", contexts=(70,), by_page=True),
]


def make_update(case: Case) -> dict[str, jax.Array | None]:
    """The arguments of ``cache_update`` for the inputs of a case and random new tokens."""
    names = ("pages", "page_table", "context_lens", "q_starts", "scales")
    arrays = {name: array for name, array in make_inputs(case).arrays().items() if name in names}
    if case.by_page:
        starts = np.arange(case.page_size, case.contexts[0], case.page_size)
        arrays["page_table"] = jnp.repeat(arrays["page_table"], len(starts) + 1, axis=0)
        arrays["q_starts"] = jnp.asarray([*starts, 0], jnp.int32)
        arrays["context_lens"] = jnp.asarray([*np.full_like(starts, case.contexts[0]), 0], jnp.int32)
    rng = np.random.default_rng(case.seed + 1)
    shape = (len(arrays["q_starts"]), case.q, case.kv_heads, case.head_dim)
    keys, values = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    return arrays | {"keys": keys, "values": None if case.value_dim else values}


def native_side(side: np.ndarray) -> np.ndarray:
    """Keys ``[pages, kv_heads, head_dim, page_size]`` or values ``[pages, kv_heads, page_size, value_dim]`` as
    ``kernels_pallas.native`` keeps them: as they are, or bfloat16 in pairs of rows."""
    if side.dtype == np.float32:
        return side
    side = np.pad(side.view(np.uint16), ((0, 0), (0, 0), (0, side.shape[2] % 2), (0, 0)))
    pages, heads, rows, columns = side.shape
    return np.ascontiguousarray(side.reshape(pages, heads, rows // 2, 2, columns).swapaxes(3, 4))
