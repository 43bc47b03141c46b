"""The machine that a plan is for: which chips, how many, how much memory each has; none of them need be here."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Collection

import jax
import numpy as np

from precast.kernels_pallas import aot
from precast.kernels_pallas.targets import GPU_CHIPS, TPU_CHIPS, Target

_FORMS = "cpu, cpu:8, tpu:v6e:2x4, cuda:h100 or cuda:h200x8"
# HBM that XLA's TPU compiler lets a program use on one device: what it names when a program does not fit.
_TPU_MEMORY_GIB = {"v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
_TPU_AXES = {"v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
_TPU_DEVICES_PER_CHIP = {"tpu7x": 2}
_GPUS_PER_HOST = 8


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

    def __str__(self) -> str:
        if self.target.backend == "cpu":
            return "cpu" if self.num_devices == 1 else f"cpu:{self.num_devices}"
        if self.target.backend == "tpu":
            return f"tpu:{self.target.chip}:{self.topology}"
        return f"cuda:{self.target.chip}" + (f"x{self.num_devices}" if self.num_devices > 1 else "")

    def devices(self) -> np.ndarray:
        """JAX devices [num_devices]: the host's own on CPU, else ones that the chip's compiler describes.

        Raises ValueError where there are fewer CPU devices, or the compiler for the chip is not installed.
        """
        if self.target.backend == "cpu":
            found = jax.devices("cpu")
            if len(found) < self.num_devices:
                raise ValueError(f"target is {self}: this process has {len(found)}; set jax_num_cpu_devices")
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
        if self.target.backend == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.num_devices
        if self.target.backend == "tpu":
            return int(_TPU_MEMORY_GIB[self.target.tpu.name] * (1 << 30))
        match = re.search(r"device_memory_size: (\d+)", aot.gpu_target_config(self.target))
        assert match is not None
        return int(match[1])


def _known(text: str, chip: str, chips: Collection[str]) -> None:
    if chip not in chips:
        raise ValueError(f"target is {text!r}: chip {chip!r} is not one of {', '.join(chips)}")
