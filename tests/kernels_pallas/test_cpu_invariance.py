"""The CPU path gives a query one result, bit for bit, in whatever company it is computed."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_oracle import native_side

from precast.kernels_pallas.native import paged_attention as native
from precast.kernels_pallas.paged_attention import cpu

PAGES, WIDTH = 20, 8


def attend_alone_in_shape(attend, queries, rows, width):
    """All queries through calls of (rows, width): blocks in order, or with width 1 each alone in the last row."""
    count, heads, head_dim = queries.shape
    out = np.zeros_like(queries)
    table = np.arange(3, 3 + WIDTH, dtype=np.int32)
    step = rows * width if width > 1 else 1
    for first in range(0, count, step):
        packed = np.zeros((rows, width, heads, head_dim), np.float32)
        starts, contexts = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        tables = np.zeros((rows, WIDTH), np.int32)
        places = [(rows - 1, first, 1)]
        if width > 1:
            begins = range(first, min(first + step, count), width)
            places = [(row, begin, min(width, count - begin)) for row, begin in enumerate(begins)]
        for row, begin, length in places:
            packed[row, :length] = queries[begin : begin + length]
            starts[row], contexts[row], tables[row] = begin, begin + length, table
        result = np.asarray(attend(packed, tables, contexts, starts))
        for row, begin, length in places:
            out[begin : begin + length] = result[row, :length]
    return out


@pytest.mark.parametrize("backend", [cpu, native], ids=["xla", "native"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "page_size", "group", "kv_heads"),
    [(8, 4, 2, 2), (64, 64, 3, 3), (64, 16, 1, 1), (80, 16, 4, 2), (96, 32, 1, 4), (128, 64, 8, 1)],
)
def test_decode_and_every_block_shape_agree(head_dim, page_size, group, kv_heads, dtype, backend, native_library):
    rng = np.random.default_rng(0)

    def pages(*shape):
        values = rng.standard_normal((PAGES, kv_heads, *shape)).astype(dtype)
        if backend is native:
            return jnp.asarray(native_side(values))
        return jnp.asarray(values if dtype == np.float32 else values.view(np.uint16))

    keys, values = pages(head_dim, page_size), pages(page_size, head_dim)
    attend = jax.jit(
        lambda q, table, contexts, starts: backend.paged_attention(
            q, keys, values, table, contexts, starts, scale=head_dim**-0.5
        )
    )
    count = min(2 * page_size + 5, 70)
    queries = rng.standard_normal((count, group * kv_heads, head_dim)).astype(np.float32)
    expected = attend_alone_in_shape(attend, queries, 4, 32)
    for rows, width in [(1, 32), (16, 8), (2, 1), (7, 1), (32, 1)]:
        got = attend_alone_in_shape(attend, queries, rows, width)
        np.testing.assert_array_equal(got, expected, err_msg=f"{rows} rows of {width}")
