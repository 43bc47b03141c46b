"""From a checkpoint's arrays to the weights as the target wants them.

Query, key and value are fused into one product and gate and up into another.  On CPU there is one leaf a weight
(a scan over stacked layers would copy each slice there); on accelerators like layers are stacked and run under one
scan.  Over a mesh each device's part of a fused product is its own part of each, so that no product crosses devices.
What can be settled once is settled here: norms stored less 1 get it back, heads whose RoPE turns interleaved pairs
are reordered so that it turns halves, and heads, widths and vocabularies that do not divide are filled with zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precast.kernels_pallas import grouped_product
from precast.kernels_pallas.native import dense_product
from precast.models import buffers, rope, streaming
from precast.models.config import MlaConfig, ModelConfig
from precast.models.layers import Dense, PackedDense
from precast.models.params import ArraySpec, layer_specs, param_specs
from precast.models.placement import Piece, Placement
from precast.models.runs import runs
from precast.models.streaming import Read
from precast.sharding.rules import Axes, partition

# NumPy arrays when a checkpoint is read, traced ones when only shapes are wanted.
Array = Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of one layer's weights as one device holds it, not read yet: logical axes, and what makes it."""

    axes: Axes
    make: Callable[[], Array]


def build(
    config: ModelConfig,
    read: Read,
    *,
    dtype: str,
    num_positions: int,
    placement: Placement = Placement(),
    mesh: jax.sharding.Mesh | None = None,
    on_layer: Callable[[], Any] = lambda: None,
):
    """Reads a model's arrays a leaf at a time and lays them out; each device's part is read by itself.

    Args:
      config: the model.
      read: of the checkpoint.
      dtype: of dense weights and the embedding; norms, biases, routers and angles are float32.
      num_positions: rows of the tables of rotary angles: the longest context that is served.
      placement: for which target, and over which mesh.
      mesh: that mesh's devices; None is the default device.
      on_layer: called after each layer, for a progress bar.

    Returns:
      The weight pytree that ``transformer.forward`` takes.
    """
    devices = 1 if mesh is None else mesh.devices.size
    parts = [_Part(config, read, dtype, num_positions, placement, index) for index in range(devices)]
    trees = [part.ends() for part in parts]
    weights = jax.tree.map(lambda *leaves: _load(leaves, mesh), *trees)
    layers = []
    for run in runs(config, placement.is_stacked):
        for position in run.positions:
            stacks = [_stacked([part.layer(i) for i in position.layers]) for part in parts]
            layers.append(jax.tree.map(lambda *leaves: _load(leaves, mesh), *stacks))
            for _ in position.layers:
                on_layer()
    return {**weights, "layers": tuple(layers)}


def shapes(
    config: ModelConfig,
    *,
    dtype: str,
    num_positions: int,
    placement: Placement,
    mesh: jax.sharding.Mesh | None,
):
    """The weights as ShapeDtypeStructs with shardings, from the config alone."""
    part = _Part(config, None, dtype, num_positions, placement, 0)

    def describe(leaf: Leaf) -> jax.ShapeDtypeStruct:
        local = jax.eval_shape(leaf.make)
        degrees = [1 if axis is None else placement.shard.degree(axis) for axis in leaf.axes]
        shape = tuple(size * degree for size, degree in zip(local.shape, degrees, strict=True))
        return jax.ShapeDtypeStruct(shape, local.dtype, sharding=_sharding(leaf.axes, mesh))

    layers = []
    for run in runs(config, placement.is_stacked):
        for position in run.positions:
            one = part.layer(position.layers[0])
            tree = _stacked([one] * len(position.layers)) if position.is_stacked else one
            layers.append(jax.tree.map(describe, tree))
    return {**jax.tree.map(describe, part.ends()), "layers": tuple(layers)}


def _sharding(axes: Axes, mesh: jax.sharding.Mesh | None) -> jax.sharding.NamedSharding | None:
    return None if mesh is None else jax.sharding.NamedSharding(mesh, partition(axes))


