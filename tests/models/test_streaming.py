"""Parameters read a little at a time to where they belong, and host arrays that a CPU device shares."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as tiny

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


_TWO_DEVICES = """
import math, sys, jax, numpy as np
from precast.kernels_pallas.targets import Target
from precast.models import layout
from precast.models.checkpoint import open_checkpoint
from precast.models.placement import Placement
from precast.sharding.mesh import MeshSpec
checkpoint = open_checkpoint(sys.argv[1])
read, spec = {}, MeshSpec(tensor=2)

def counted(name, index=None):
    array = checkpoint.read(name, index)
    read[name] = read.get(name, 0) + array.size
    return array

placement, mesh = Placement(Target("reference"), spec), spec.build(np.array(jax.devices()[:2]))
layout.build(checkpoint.config, counted, dtype="float32", num_positions=64, placement=placement, mesh=mesh)
for name in checkpoint.names():
    # Norms are held by both, and read once for both.
    assert read[name] == checkpoint.read(name).size, name
"""


def test_each_device_reads_its_own_part_only(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _TWO_DEVICES, tiny.write(tmp_path)]
    subprocess.run(command, env={**os.environ, **flags}, check=True)
