"""What a program knows of its fellows while it runs on one device of a mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from precast.sharding.mesh import MeshSpec
from precast.sharding.rules import RULES


@dataclasses.dataclass(frozen=True)
class Shard:
    """Collectives by logical axis, inside ``shard_map``; an axis that is not divided costs nothing.

    mesh: the mesh that the program is compiled for.
    """

    mesh: MeshSpec = MeshSpec()

    def degree(self, axis: str) -> int:
        """Into how many parts a logical axis is divided."""
        name = RULES[axis]
        return 1 if name is None else self.mesh.degrees()[name]

    def index(self, axis: str) -> jax.Array | int:
        """Which of the parts this device holds."""
        return 0 if self.degree(axis) == 1 else jax.lax.axis_index(RULES[axis])

    def sum(self, x: jax.Array, axis: str) -> jax.Array:
        return x if self.degree(axis) == 1 else jax.lax.psum(x, RULES[axis])

    def max(self, x: jax.Array, axis: str) -> jax.Array:
        return x if self.degree(axis) == 1 else jax.lax.pmax(x, RULES[axis])

    def min(self, x: jax.Array, axis: str) -> jax.Array:
        return x if self.degree(axis) == 1 else jax.lax.pmin(x, RULES[axis])

    def gather(self, x: jax.Array, axis: str, dimension: int) -> jax.Array:
        """The parts of all devices side by side along ``dimension``."""
        if self.degree(axis) == 1:
            return x
        return jax.lax.all_gather(x, RULES[axis], axis=dimension, tiled=True)

    def once(self, x: jax.Array, axis: str) -> jax.Array:
        """``x`` on the first device and zeros on the others: what a sum over the axis must count once."""
        return x if self.degree(axis) == 1 else jnp.where(self.index(axis) == 0, x, 0)
