"""Compiling a kernel for accelerators that this host does not have, and reading what the compiler made of it.

The caller sets up the process before JAX starts: ``JAX_PLATFORMS=cpu``, for TPU ``TPU_SKIP_MDS_QUERY=1`` and
``ALLOW_MULTIPLE_LIBTPU_LOAD=1``, and one process for each GPU chip (the kernel cache of JAX 0.10 is not keyed by chip:
a second chip in one process reports success without compiling).
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from precast.kernels_pallas.targets import Target

# a single host of eight devices, where the generation has one
_TOPOLOGIES = {"v5e": "2x4", "v5p": "2x2x2", "v6e": "2x4", "tpu7x": "2x2x1"}
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class Report:
    """What came out of one compilation, per device."""

    seconds: float
    hlo: str
    temp_bytes: int
    alias_bytes: int

    def faults(self, cache_shape: tuple[int, ...], aliased_bytes: int, custom_call: str) -> list[str]:
        """What a kernel over a cache of this shard's shape must not show, in words; empty when all is well.

        ``aliased_bytes``: what must be updated in place (0 for a kernel that only reads).
        """
        shape = ",".join(map(str, cache_shape))
        faults = [f"{name} in the program" for name in _COLLECTIVES if f" {name}" in self.hlo]
        if re.search(rf"= \w+\[{shape}\]\S* (copy|copy-start|transpose|convert)\(", self.hlo):
            faults.append("the cache is copied")
        entry = self.hlo.partition("entry_computation_layout=")[2].partition("\n")[0]
        order = ",".join(str(axis) for axis in reversed(range(len(cache_shape))))
        if not re.search(rf"\[{shape}\]{{{order}[:}}]", entry):
            faults.append("the cache's entry layout is not row-major")
        if custom_call not in self.hlo:
            faults.append(f"no {custom_call} in the program")
        if self.alias_bytes < aliased_bytes:
            faults.append(f"{self.alias_bytes} bytes aliased, must be {aliased_bytes}")
        if self.temp_bytes > 64 << 20:
            faults.append(f"{self.temp_bytes} bytes of temporaries")
        return faults


def ptx_usage(folder: Path, sm: str) -> tuple[int, int] | None:
    """Registers and spilled bytes of the Mosaic GPU kernels whose PTX lies in ``folder`` (``MOSAIC_GPU_DUMP_TO``, with
    ``MOSAIC_GPU_DUMP_PTX=1``), by the assembler ``ptxas``; None where there is none, which is right only for a kernel
    that this process has compiled before.  The files are removed.

    Raises RuntimeError for PTX of another architecture.
    """
    registers = spills = 0
    sources = list(folder.glob("*.ptx"))
    for source in sources:
        if f".target {sm}" not in source.read_text():
            raise RuntimeError(f"{source.name} is not for {sm}")
        command = ["ptxas", "-v", f"-arch={sm}", str(source), "-o", os.devnull]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers = max([registers, *map(int, re.findall(r"Used (\d+) registers", words))])
        spills += sum(map(int, re.findall(r"(\d+) bytes spill stores", words)))
        source.unlink()
    return (registers, spills) if sources else None


def topology_devices(target: Target, topology: str | None = None) -> np.ndarray:
    """Devices of a target's chip, described by its compiler: a mesh of them compiles, and runs nothing.

    Args:
      target: of backend "tpu" or "gpu".
      topology: chips along each axis of a TPU slice ("2x4"), or slices x hosts x GPUs ("1x1x8"); eight devices unless
        given.

    Raises whatever the compiler's plugin raises for a topology that does not exist or a compiler that is not there.
    """
    if target.backend == "tpu":
        topology = topology or _TOPOLOGIES[target.tpu.name]
        bounds = tuple(map(int, topology.split("x")))
        # Up to eight chips make one host on the 2D generations; a slice of more is cut into hosts by default.
        one_host = math.prod(bounds) <= (8 if len(bounds) == 2 else 4)
        options = {"chips_per_host_bounds": (*bounds, 1)[:3]} if one_host else {}
        name = f"{target.tpu.topology}:{topology}"
        return np.array(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    description = topologies.get_topology_desc(
        target.gpu.name, platform="cuda", topology=topology or "1x1x8", target_config=gpu_target_config(target)
    )
    return np.array(description.devices)


def gpu_target_config(target: Target) -> str:
    """XLA's description of a GPU, a text proto."""
    folder = resources.files("precast.kernels_pallas").joinpath("gpu_targets")
    return folder.joinpath(target.gpu.target_config).read_text()


def compile_sharded(
    function: Callable[..., Any],
    arguments: Mapping[str, tuple[jax.ShapeDtypeStruct, PartitionSpec]],
    out_specs: Any,
    devices: np.ndarray,
    donate: tuple[str, ...] = (),
) -> Report:
    """Compile ``function(**arguments)`` in a ``shard_map`` over the axis ``tensor`` of ``devices``.

    Shapes are those of the whole arrays; the function sees one shard.
    """
    mesh = Mesh(devices.reshape(-1), ("tensor",))
    names = list(arguments)
    specs = tuple(spec for _, spec in arguments.values())

    def call(*arrays):
        return function(**dict(zip(names, arrays, strict=True)))

    sharded = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    shapes = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))
        for array, spec in arguments.values()
    ]
    start = time.monotonic()
    donated = tuple(names.index(name) for name in donate)
    compiled = jax.jit(sharded, donate_argnums=donated).lower(*shapes).compile()
    seconds = time.monotonic() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    return Report(
        seconds=seconds,
        hlo=compiled.as_text() or "",
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
    )
