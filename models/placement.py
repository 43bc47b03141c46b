"""Where a model runs: the target chip, the mesh, and which part of each array one device holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from precast.kernels_pallas import grouped_product
from precast.kernels_pallas.targets import Target
from precast.models.config import ModelConfig
from precast.sharding.mesh import MeshSpec
from precast.sharding.shard import Shard

# A run of consecutive units that a device holds, or a number of units of padding.
Piece = slice | int


@dataclasses.dataclass(frozen=True)
class Placement:
    """What is static about a model's programs besides its config.

    Attributes:
      target: the chip; "cpu" is XLA's CPU backend with pages and weights laid out for it, "reference" the
        accelerators' layout with plain kernels.
      mesh: the degrees of parallelism.
      is_native: ``kernels_pallas.native`` runs, and dense weights lie as it wants them; CPU only.
    """

    target: Target = Target("cpu")
    mesh: MeshSpec = MeshSpec()
    is_native: bool = False

    @property
    def shard(self) -> Shard:
        return Shard(self.mesh)

    @property
    def is_cpu(self) -> bool:
        """Whether pages and weights lie as XLA's CPU backend wants them."""
        return self.target.backend == "cpu"

    @property
    def is_stacked(self) -> bool:
        """Whether like layers run under one scan over stacked weights.

        Not on CPU and NVIDIA chips, where each layer's slice is copied out of the stack; nor on tpu7x, whose
        compiler lays the whole stack out anew in every step.
        """
        return self.target.backend in ("tpu", "reference") and self.target.chip != "tpu7x"

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a mesh that cannot hold the model; the message names the legal degrees."""
        for axis in ("data", "stage", "expert"):
            if self.mesh.degrees()[axis] > 1:
                raise ValueError(f"mesh: {axis} is {self.mesh.degrees()[axis]}: only tensor can be above 1 so far")
        tensor = self.mesh.tensor
        if tensor > config.num_heads:
            raise ValueError(
                f"mesh: tensor is {tensor}: the model has {config.num_heads} heads; choose 1 to {config.num_heads}"
            )
        if config.qk_norm == "all" and (config.num_heads % tensor or config.num_kv_heads % tensor):
            legal = [
                str(n)
                for n in range(1, config.num_heads + 1)
                if config.num_heads % n == 0 and config.num_kv_heads % n == 0
            ]
            raise ValueError(
                f"mesh: tensor is {tensor}: the model norms all {config.num_heads} heads and {config.num_kv_heads} "
                f"KV heads at once, so that both must be divisible; choose one of {', '.join(legal)}"
            )

    def local(self, size: int, axis: str) -> int:
        """Units of an evenly divided axis that one device holds, padding included."""
        degree = self.shard.degree(axis)
        held = -(-size // degree)
        is_padded = axis == "expert_mlp" and degree > 1 and not self.is_cpu
        return -(-held // grouped_product.WIDTH_MULTIPLE) * grouped_product.WIDTH_MULTIPLE if is_padded else held

    def local_heads(self, config: ModelConfig) -> tuple[int, int]:
        """(query heads, KV heads) that one device holds, padding included."""
        queries, keys = _head_shards(config.num_heads, config.num_kv_heads, self.shard.degree("heads"))
        return len(queries[0]), len(keys[0])

    def pieces(self, config: ModelConfig, axis: str | None, size: int, index: int) -> list[Piece]:
        """What device ``index`` along an axis holds of a dimension of ``size`` with that logical axis."""
        degree = 1 if axis is None else self.shard.degree(axis)
        if axis is None or degree == 1:
            return [slice(0, size)]
        if axis in ("heads", "kv_heads"):
            queries, keys = _head_shards(config.num_heads, config.num_kv_heads, degree)
            units, count = (queries, config.num_heads) if axis == "heads" else (keys, config.num_kv_heads)
            return _pieces(units[index], size // count)
        held = self.local(size, axis)
        first, last = min(index * held, size), min((index + 1) * held, size)
        pieces: list[Piece] = [slice(first, last)] if last > first else []
        return pieces if last - first == held else [*pieces, held - (last - first)]


@functools.lru_cache
def _head_shards(
    num_heads: int, num_kv_heads: int, degree: int
) -> tuple[tuple[tuple[int | None, ...], ...], tuple[tuple[int | None, ...], ...]]:
    """For each device the ids of its query heads and of its KV heads, None for padding.

    With enough KV heads each device takes as many whole groups as the others; otherwise a KV head is held by
    several devices, which divide its query heads.
    """
    group = num_heads // num_kv_heads
    if degree <= num_kv_heads:
        held = -(-num_kv_heads // degree)
        keys = [
            tuple(head if head < num_kv_heads else None for head in range(device * held, (device + 1) * held))
            for device in range(degree)
        ]
        queries = [
            tuple(None if head is None else head * group + i for head in heads for i in range(group)) for heads in keys
        ]
        return tuple(queries), tuple(keys)
    head_of = [device * num_kv_heads // degree for device in range(degree)]
    held = -(-group // min(head_of.count(head) for head in range(num_kv_heads)))
    queries = []
    for device, head in enumerate(head_of):
        holders, rank = head_of.count(head), device - head_of.index(head)
        own = [head * group + i for i in range(rank * group // holders, (rank + 1) * group // holders)]
        queries.append((*own, *[None] * (held - len(own))))
    return tuple(queries), tuple((head,) for head in head_of)


def _pieces(units: Sequence[int | None], width: int) -> list[Piece]:
    """Runs of consecutive units of ``width`` elements each, and the padding between them."""
    pieces: list[Piece] = []
    for unit in units:
        last = pieces[-1] if pieces else None
        if unit is None:
            padding = last if isinstance(last, int) else 0
            pieces = [*(pieces[:-1] if padding else pieces), padding + width]
        elif isinstance(last, slice) and last.stop == unit * width:
            pieces[-1] = slice(last.start, last.stop + width)
        else:
            pieces.append(slice(unit * width, (unit + 1) * width))
    return pieces
