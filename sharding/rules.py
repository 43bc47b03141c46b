"""The table from logical axes to mesh axes."""

from __future__ import annotations

from jax.sharding import PartitionSpec

# None: every device holds all of it.
RULES: dict[str, str | None] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert_mlp": "tensor",
    "experts": "expert",
    "layers": None,
    "embed": None,
}

Axes = tuple[str | None, ...]


def partition(axes: Axes) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes (None: a dimension that is never divided)."""
    names = [None if axis is None else RULES[axis] for axis in axes]
    return PartitionSpec(*names)
