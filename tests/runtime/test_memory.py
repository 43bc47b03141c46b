"""Whether a deployment fits, and what it says when it does not."""

import dataclasses

import jax
import numpy as np
import pytest
import toy_models

from precast.runtime import machine as machines
from precast.runtime import planning
from precast.runtime.config import ConfigError, EngineConfig
from precast.runtime.machine import Machine
from precast.runtime.memory import MemoryPlan, device_bytes
from precast.runtime.programs import Program

GIB = 1 << 30
SETTINGS = {
    "slots": 8, "max_model_len": 4096, "page_size": 64, "token_budget": 512, "kv_cache_memory": None,
    "dtype": "bfloat16", "mesh": {"data": 1, "stage": 1, "expert": 1, "tensor": 2},
}  # fmt: skip
PLAN = MemoryPlan(
    device_bytes=16 * GIB, margin_bytes=GIB, weight_bytes=8 * GIB, state_bytes=GIB // 8, temp_bytes=GIB // 2,
    temp_program="backbone-0x1+512", output_bytes=GIB // 8, code_bytes=GIB // 8, padding_bytes=GIB // 8,
    page_bytes=1 << 20, num_pages=1025,
)  # fmt: skip


def test_pages_are_the_remainder():
    assert PLAN.fixed_bytes == 9 * GIB
    assert PLAN.most_pages == 6 * 1024
    assert dataclasses.replace(PLAN, num_pages=PLAN.most_pages).spare_bytes == 0
    dataclasses.replace(PLAN, num_pages=PLAN.most_pages).check(SETTINGS)


def test_conversations():
    assert PLAN.conversations(4096, 64) == 16
    assert PLAN.conversations(4097, 64) == 15
    assert PLAN.conversations(1, 64) == 1024


def test_what_does_not_fit_says_what_each_setting_frees():
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(PLAN, num_pages=PLAN.most_pages + 1024).check(SETTINGS)
    message = str(caught.value)
    assert "takes 1.00 GiB too much of each device, which has 16.00 GiB less a margin of 1.00 GiB" in message
    assert "temporaries 0.50 GiB (backbone-0x1+512)" in message
    for knob in ("mesh tensor=4", "token_budget", "slots 8 -> 4"):
        assert knob in message
    assert "max_model_len 4096 -> 2048" in message


def test_bytes_of_one_device():
    mesh = jax.sharding.AbstractMesh((4,), ("tensor",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tensor"))
    divided = jax.ShapeDtypeStruct((8, 3), np.float32, sharding=sharding)
    whole = jax.ShapeDtypeStruct((8, 3), np.int16)
    assert device_bytes({"a": divided, "b": whole}) == 24 + 48


def test_adding_up():
    program = Program("a", len, (jax.ShapeDtypeStruct((10,), np.float32),), None)
    entry = {"argument_bytes": 64, "output_bytes": 30, "alias_bytes": 10, "temp_bytes": 7, "code_bytes": 100}
    plan = MemoryPlan.of(
        Machine.parse("cuda:h200"), [program, dataclasses.replace(program, name="b")], {"a": entry},
        weights=program.arguments, state=(), page_bytes=3, num_pages=5,
    )  # fmt: skip
    assert plan.device_bytes == 151397597184
    assert (plan.weight_bytes, plan.temp_bytes, plan.output_bytes) == (40, 7, 40)
    assert (plan.code_bytes, plan.padding_bytes) == (200, 24)


def test_a_host_that_is_too_small_is_told_so_and_nothing_is_left(tmp_path, monkeypatch):
    model = toy_models.random_llama(tmp_path / "model").config
    config = EngineConfig(slots=2, max_model_len=32, page_size=4, token_budget=12, kv_cache_memory=1 << 16)
    deployment = planning.resolve(model, config, Machine.parse("cpu"), own=True, xla_flags="")
    monkeypatch.setattr(machines, "host_memory", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"too much of each device, which has 0\.1 MiB less a margin of 0\.0 MiB"):
        planning.make(tmp_path / "plan", deployment, progress=False)
    assert not (tmp_path / "plan").exists()
