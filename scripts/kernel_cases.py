"""The cases of the kernel scripts: what is compiled for every chip, and what is timed."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

from precast.kernels_pallas import layout, timing
from precast.kernels_pallas.cache_update import cache_update
from precast.kernels_pallas.paged_attention import AttentionConfig, paged_attention, tuning
from precast.kernels_pallas.targets import Target

# what a compiled case's cache takes in one shard: small ones hide copies
CACHE_BYTES = 512 << 20
REPLICATED = P()


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel call; heads are those of one shard. ``kind`` is ``attention`` or ``update``."""

    kind: str = "attention"
    rows: int = 32
    q: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    context: int = 8192
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    value_dim: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self):
        words = [self.kind, f"rows={self.rows}", f"q={self.q}", f"heads={self.heads}/{self.kv_heads}"]
        words += [f"dim={self.head_dim}", f"page={self.page_size}", f"context={self.context}", self.kv_dtype]
        options = {"value_dim": self.value_dim, "window": self.window, "soft_cap": self.soft_cap}
        words += [f"{name}={value}" for name, value in options.items() if value is not None]
        return " ".join([*words, *["sinks"] * self.sinks])

    @property
    def kv_numpy_dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.kv_dtype, self.kv_dtype))

    @property
    def lanes(self) -> int:
        return layout.page_lanes(self.kv_heads, self.head_dim, self.value_dim)

    @property
    def pages_for_test(self) -> int:
        return CACHE_BYTES // (self.page_size * self.lanes * self.kv_numpy_dtype.itemsize)

    def least_bytes(self) -> int:
        """Bytes that one shard must move at least: the live cache once, queries and output (or new tokens) once."""
        itemsize = self.kv_numpy_dtype.itemsize
        token = self.kv_heads * self.head_dim * (1 if self.value_dim else 2) * itemsize
        if self.kind == "update":
            return self.rows * self.q * 2 * token
        seen = min(self.context, self.window + self.q) if self.window else self.context
        out = self.rows * self.q * self.heads * (self.head_dim + (self.value_dim or self.head_dim)) * 2
        return self.rows * seen * token + out

    def least_flops(self) -> int:
        if self.kind == "update":
            return 0
        seen = self.context - (self.q - 1) / 2
        seen = min(seen, self.window) if self.window else seen
        return int(2 * self.rows * self.q * self.heads * seen * (self.head_dim + (self.value_dim or self.head_dim)))


def attention_cases() -> list[Case]:
    replace = dataclasses.replace
    decode, verify, chunk = Case(), Case(q=4), Case(q=512, rows=2)
    cases = [replace(base, head_dim=d) for d in (64, 80, 96, 128, 192, 256) for base in (decode, verify, chunk)]
    grouped = [(8, 8), (9, 3), (64, 8), (128, 1), (4, 1), (3, 1)]
    cases += [replace(base, heads=h, kv_heads=k) for h, k in grouped for base in (decode, verify, chunk)]
    cases += [replace(base, heads=9, kv_heads=3, head_dim=64) for base in (decode, verify, chunk)]
    cases += [replace(base, head_dim=d, heads=4, kv_heads=1) for d in (64, 80) for base in (decode, chunk)]
    cases += [replace(base, page_size=p) for p in (8, 16, 32, 128, 256) for base in (decode, chunk)]
    quantized = [replace(c, kv_dtype=t) for t in ("int8", "float8_e4m3fn") for c in (decode, verify, chunk)]
    cases += quantized + [replace(c, head_dim=64) for c in quantized] + [replace(c, page_size=16) for c in quantized]
    cases += [replace(c, kv_dtype="float32", dtype="float32") for c in (decode, chunk)]
    cases += [replace(decode, q=16), replace(decode, rows=1, context=131072), replace(decode, rows=256, context=4096)]
    for base in (decode, chunk):
        cases += [replace(base, window=1024), replace(base, soft_cap=30.0), replace(base, sinks=True)]
    cases.append(replace(verify, window=1024, soft_cap=30.0, sinks=True))
    latent = replace(decode, heads=16, kv_heads=1, head_dim=576, value_dim=512)
    return list(dict.fromkeys([*cases, latent, replace(latent, q=4), replace(latent, q=128, rows=2)]))