def _load(leaves: tuple[Leaf, ...], mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Makes one array of the leaves that the devices hold, in the mesh's order."""
    if mesh is None:
        return jax.device_put(leaves[0].make())
    sharding = _sharding(leaves[0].axes, mesh)
    assert sharding is not None
    if sharding.is_fully_replicated:
        return jax.device_put(leaves[0].make(), sharding)
    parts = []
    for leaf, device in zip(leaves, mesh.devices.flat, strict=True):
        parts.append(jax.device_put(leaf.make(), device))
    degrees = [sharding.mesh.shape[name] if name else 1 for name in sharding.spec]
    shape = tuple(size * degree for size, degree in zip(parts[0].shape, degrees, strict=True))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _stacked(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The leaves of like layers stacked along a new first axis; those of one layer as they are."""
    if len(layers) == 1:
        return layers[0]

    def stack(*leaves: Leaf) -> Leaf:
        def make() -> Array:
            first = leaves[0].make()
            if not isinstance(first, np.ndarray):
                return jnp.broadcast_to(first, (len(leaves), *first.shape))
            whole = buffers.empty((len(leaves), *first.shape), first.dtype)
            whole[0] = first
            for i, leaf in enumerate(leaves[1:], 1):
                whole[i] = leaf.make()
            return whole

        return Leaf(("layers", *leaves[0].axes), make)

    return jax.tree.map(stack, *layers)


def _packed(kernel: Leaf, dtype: Any) -> Leaf:
    """A dense kernel ``[out, in]`` in panels; whoever lays it out has the whole matrix in memory for a moment."""

    def make() -> Array:
        matrix = kernel.make()
        outputs, inputs = matrix.shape
        shape = dense_product.packed_shape(outputs, inputs, matrix.dtype)
        if not isinstance(matrix, np.ndarray):
            return jnp.zeros(shape.shape, shape.dtype)
        packed = buffers.empty(shape.shape, shape.dtype)
        dense_product.pack(np.ascontiguousarray(matrix), packed)
        return packed

    inner = (None,) if dtype == np.float32 else (None, None)
    return Leaf((*kernel.axes, *inner), make)


class _Part:
    """The weights that one device of the mesh holds, as leaves.

    read: of the checkpoint, or None to find shapes only: then arrays are traced zeros.
    index: the device's number along the mesh's one divided axis.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Read | None,
        dtype: str,
        num_positions: int,
        placement: Placement,
        index: int,
    ):
        self.config, self.placement = config, placement
        self.numpy: Any = np if read else jnp
        self._read, self.dtype, self._num_positions, self._index = read, jnp.dtype(dtype), num_positions, index
        self._specs = param_specs(config)

    def ends(self) -> dict[str, Any]:
        """Embedding, last norm, head and the tables of angles."""
        arrays = _Arrays(self, "", frozenset(self._specs))
        tables = rope.tables(self.config, self._num_positions)
        # Rows of a table that is also the head are looked up in the packed one.
        table = arrays.dense("embed", packs=self.config.tie_embeddings)
        weights: dict[str, Any] = {
            "embed": table if isinstance(table, PackedDense) else table.kernel,
            "final_norm": arrays.norm("final_norm.weight"),
            "rope": jax.tree.map(lambda table: Leaf((None, None), lambda: self.numpy.asarray(table)), tables),
        }
        if not self.config.tie_embeddings:
            weights["head"] = arrays.dense("head")
        return weights

    def layer(self, layer: int) -> dict[str, Any]:
        return _Layer(self, layer).leaves()

    def fetch(self, name: str, spec: ArraySpec, dtype: Any, out: np.ndarray | None = None) -> Array:
        """This device's part of an array, padded with zeros where the dimension does not divide; into ``out``, which
        must be zeros, where that is given."""
        pieces = self._pieces(spec)
        if self._read is None:
            return jnp.zeros(streaming.shape_of(pieces), dtype)
        out = buffers.empty(streaming.shape_of(pieces), dtype) if out is None else out
        streaming.fill(out, self._read, name, pieces)
        return out

    def local_shape(self, spec: ArraySpec) -> tuple[int, ...]:
        return streaming.shape_of(self._pieces(spec))

    def _pieces(self, spec: ArraySpec) -> list[list[Piece]]:
        return [
            self.placement.pieces(self.config, axis, size, self._index)
            for axis, size in zip(spec.axes, spec.shape, strict=True)
        ]


class _Arrays:
    """Arrays below one prefix, cast for the target."""

    def __init__(self, part: _Part, prefix: str, names: frozenset[str]):
        self._part, self._prefix, self.names = part, prefix, names
        self._numpy = part.numpy

    def vector(self, name: str, offset: float = 0.0, reshape: bool = False) -> Leaf:
        """A float32 array as it is stored, plus ``offset``; ``reshape`` flattens it."""

        def make() -> Array:
            array = self.stored(name, np.float32) + np.float32(offset)
            return array.reshape(-1) if reshape else array

        axes = self._spec(name).axes
        return Leaf(axes[-1:] if reshape else axes, make)

    def norm(self, name: str) -> Leaf:
        return self.vector(name, self._part.config.norm_offset)

    def stored(self, name: str, dtype: Any, out: np.ndarray | None = None) -> Array:
        return self._part.fetch(self._prefix + name, self._spec(name), dtype, out)

    def dense(self, *parts: str, axis: int = 0, dtype: Any = None, packs: bool = True) -> Dense | PackedDense:
        """One product of several, its outputs side by side along ``axis``; packed where the placement says so."""
        names = [f"{part}.weight" for part in parts]
        dtype = dtype or self._part.dtype
        kernel = self._joined(names, axis, dtype)
        bias = None
        if f"{parts[0]}.bias" in self.names:
            bias = self._joined([f"{part}.bias" for part in parts], axis, np.float32)
        if not (packs and self._part.placement.is_native):
            return Dense(kernel, bias)
        shapes = [self._part.local_shape(self._spec(name)) for name in names]
        return PackedDense(_packed(kernel, dtype), bias, (sum(shape[0] for shape in shapes), shapes[0][1]))

    def experts(self, *parts: str) -> Dense:
        """``dense`` for all experts' matrices together, as the target's grouped product wants them."""
        weight = self.dense(*parts, axis=1, packs=False)
        assert isinstance(weight, Dense)
        kernel: Any = weight.kernel
        placement = self._part.placement
        if placement.is_cpu and self._part.dtype == jnp.bfloat16:
            # XLA's CPU backend converts all of a bfloat16 array to take a slice of it in a loop.
            return dataclasses.replace(weight, kernel=Leaf(kernel.axes, lambda: kernel.make().view(np.uint16)))
        if not placement.is_cpu and grouped_product.inputs_first(placement.target):
            experts, outputs, inputs = kernel.axes
            return dataclasses.replace(
                weight, kernel=Leaf((experts, inputs, outputs), lambda: kernel.make().swapaxes(1, 2))
            )
        return weight

    def _joined(self, names: list[str], axis: int, dtype: Any) -> Leaf:
        def make() -> Array:
            if len(names) == 1:
                return self.stored(names[0], dtype)
            if self._numpy is jnp:
                return jnp.concatenate([self.stored(name, dtype) for name in names], axis=axis)
            shapes = [self._part.local_shape(self._spec(name)) for name in names]
            borders = np.cumsum([shape[axis] for shape in shapes])
            whole = buffers.empty((*shapes[0][:axis], borders[-1], *shapes[0][axis + 1 :]), dtype)
            for name, part in zip(names, np.split(whole, borders[:-1], axis=axis), strict=True):
                self.stored(name, dtype, part)
            return whole

        return Leaf(self._spec(names[0]).axes, make)

    def _spec(self, name: str) -> ArraySpec:
        return self._part._specs[self._prefix + name]


class _Layer(_Arrays):
    """The weights of one layer."""

    def __init__(self, part: _Part, layer: int):
        super().__init__(part, f"layers.{layer}.", frozenset(layer_specs(part.config, layer)))
        self._config, self._layer = part.config, layer

    def leaves(self) -> dict[str, Any]:
        config = self._config
        norms = [name for name in self.names if name.endswith("_norm.weight") and "." not in name[: -len(".weight")]]
        weights: dict[str, Any] = {name.removesuffix(".weight"): self.norm(name) for name in sorted(norms)}
        weights |= self._latent(config.mla) if config.mla else self._attention()
        weights |= self._mixture() if config.layer_is_moe(self._layer) else self._mlp("mlp", "")
        return weights

    def stored(self, name: str, dtype: Any, out: np.ndarray | None = None) -> Array:
        """As read, but for the order of a head's dimensions."""
        array = super().stored(name, dtype, out)
        ordered = self._halves_first(name, array)
        if out is None or ordered is array:
            return ordered
        out[...] = ordered
        return out

    def _halves_first(self, name: str, array: Array) -> Array:
        config = self._config
        if not config.rope.interleaved or not name.startswith("attn."):
            return array
        turning = config.rotary_dim(config.rope)
        heads, kv_heads = self._part.placement.local_heads(config)
        if config.mla is not None:
            starts = {
                "attn.q.weight": (heads, config.mla.qk_nope_head_dim),
                "attn.q_up.weight": (heads, config.mla.qk_nope_head_dim),
                "attn.kv_down.weight": (1, config.mla.kv_lora_rank),
            }
            return rope.halves_first(array, *starts[name], turning) if name in starts else array
        side = name.split(".")[1]
        if side in ("q_norm", "k_norm"):
            flat = array.reshape(-1)
            return rope.halves_first(flat, flat.size // config.head_dim, 0, turning).reshape(array.shape)
        local = {"q": heads, "k": kv_heads}.get(side)
        return array if local is None else rope.halves_first(array, local, 0, turning)

    def _attention(self) -> dict[str, Any]:
        weights: dict[str, Any] = {"qkv": self.dense("attn.q", "attn.k", "attn.v"), "o": self.dense("attn.o")}
        for side in ("q", "k"):
            if f"attn.{side}_norm.weight" in self.names:
                weights[f"{side}_norm"] = self.norm(f"attn.{side}_norm.weight")
        if "attn.sinks" in self.names:
            weights["sinks"] = self.vector("attn.sinks")
        return weights

    def _latent(self, mla: MlaConfig) -> dict[str, Any]:
        weights: dict[str, Any] = {"o": self.dense("attn.o"), "kv_down": self.dense("attn.kv_down")}
        for part in ("q", "q_down", "q_up"):
            if f"attn.{part}.weight" in self.names:
                weights[part] = self.dense(f"attn.{part}")
        for part in ("q_down_norm", "kv_down_norm"):
            if f"attn.{part}.weight" in self.names:
                weights[part] = self.vector(f"attn.{part}.weight")
        weights["key_up"] = Leaf(("heads", None, None), lambda: self._up(mla)[0])
        weights["value_up"] = Leaf(("heads", None, None), lambda: self._up(mla)[1])
        return weights

    def _up(self, mla: MlaConfig) -> tuple[Array, Array]:
        """What rebuilds keys (transposed) and values: ``[heads, latent, nope]`` and ``[heads, value, latent]``."""
        # In float32 on CPU: in bfloat16 a processor with AMX sums in another order for few tokens.
        up = self.stored("attn.kv_up.weight", np.float32 if self._part.placement.is_cpu else self._part.dtype)
        up = up.reshape(-1, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        keys, values = self._numpy.split(up, [mla.qk_nope_head_dim], axis=1)
        return keys.swapaxes(1, 2), values

    def _mlp(self, source: str, prefix: str) -> dict[str, Any]:
        return {
            f"{prefix}gate_up": self.dense(f"{source}.gate", f"{source}.up"),
            f"{prefix}down": self.dense(f"{source}.down"),
        }

    def _mixture(self) -> dict[str, Any]:
        weights: dict[str, Any] = {
            "router": self.dense("moe.router", dtype=np.float32),
            "experts_gate_up": self.experts("moe.gate", "moe.up"),
            "experts_down": self.experts("moe.down"),
        }
        if "moe.correction_bias" in self.names:
            weights["correction_bias"] = self.vector("moe.correction_bias")
        if "moe.shared.gate.weight" in self.names:
            weights |= self._mlp("moe.shared", "shared_")
        if "moe.shared_gate.weight" in self.names:
            weights["shared_gate"] = self.vector("moe.shared_gate.weight", reshape=True)
        return weights
