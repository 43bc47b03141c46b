"""Parameters read a little at a time to where they belong, and host arrays that a CPU device shares."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from precast.models import buffers, streaming

ARRAY = np.arange(24 * 10, dtype=np.float32).reshape(24, 10)


@pytest.mark.parametrize("elements", [1, 35, 1000])
def test_pieces_land_between_their_padding(monkeypatch, elements):
    monkeypatch.setattr(streaming, "_READ_ELEMENTS", elements)
    asked = []

    def read(name, index):
        asked.append(ARRAY[index].size)
        return ARRAY[index]

    pieces = [[slice(20, 24), 3, slice(2, 9)], [slice(0, 4), 2]]
    out = buffers.empty(streaming.shape_of(pieces), ml_dtypes.bfloat16)
    streaming.fill(out, read, "a", pieces)
    expected = np.zeros((14, 6), np.float32)
    expected[:4, :4], expected[7:, :4] = ARRAY[20:, :4], ARRAY[2:9, :4]
    np.testing.assert_array_equal(out, expected.astype(ml_dtypes.bfloat16))
    assert sum(asked) == 11 * 4 and max(asked) <= max(elements, 4)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300, 5)])
def test_a_cpu_device_shares_the_array(shape):
    array = buffers.empty(shape, np.float32)
    assert array.shape == shape and not array.any()
    array[...] = 2.0
    shared = jax.device_put(array, jax.devices("cpu")[0])
    if array.size:
        assert shared.unsafe_buffer_pointer() == array.ctypes.data
