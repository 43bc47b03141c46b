"""Timing a kernel on the accelerator at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from precast.kernels_pallas.targets import GPU_CHIPS, TPU_CHIPS, Target

# how a device calls itself, in part, and the chip's name here
_KINDS = {"v5 lite": "v5e", "v5p": "v5p", "v5": "v5p", "v6 lite": "v6e", "7": "tpu7x"}


def local_target() -> Target | None:
    """The accelerator at hand, or None. For benches only: kernels are told their target."""
    device = jax.devices()[0]
    kind = device.device_kind.lower()
    if device.platform == "gpu":
        chip = next((name for name in GPU_CHIPS if name in kind), None)
        return Target("gpu", chip) if chip else None
    if device.platform == "tpu":
        chip = next((name for words, name in _KINDS.items() if words in kind), None)
        return Target("tpu", chip) if chip in TPU_CHIPS else None
    return None


def seconds_per_call(step: Callable[..., Any], state: Any, *operands: Any, calls: int = 20, repeats: int = 3) -> float:
    """Time of one ``step(state, *operands) -> state`` on the device, the best of ``repeats``.

    The calls run inside one program, each on the last one's result, for two lengths; the difference leaves out what it
    costs to launch the program.
    """

    @partial(jax.jit, static_argnames="length")
    def run(state, *operands, length):
        return jax.lax.fori_loop(0, length, lambda _, held: step(held, *operands), state)

    def best(length: int) -> float:
        jax.block_until_ready(run(state, *operands, length=length))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(run(state, *operands, length=length))
            times.append(time.perf_counter() - start)
        return min(times)

    few = max(calls // 10, 1)
    return max(best(few + calls) - best(few), 1e-9) / calls


def copy_bytes_per_second(num_bytes: int = 1 << 30) -> float:
    """What a plain copy reaches, reads and writes both counted: the ceiling for a memory-bound kernel."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    return 2 * num_bytes / seconds_per_call(lambda held: held + 1.0, array)


def product_flops_per_second(size: int = 8192) -> float:
    """What a square bfloat16 product reaches."""
    weight = jnp.full((size, size), 1 / size, jnp.bfloat16)

    def step(held, weight):
        return jnp.dot(held, weight, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    return 2 * size**3 / seconds_per_call(step, weight, weight)
