"""The mesh of one deployment: how many devices along each axis."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

AXES = ("data", "stage", "expert", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Degrees of parallelism.

    Attributes:
      data: replicas of the model.
      stage: parts that the layers are divided into.
      expert: parts that the experts are divided into.
      tensor: parts that heads, feed-forward widths and the vocabulary are divided into.

    Raises ValueError for a degree below 1.
    """

    data: int = 1
    stage: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees().items():
            if not isinstance(degree, int) or degree < 1:
                raise ValueError(f"mesh: {axis} is {degree!r}, must be an integer of at least 1")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """From "tensor=8" or "expert=2,tensor=4"; "" is one device.

        Raises ValueError that names what is wrong.
        """
        degrees: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            axis, _, degree = part.partition("=")
            if axis not in AXES or axis in degrees or not degree.isdecimal():
                raise ValueError(f"mesh is {text!r}: write axis=degree once an axis, the axes being {', '.join(AXES)}")
            degrees[axis] = int(degree)
        return cls(**degrees)

    def __str__(self) -> str:
        return ",".join(f"{axis}={degree}" for axis, degree in self.degrees().items() if degree > 1) or "one device"

    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        return math.prod(self.degrees().values())

    def build(self, devices: np.ndarray) -> jax.sharding.Mesh:
        """The mesh over the first ``num_devices`` of ``devices``, neighbours along the last axis first.

        Raises ValueError when there are too few.
        """
        if devices.size < self.num_devices:
            raise ValueError(f"mesh is {self}: it takes {self.num_devices} devices, there are {devices.size}")
        grid = devices.reshape(-1)[: self.num_devices].reshape(tuple(self.degrees().values()))
        return jax.sharding.Mesh(grid, AXES)
