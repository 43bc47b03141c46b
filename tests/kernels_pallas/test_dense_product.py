"""Products on packed weights: right, and the same bits for a row whatever the other rows are."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from precast.kernels_pallas.native import dense_product, library, norm

SHAPES = [(1, 1), (5, 3), (32, 32), (33, 31), (96, 64), (100, 80), (576, 1536), (3000, 576)]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


pytestmark = pytest.mark.usefixtures("native_library")


def operands(dtype, outputs, inputs, rows):
    rng = np.random.default_rng(outputs * inputs)
    matrix = rng.standard_normal((outputs, inputs)).astype(np.float32).astype(DTYPES[dtype])
    shape = dense_product.packed_shape(outputs, inputs, matrix.dtype)
    packed = np.full(shape.shape, 0x7FC0 if dtype == "bfloat16" else np.nan, shape.dtype)
    dense_product.pack(matrix, packed)
    return rng.standard_normal((rows, inputs)).astype(np.float32), matrix, jnp.asarray(packed)


product = jax.jit(dense_product.dense_product, static_argnums=2)
gated = jax.jit(dense_product.gated_product, static_argnums=(2, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_against_float64(dtype, outputs, inputs):
    for rows in (1, 2, 7, 12, 13, 16, 17, 31, 32, 33, 70):
        x, matrix, packed = operands(dtype, outputs, inputs, rows)
        rounded = x.astype(DTYPES[dtype]).astype(np.float64)
        expected = rounded @ matrix.astype(np.float64).T
        got = np.asarray(product(x, packed, outputs))
        # Of a sum of so many roundings in float32.
        bound = np.abs(rounded) @ np.abs(matrix.astype(np.float64)).T * 1e-6 + 1e-30
        assert (np.abs(got - expected) <= bound).all(), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_has_the_same_bits_in_any_company(dtype, outputs, inputs):
    x, _, packed = operands(dtype, outputs, inputs, 70)
    together = np.asarray(product(x, packed, outputs))
    for rows in (1, 2, 3, 6, 12, 16, 17, 32, 33, 64):
        np.testing.assert_array_equal(
            np.asarray(product(x[:rows], packed, outputs)), together[:rows], err_msg=f"{rows}"
        )
        np.testing.assert_array_equal(np.asarray(product(x[-rows:], packed, outputs)), together[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_give_zeros_wherever_they_are(dtype):
    x, _, packed = operands(dtype, 64, 40, 9)
    x[[2, 7, 8]] = 0
    for call in (lambda x: product(x, packed, 64), lambda x: gated(x, packed, 64, "silu")):
        got, alone = np.asarray(call(x)), np.asarray(call(x[:1]))
        assert (got.any(axis=1) == x.any(axis=1)).all() and not np.asarray(call(x[7:])).any()
        np.testing.assert_array_equal(got[:1], alone)
        np.testing.assert_array_equal(np.asarray(call(x[::-1].copy()))[::-1], got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 3), (3072, 576)])
def test_gated_against_float64(dtype, activation, outputs, inputs):
    x, matrix, packed = operands(dtype, outputs, inputs, 200)
    x[0, 0] = 300  # beyond what an exponential holds, to both sides
    both = x.astype(DTYPES[dtype]).astype(np.float64) @ matrix.astype(np.float64).T
    gate, up = torch.from_numpy(both).chunk(2, dim=1)
    gate = (
        torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    got = np.asarray(gated(x, packed, outputs, activation))
    np.testing.assert_allclose(got, (gate * up).numpy(), rtol=1e-4, atol=1e-3)
    for rows in (1, 2, 7, 17, 32, 33, 96, 97):
        np.testing.assert_array_equal(np.asarray(gated(x[:rows], packed, outputs, activation)), got[:rows])
    assert not dense_product.can_gate("gelu", 64) and not dense_product.can_gate("silu", 96)


@pytest.mark.parametrize("width", [1, 15, 16, 80, 576])
def test_norms_against_torch(width):
    x, scale = np.random.default_rng(width).standard_normal((70, width)).astype(np.float32) * 5, np.ones(width)
    scale[::3] = 0.25
    wide, weight = torch.from_numpy(x).double(), torch.from_numpy(scale)
    expected = {
        False: torch.nn.functional.rms_norm(wide, (width,), weight, 1e-5),
        True: torch.nn.functional.layer_norm(wide, (width,), weight, None, 1e-5),
    }
    for is_centred, right in expected.items():
        call = jax.jit(functools.partial(norm.norm, eps=1e-5, is_centred=is_centred))
        got = np.asarray(call(x, scale.astype(np.float32)))
        np.testing.assert_allclose(got, right.numpy(), rtol=1e-5, atol=1e-5)
        for rows in (1, 2, 16, 17):
            np.testing.assert_array_equal(np.asarray(call(x[-rows:], scale.astype(np.float32))), got[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_looked_up_in_the_packed_table(dtype):
    _, matrix, packed = operands(dtype, 100, 33, 1)
    ids = np.array([0, 31, 32, 99, 99, 5], np.int32)
    np.testing.assert_array_equal(dense_product.packed_rows(packed, ids, 33), matrix[ids].astype(np.float32))


def test_a_weight_that_is_packed_for_another_shape_is_refused():
    x, _, packed = operands("float32", 96, 64, 4)
    with pytest.raises(Exception, match="packed for other numbers"):
        product(x, packed, 130).block_until_ready()


def test_a_library_is_made_once(tmp_path, monkeypatch):
    assert library.build(tmp_path, "this one") == library.build(tmp_path, "this one")
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    assert library.build(tmp_path, "this one")
    assert library.build(tmp_path, "another one") is None


def test_a_damaged_library_is_made_again(tmp_path):
    made = library.build(tmp_path, "this one")
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:100] + b"x" + whole[101:], b""):
        kept.write_bytes(damaged)
        assert library.build(tmp_path, "this one") == made
        assert kept.read_bytes() == whole


def test_what_cannot_be_compiled_or_loaded_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "_FLAGS", ("--no-such-flag",))
    assert library.build(tmp_path, "this one") is None
    assert not list(tmp_path.iterdir())
    with pytest.raises(library.LibraryError, match="another than the one"):
        library.register(b"other")
    code = "from precast.kernels_pallas.native import library; library.register(b'damaged')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LibraryError: native.so does not load" in done.stderr


def test_other_processors_instructions_compile(tmp_path):
    """The code for processors that this one may not be: it compiles; only a host of the kind can run it."""
    files = [str(file) for file in library.sources() if file.suffix == ".cc"]
    for kind in ("x86-64", "haswell", "skylake-avx512", "cooperlake", "sapphirerapids"):
        flags = [flag for flag in library._FLAGS if not flag.startswith("-march")]
        command = ["c++", *flags, f"-march={kind}", "-isystem", jax.ffi.include_dir(), *files]
        subprocess.run([*command, "-o", str(tmp_path / "made.so")], check=True)