def update_cases() -> list[Case]:
    cases = []
    for dtype in ("bfloat16", "int8", "float8_e4m3fn", "float32"):
        cases += [Case("update", q=q, rows=2 if q > 16 else 32, kv_dtype=dtype) for q in (1, 4, 512)]
    cases += [Case("update", head_dim=d, heads=4, kv_heads=1) for d in (64, 80)]
    cases += [Case("update", q=q, page_size=p) for q in (1, 16) for p in (8, 16, 256)]
    return [*cases, Case("update", heads=16, kv_heads=1, head_dim=576, value_dim=512)]


def quick_cases() -> list[Case]:
    """One case of each kind of program: what a test can afford."""
    cases = [Case(head_dim=64, heads=9, kv_heads=3), Case(q=4, sinks=True, window=1024, soft_cap=30.0)]
    cases += [Case(head_dim=80), Case(q=256, rows=1), Case(kv_dtype="int8"), Case(kv_dtype="float8_e4m3fn", q=4)]
    return [*cases, Case("update"), Case("update", q=64, rows=1, kv_dtype="int8")]


def timed_cases() -> list[Case]:
    """Under 10 minutes on one accelerator: decode over rows and contexts, verify, chunks, and the kinds of pages."""
    grid = [(32, 1024), (32, 8192), (32, 32768), (128, 2048), (256, 1024), (256, 4096), (1, 32768)]
    cases = [Case(rows=rows, context=context) for rows, context in grid]
    cases += [Case(head_dim=64, heads=9, kv_heads=3, rows=128), Case(head_dim=256), Case(q=4), Case(page_size=16)]
    cases += [Case(kv_dtype="int8"), Case(kv_dtype="float8_e4m3fn"), Case(window=1024)]
    cases += [Case(q=512, rows=1, context=context) for context in (512, 8192)] + [Case(q=2048, rows=1, context=2048)]
    cases.append(Case(heads=16, kv_heads=1, head_dim=576, value_dim=512, rows=64))
    return [*cases, Case("update", rows=256), Case("update", rows=1, q=2048, context=2048)]


