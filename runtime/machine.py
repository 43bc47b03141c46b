"""The machine that a plan is for: which chips, how many, how much memory each has; none of them need be here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import platform
import re
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from precast.kernels_pallas import aot
from precast.kernels_pallas.targets import GPU_CHIPS, TPU_CHIPS, Target
from precast.sharding.mesh import MeshSpec

_FORMS = "cpu, cpu:8, tpu:v6e:2x4, cuda:h100 or cuda:h200x8"
# HBM that XLA's TPU compiler lets a program use on one device: what it names when a program does not fit.
_TPU_MEMORY_GIB = {"v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
_TPU_AXES = {"v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
_TPU_DEVICES_PER_CHIP = {"tpu7x": 2}
_GPUS_PER_HOST = 8
_TPU_KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Chips of one kind.

    Attributes:
      target: what kernels are compiled for.
      topology: chips along each axis of a TPU slice ("2x4"), slices x hosts x GPUs ("1x1x8"), or "" on CPU.
      num_devices: JAX devices of the whole.
    """

    target: Target
    topology: str
    num_devices: int

    @classmethod
    def parse(cls, text: str) -> Machine:
        """Reads "cpu", "cpu:8", "tpu:v6e:2x4", "cuda:h100" or "cuda:h200x8"; raises ValueError that names the part."""
        if match := re.fullmatch(r"cpu(?::([1-9]\d{0,3}))?", text):
            return cls(Target("cpu"), "", int(match[1] or 1))
        if match := re.fullmatch(r"tpu:(\w+):([1-9]\d*(?:x[1-9]\d*)*)", text):
            chip, topology = match.groups()
            _known(text, chip, TPU_CHIPS)
            axes = _TPU_AXES[chip]
            if topology.count("x") != axes - 1:
                raise ValueError(f"target is {text!r}: {chip} has {axes} axes, such as {'x'.join('2' * axes)}")
            chips = math.prod(map(int, topology.split("x")))
            return cls(Target("tpu", chip), topology, chips * _TPU_DEVICES_PER_CHIP.get(chip, 1))
        if match := re.fullmatch(r"cuda:([a-z]+\d+)(?:x([1-9]\d{0,3}))?", text):
            chip, number = match[1], int(match[2] or 1)
            _known(text, chip, GPU_CHIPS)
            hosts, rest = divmod(number, _GPUS_PER_HOST)
            if number > _GPUS_PER_HOST and rest:
                raise ValueError(f"target is {text!r}: above {_GPUS_PER_HOST} GPUs must be whole hosts")
            topology = f"1x{hosts}x{_GPUS_PER_HOST}" if hosts else f"1x1x{number}"
            return cls(Target("gpu", chip), topology, number)
        raise ValueError(f"target is {text!r}: it must look like {_FORMS}")

    @classmethod
    def here(cls, num_devices: int = 1) -> Machine:
        """This process's own: so many CPU devices or GPUs, or the whole TPU slice.

        Raises ValueError for an accelerator that nothing is known of.
        """
        _allow_cpu_devices(num_devices)
        if jax.default_backend() == "cpu":
            return cls(Target("cpu"), "", num_devices)
        devices = jax.devices()
        kind = devices[0].device_kind
        if devices[0].platform == "tpu" and kind in _TPU_KINDS:
            chip = _TPU_KINDS[kind]
            chips = np.array([device.coords[: _TPU_AXES[chip]] for device in devices])
            return cls.parse(f"tpu:{chip}:{'x'.join(map(str, chips.max(axis=0) - chips.min(axis=0) + 1))}")
        for chip in GPU_CHIPS:
            if chip in kind.lower():
                return cls.parse(f"cuda:{chip}x{num_devices}")
        raise ValueError(f"device is {kind!r}: it is not one of {', '.join([*_TPU_KINDS, *GPU_CHIPS])}")

    def __str__(self) -> str:
        if self.is_host:
            return "cpu" if self.num_devices == 1 else f"cpu:{self.num_devices}"
        if self.target.backend == "tpu":
            return f"tpu:{self.target.chip}:{self.topology}"
        return f"cuda:{self.target.chip}" + (f"x{self.num_devices}" if self.num_devices > 1 else "")

    @property
    def is_host(self) -> bool:
        """Whether programs run on the host's own processor."""
        return self.target.backend == "cpu"

    def mesh(self, spec: MeshSpec, *, described: bool = False) -> Mesh | None:
        """The mesh over this process's devices, or over described ones; None for the host's processor alone.

        Raises ValueError where the devices are not there, or not enough.
        """
        devices = self.devices() if described else self.own_devices()
        if devices.size < spec.num_devices:
            raise ValueError(f"mesh is {spec}: {self} has {devices.size} devices, it takes {spec.num_devices}")
        return None if self.is_host and spec.num_devices == 1 else spec.build(devices)

    def own_devices(self) -> np.ndarray:
        """JAX devices [num_devices] that this process can run on; raises ValueError where they are not this machine."""
        if self.is_host:
            return self.devices()
        if (here := Machine.here(self.num_devices)) != self:
            raise ValueError(f"target is {self}: this machine is {here}")
        if len(jax.devices()) < self.num_devices:
            raise ValueError(f"target is {self}: this machine has {len(jax.devices())} devices")
        return np.array(jax.devices()[: self.num_devices])

    def devices(self) -> np.ndarray:
        """JAX devices [num_devices]: the host's own on CPU, else ones that the chip's compiler describes.

        Raises ValueError where there are fewer CPU devices, or the compiler for the chip is not installed.
        """
        if self.is_host:
            _allow_cpu_devices(self.num_devices)
            found = jax.devices("cpu")
            if len(found) < self.num_devices:
                raise ValueError(
                    f"target is {self}: this process has {len(found)}; set jax_num_cpu_devices before JAX is first used"
                )
            return np.array(found[: self.num_devices])
        try:
            return aot.topology_devices(self.target, self.topology)
        except Exception as error:
            extra = "tpu" if self.target.backend == "tpu" else "cuda13"
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"target is {self}: its compiler refuses ({reason}); is it installed? pip install 'precast[{extra}]'"
            ) from error

    @property
    def memory_bytes(self) -> int:
        """Memory that programs can use on each device."""
        if self.is_host:
            return host_memory() // self.num_devices
        if self.target.backend == "tpu":
            return int(_TPU_MEMORY_GIB[self.target.tpu.name] * (1 << 30))
        match = re.search(r"device_memory_size: (\d+)", aot.gpu_target_config(self.target))
        assert match is not None
        return int(match[1])


def _allow_cpu_devices(number: int) -> None:
    """Asks for so many CPU devices; once JAX has been used it is too late, and whoever needs them finds out."""
    # Fewer than somebody asked for before are never asked for.
    asked: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if number > max(1, asked):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", number)


def host_memory() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processor() -> dict[str, Any]:
    """This host's kind and instruction set: a CPU executable runs nowhere else."""
    line = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        line = next((line for line in file if line.startswith(("flags", "Features"))), "")
    return {"machine": platform.machine(), "features": sorted(line.partition(":")[2].split())}


def accelerator_driver() -> str:
    """What the driver of this host's GPUs says of itself; empty where there is none."""
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    return ""


def _known(text: str, chip: str, chips: Collection[str]) -> None:
    if chip not in chips:
        raise ValueError(f"target is {text!r}: chip {chip!r} is not one of {', '.join(chips)}")
