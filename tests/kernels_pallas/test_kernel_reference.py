"""The reference twins against the float64 oracle, and the checks of the two signatures."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_oracle import (
    LATENT,
    OPTIONS,
    QUANTIZED,
    QUERIES,
    SHAPES,
    UPDATES,
    Case,
    attend,
    make_inputs,
    make_update,
    native_side,
    relative_error,
)

from precast.kernels_pallas import layout
from precast.kernels_pallas.cache_update import cache_update
from precast.kernels_pallas.native import paged_attention as native
from precast.kernels_pallas.paged_attention import AttentionConfig, cpu, paged_attention
from precast.kernels_pallas.targets import Target
from precast.models import cache

REFERENCE = Target("reference")


def run_reference(case: Case, **changes):
    arrays = make_inputs(case).arrays() | changes
    return paged_attention(**arrays, config=case.config, target=REFERENCE)


@pytest.mark.parametrize("case", [*SHAPES, *OPTIONS, *QUERIES, *QUANTIZED, *LATENT], ids=str)
def test_reference_matches_the_oracle(case):
    case = replace(case, dtype="float32")
    want = attend(case, make_inputs(case))
    assert relative_error(jax.jit(lambda: run_reference(case))(), want) < 1e-5


@pytest.mark.parametrize("case", [*SHAPES[::4], *OPTIONS[::2], *QUERIES[::2], LATENT[1]], ids=str)
def test_cpu_matches_the_oracle(case):
    case = replace(case, dtype="float32", kv_dtype="float32")
    arrays = make_inputs(case).arrays()
    keys, values = layout.unpack_tokens(arrays["pages"], case.kv_heads, case.head_dim, case.value_dim)
    pages = keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)
    # its table holds pages that exist, its pages numbers: unused ones are scratch or stale there, never NaN
    arrays |= {"pages": jax.tree.map(jnp.nan_to_num, pages), "page_table": arrays["page_table"] % len(keys)}
    out = paged_attention(**arrays, config=case.config, target=Target("cpu"))
    assert relative_error(out, attend(case, make_inputs(case))) < 1e-5


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*SHAPES, *OPTIONS, *QUERIES, *LATENT], ids=str)
def test_native_matches_the_oracle(case, kv_dtype, native_library):
    """With unused pages that hold NaN, and table entries beyond the context that are no pages at all."""
    case = replace(case, dtype=kv_dtype, kv_dtype=kv_dtype)
    inputs = make_inputs(case)
    arrays = inputs.arrays()
    assert arrays.pop("scales") is None
    arrays["queries"] = arrays["queries"].astype(np.float32)
    keys, values = layout.unpack_tokens(arrays.pop("pages"), case.kv_heads, case.head_dim, case.value_dim)
    pages = [native_side(np.array(side)) for side in (keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2))]
    config = case.config
    options = {"scale": config.scale, "window": config.window, "soft_cap": config.soft_cap}
    attend_natively = jax.jit(functools.partial(native.paged_attention, **options))
    out = attend_natively(key_pages=pages[0], value_pages=pages[1], **arrays)
    positions = inputs.q_starts[:, None] + np.arange(case.q)
    is_live = (positions < inputs.context_lens[:, None])[..., None, None]
    # Of bfloat16, the softmax's weights are rounded to it.
    assert relative_error(out, np.where(is_live, attend(case, inputs), 0)) < (1e-5 if kv_dtype == "float32" else 5e-3)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("head_dim", "page_size"), [(8, 16), (7, 5)])
def test_native_writes_what_xla_writes(head_dim, page_size, dtype, native_library):
    rng = np.random.default_rng(0)
    new = rng.standard_normal((2, 30, 3, head_dim)).astype(np.float32)
    new[0, :6, 0, 0] = np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, -0.0
    places = rng.permutation(7 * page_size)[:30].astype(np.int32)
    written = []
    for backend, write in ((native, native.cache_write), (cpu, cache._write)):
        shapes = backend.page_shapes(7, 3, page_size, head_dim, head_dim, np.dtype(dtype))
        pages = [jnp.zeros(side.shape, side.dtype) for side in shapes]
        written.append(jax.jit(write)(*pages, *new, places // page_size, places % page_size))
    for mine, theirs in zip(*written, strict=True):
        expected = native_side(np.asarray(theirs).view(dtype))
        np.testing.assert_array_equal(*(np.asarray(side).view(dtype).astype(np.float32) for side in (mine, expected)))


def test_native_refuses_shapes_that_do_not_agree(native_library):
    """Instead of reading and writing beyond them."""
    pages = [jnp.zeros(side.shape, side.dtype) for side in native.page_shapes(5, 2, 16, 8, 8, np.dtype(np.float32))]
    queries, table, lens, starts = np.zeros((2, 1, 4, 8), np.float32), np.ones((2, 3), np.int32), [17, 17], [16, 16]
    fewer = [pages[0], pages[1][:, :1]]

    def attend(pages=pages, lens=lens, starts=starts, sinks=None):
        arrays = [np.array(part, np.int32) for part in (lens, starts)]
        return native.paged_attention(queries, *pages, table, *arrays, scale=1.0, sinks=sinks).block_until_ready()

    def write(pages=pages, ids=(1, 2), offsets=(3, 4)):
        new = np.zeros((2, 2, 8), np.float32)
        return native.cache_write(*pages, new, new, np.array(ids, np.int32), np.array(offsets, np.int32))

    assert attend().shape == (2, 1, 4, 8) and len(write()) == 2
    for wrong in ({"lens": [17]}, {"starts": [16] * 3}, {"sinks": np.zeros(3, np.float32)}, {"pages": fewer}):
        with pytest.raises(Exception, match=r"paged attention: (shapes|not a context)"):
            attend(**wrong)
    for wrong in ({"ids": (1,)}, {"offsets": (3,)}, {"pages": fewer}, {"pages": [pages[0], pages[1][:, :, :8]]}):
        with pytest.raises(Exception, match=r"cache write: (shapes|not a key)"):
            write(**wrong)


def test_signature_names_what_does_not_fit():
    inputs = make_inputs(Case())
    with pytest.raises(ValueError, match=r"pages lanes is 512, must be 1024"):
        paged_attention(
            inputs.queries, inputs.pages, inputs.page_table, inputs.context_lens, inputs.q_starts,
            config=AttentionConfig(num_kv_heads=4, scale=1.0), target=REFERENCE,
        )  # fmt: skip
    with pytest.raises(ValueError, match="8 heads do not divide over 3"):
        run_reference(replace(Case(), kv_heads=3))
    with pytest.raises(ValueError, match="page size is 24"):
        run_reference(Case(), pages=np.zeros((4, 24, 512), jnp.bfloat16))
    with pytest.raises(ValueError, match="scales go with int8"):
        run_reference(Case(), pages=np.zeros((4, 16, 512), np.int8))
    with pytest.raises(ValueError, match="window must be at least 1"):
        AttentionConfig(num_kv_heads=1, scale=1.0, window=0)
    with pytest.raises(ValueError, match=r"chip 'cpu' of backend 'tpu' is not one of v5e"):
        Target("tpu", "cpu")


def expected_update(case, inputs, arguments):
    """One token at a time, in NumPy; float64 [pages, page_size, kv_heads, dim] of both sides."""
    real_keys, real_values = inputs.keys.copy(), inputs.values.copy()
    keys, values = arguments["keys"], arguments["values"]
    starts, table = np.asarray(arguments["q_starts"]), np.asarray(arguments["page_table"])
    for row, context in enumerate(np.asarray(arguments["context_lens"])):
        for i in range(case.q):
            at = starts[row] + i
            if at < context:
                where = table[row, at // case.page_size], at % case.page_size
                real_keys[where] = keys[row, i]
                real_values[where] = keys[row, i] if values is None else values[row, i]
    return real_keys, real_values


@pytest.mark.parametrize("case", UPDATES, ids=str)
def test_update_writes_exactly_the_new_tokens(case):
    inputs = make_inputs(case)
    arguments = make_update(case)
    pages, scales = jax.jit(cache_update, static_argnames="target")(**arguments, target=REFERENCE)
    got = layout.unpack_tokens(pages.astype(jnp.float32), case.kv_heads, case.head_dim, case.value_dim)
    if scales is not None:
        each = layout.unpack_scales(scales[:, 0], case.kv_heads, case.page_size, case.value_dim is not None)
        got = [side * scale[..., None] for side, scale in zip(got, each, strict=True)]
    live = np.zeros(inputs.pages.shape[:2], bool)
    for row, context in enumerate(case.contexts):
        at = np.arange(context)
        live[inputs.page_table[row, at // case.page_size], at % case.page_size] = True
    tolerance = {"int8": 0.02, "float8_e4m3fn": 0.07, "bfloat16": 0.01, "float32": 1e-6}[case.kv_dtype]
    for side, want in zip(got, expected_update(case, inputs, arguments), strict=True):
        np.testing.assert_allclose(np.asarray(side)[live], want[live], rtol=tolerance, atol=tolerance)
    untouched = np.asarray(pages)[~live].view(np.uint8)
    np.testing.assert_array_equal(untouched, inputs.pages[~live].view(np.uint8))


def test_a_zero_row_quantises_to_zero():
    q, scale = layout.quantize(jnp.zeros((2, 8)), jnp.int8)
    assert not np.asarray(q).any() and np.asarray(scale).tolist() == [1.0, 1.0]