def call_arguments(case: Case, shards: int, num_pages: int):
    """The arrays of a call as (shape, sharding) by name, for ``shards`` shards; and the function that takes them."""

    def array(shape, dtype, spec=REPLICATED):
        return jax.ShapeDtypeStruct(shape, dtype), spec

    kv_spec = REPLICATED if case.value_dim else P(None, None, "tensor")
    across = 1 if case.value_dim else shards
    width = -(-case.context // case.page_size)
    arrays = {
        "pages": array((num_pages, case.page_size, case.lanes * across), case.kv_numpy_dtype, kv_spec),
        "page_table": array((case.rows, width), np.int32),
        "context_lens": array((case.rows,), np.int32),
        "q_starts": array((case.rows,), np.int32),
    }
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    by_head = P(None, None, "tensor")
    if case.kind == "attention":
        arrays["queries"] = array((case.rows, case.q, case.heads * shards, case.head_dim), dtype, by_head)
        if case.sinks:
            arrays["sinks"] = array((case.heads * shards,), np.float32, P("tensor"))
    else:
        arrays["keys"] = array((case.rows, case.q, case.kv_heads * across, case.head_dim), dtype, kv_spec)
        if case.value_dim is None:
            arrays["values"] = arrays["keys"]
    if layout.is_quantized(case.kv_numpy_dtype):
        lanes = layout.scale_lanes(case.kv_heads, case.page_size, case.value_dim)
        arrays["scales"] = array((num_pages, 1, lanes * across), np.float32, kv_spec)
    return arrays


def call_function(case: Case, target: Target):
    if case.kind == "update":
        return functools.partial(cache_update, **({"values": None} if case.value_dim else {}), target=target)
    config = AttentionConfig(
        num_kv_heads=case.kv_heads, scale=case.head_dim**-0.5, window=case.window, soft_cap=case.soft_cap,
        value_dim=case.value_dim,
    )  # fmt: skip
    return functools.partial(paged_attention, config=config, target=target)


def attention_call(case: Case, target: Target):
    """(queries, pages, config) of one shard, as shapes: what block sizes are chosen from."""
    arrays = {name: array for name, (array, _) in call_arguments(case, 1, 1).items()}
    return arrays["queries"], arrays["pages"], call_function(case, target).keywords["config"]


def moved_bytes(case: Case, target: Target) -> int:
    """Bytes that one shard's kernel moves when every row has the whole context, counted from its block sizes."""
    itemsize = case.kv_numpy_dtype.itemsize
    if case.kind == "update":
        if target.backend == "gpu":
            return 2 * case.rows * case.q * case.lanes * itemsize
        tile = min(32 // itemsize, case.page_size)
        return 2 * case.rows * ((case.q + tile - 2) // tile + 1) * tile * case.lanes * itemsize
    queries, pages, config = attention_call(case, target)
    pairs = case.q * case.heads // case.kv_heads
    outputs = case.rows * case.q * case.heads * (case.value_dim or case.head_dim) * 2
    if target.backend == "tpu":
        kv_block, q_block = tuning.tpu_blocks(queries, pages, config, target.tpu)
        step, parts = case.page_size, 1
    else:
        choice = tuning.gpu_blocks(queries, pages, case.context, config, target.gpu)
        kv_block = step = choice.block
        q_block, parts = max(choice.tile * case.q // pairs, 1), choice.splits
    # several parts are written in float32, read again and joined
    outputs *= 1 if parts == 1 else 1 + 4 * parts
    tokens = 0
    for first in range(0, case.q, q_block):
        end = case.context - case.q + min(first + q_block, case.q)
        begin = max(case.context - case.q + first + 1 - case.window, 0) if case.window else 0
        tokens += layout.pad_to(end, step) - begin // kv_block * kv_block
    token = case.lanes * itemsize
    if layout.is_quantized(case.kv_numpy_dtype):
        token += layout.scale_lanes(case.kv_heads, case.page_size, case.value_dim) * 4 // case.page_size
    return case.rows * tokens * token + queries.size * queries.dtype.itemsize + outputs


def random_arguments(case: Case):
    """The arrays of one shard's call: every row has the whole context, its pages in a random order."""
    width = -(-case.context // case.page_size)
    shapes = {name: array for name, (array, _) in call_arguments(case, 1, case.rows * width + 1).items()}
    order = np.random.default_rng(0).permutation(np.arange(1, case.rows * width + 1, dtype=np.int32))
    arrays = {
        "page_table": jnp.asarray(order.reshape(case.rows, width)),
        "context_lens": jnp.full(case.rows, case.context, jnp.int32),
        "q_starts": jnp.full(case.rows, case.context - case.q, jnp.int32),
    }
    for name in shapes.keys() - arrays.keys():
        shape, dtype = shapes[name].shape, shapes[name].dtype
        if name == "scales":
            arrays[name] = jnp.full(shape, 0.02 if case.kv_dtype == "int8" else 1.0, dtype)
        elif dtype == jnp.int8:
            arrays[name] = jax.random.randint(jax.random.key(1), shape, -127, 128, jnp.int8)
        else:
            arrays[name] = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16).astype(dtype)
    return arrays


def seconds(case: Case, call, arrays) -> float:
    """Time of one call; the calls are linked through the queries, or through the cache that they write."""
    if case.kind == "update":
        held = {name: arrays.pop(name) for name in ("pages", "scales") if name in arrays}

        def write(held, rest):
            pages, scales = call(**held, **rest)
            return {"pages": pages} | ({} if scales is None else {"scales": scales})

        return timing.seconds_per_call(write, held, arrays)

    def attend(queries, rest):
        out = call(queries=queries, **rest)
        return queries.at[..., : out.shape[-1]].add((out * 1e-3).astype(queries.dtype))

    queries = arrays.pop("queries")
    return timing.seconds_per_call(attend, jnp.asarray(queries), arrays)
