"""Targets as people write them, and what they are made of."""

import pytest

from precast.kernels_pallas.targets import Target
from precast.runtime.machine import Machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "target", "topology", "num_devices"),
    [
        ("cpu", Target("cpu"), "", 1),
        ("cpu:8", Target("cpu"), "", 8),
        ("tpu:v6e:2x4", Target("tpu", "v6e"), "2x4", 8),
        ("tpu:v5p:2x2x1", Target("tpu", "v5p"), "2x2x1", 4),
        ("tpu:tpu7x:2x2x1", Target("tpu", "tpu7x"), "2x2x1", 8),
        ("cuda:h100", Target("gpu", "h100"), "1x1x1", 1),
        ("cuda:h200x8", Target("gpu", "h200"), "1x1x8", 8),
        ("cuda:b200x16", Target("gpu", "b200"), "1x2x8", 16),
    ],
)
def test_a_target_is_read_and_written(text, target, topology, num_devices):
    machine = Machine.parse(text)
    assert machine == Machine(target, topology, num_devices)
    assert str(machine) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must look like cpu, "),
        ("cpu:0", "must look like"),
        ("tpu:v6e", "must look like"),
        ("cuda:h200x0", "must look like"),
        ("tpu:v9:2x2", "'v9' is not one of v5e"),
        ("tpu:v6e:2x2x1", "v6e has 2 axes"),
        ("tpu:v5p:2x2", "v5p has 3 axes, such as 2x2x2"),
        ("cuda:h300", "'h300' is not one of a100"),
        ("cuda:h200x12", "above 8 GPUs must be whole hosts"),
    ],
)
def test_a_target_that_cannot_be_is_refused_by_name(text, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        Machine.parse(text)
    assert repr(text) in str(caught.value)


def test_memory_of_a_device():
    assert Machine.parse("tpu:v6e:2x4").memory_bytes == 31.25 * GIB
    assert 140 * GIB < Machine.parse("cuda:h200x8").memory_bytes < 142 * GIB
    assert Machine.parse("cpu:8").memory_bytes == pytest.approx(Machine.parse("cpu").memory_bytes / 8, abs=8)


def test_devices_of_the_host():
    assert [device.platform for device in Machine.parse("cpu").devices()] == ["cpu"]
    with pytest.raises(ValueError, match=r"target is cpu:99: this process has \d+; set jax_num_cpu_devices"):
        Machine.parse("cpu:99").devices()
