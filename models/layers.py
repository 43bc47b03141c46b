"""The small parts that every layer shares: dense products, norms, activations, the vocabulary's two ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from precast.kernels_pallas.native import norm as native_norm
from precast.kernels_pallas.native.dense_product import can_gate, dense_product, gated_product, packed_rows
from precast.models.config import ModelConfig
from precast.models.placement import Placement
from precast.sharding.shard import Shard

# Of the sigmoid in gpt-oss's gate.
_CLAMPED_SLOPE = 1.702
# Rows that a grouped product handles at a time.
_GROUP_BLOCK = 8


# A jax.Array in a program; before that a NumPy array, a shape, or what will make one.
Matrix = Any


@flax.struct.dataclass
class Dense:
    """A dense layer's weight as the target lays it out: ``kernel [out, in]``, and ``bias [out]`` float32 or None."""

    kernel: Matrix
    bias: Matrix | None = None


@flax.struct.dataclass
class PackedDense:
    """A dense layer's weight as ``kernels_pallas.native`` packs it; ``shape`` is (outputs, inputs)."""

    kernel: Matrix
    bias: Matrix | None = None
    shape: tuple[int, int] = flax.struct.field(pytree_node=False, default=(0, 0))

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers; the array of a bfloat16 kernel holds their bits."""
        return np.dtype(jnp.bfloat16 if self.kernel.dtype == np.uint16 else np.float32)


def linear(x: jax.Array, weight: Dense | PackedDense) -> jax.Array:
    """``x @ kernel.T + bias``: ``[rows, in]`` -> ``[rows, out]`` float32, accumulated in float32.

    Every dense product of a model goes through here.  A Dense kernel is ``[out, in]`` because in that orientation
    XLA's CPU backend sums every output in one order whatever the number of rows from two up: a row's result
    does not depend on how many others share the step.  (With ``[in, out]`` in float32 it splits the sum
    differently at 2 to 48 rows, and one row takes another path in either orientation.  In bfloat16 a processor with
    AMX is the exception: there only packed weights keep the promise.)
    """
    if isinstance(weight, PackedDense):
        y = dense_product(x, weight.kernel, weight.shape[0])
    else:
        kernel = weight.kernel
        y = jax.lax.dot_general(
            x.astype(kernel.dtype), kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
    return y if weight.bias is None else y + weight.bias


def linear_sum(x: jax.Array, weight: Dense | PackedDense, shard: Shard, axis: str) -> jax.Array:
    """``linear`` of an input whose width is divided over devices along ``axis``: the parts' products added up."""
    if shard.degree(axis) == 1:
        return linear(x, weight)
    dtype = weight.dtype if isinstance(weight, PackedDense) else weight.kernel.dtype
    y = shard.sum(linear(x, dataclasses.replace(weight, bias=None)).astype(dtype), axis).astype(jnp.float32)
    return y if weight.bias is None else y + weight.bias


def per_head_linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Heads by their matrices: ``[tokens, heads, in]``, ``[heads, out, in]`` -> ``[tokens, heads, out]``, float32."""
    y = jax.lax.dot_general(
        x.astype(kernel.dtype), kernel, (((2,), (2,)), ((1,), (0,))), preferred_element_type=jnp.float32
    )
    return jnp.swapaxes(y, 0, 1)


def grouped_linear(rows: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sorted rows by their group's matrix: ``[rows, in]``, ``[groups, out, in]`` -> ``[rows, out]`` float32.

    Group g has ``sizes[g]`` rows; the sizes add up to all rows.  Works through blocks of one height, whatever the
    number of rows, so that a row's result does not depend on the others.  (``jax.lax.ragged_dot`` is the operation,
    but on CPU it becomes one product over all groups with zeros for the others, and copies the whole kernel.)
    A kernel held as uint16 is the bits of a bfloat16 one: XLA's CPU backend would convert all of a bfloat16 array
    to float32 to take a slice of it in a loop.
    """
    total = rows.shape[0]
    is_bits = kernel.dtype == jnp.uint16
    rows = jnp.pad(rows, ((0, _GROUP_BLOCK), (0, 0))).astype(jnp.bfloat16 if is_bits else kernel.dtype)
    firsts = jnp.cumsum(sizes) - sizes

    def group(index: jax.Array, out: jax.Array) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(kernel, index, keepdims=False)
        matrix = Dense(jax.lax.bitcast_convert_type(matrix, jnp.bfloat16) if is_bits else matrix)

        def block(number: jax.Array, out: jax.Array) -> jax.Array:
            first = firsts[index] + number * _GROUP_BLOCK
            y = linear(jax.lax.dynamic_slice_in_dim(rows, first, _GROUP_BLOCK), matrix)
            is_own = (number * _GROUP_BLOCK + jnp.arange(_GROUP_BLOCK) < sizes[index])[:, None]
            before = jax.lax.dynamic_slice_in_dim(out, first, _GROUP_BLOCK)
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(is_own, y, before), first, 0)

        return jax.lax.fori_loop(0, (sizes[index] + _GROUP_BLOCK - 1) // _GROUP_BLOCK, block, out)

    out = jnp.zeros((rows.shape[0], kernel.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, kernel.shape[0], group, out)[:total]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm (arXiv:1910.07467) of ``x [rows, width]`` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(row_sums(x * x) / x.shape[-1] + eps) * scale


def layer_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Layer norm (arXiv:1607.06450) without bias of ``x [rows, width]`` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    x = x - row_sums(x) / x.shape[-1]
    return x / jnp.sqrt(row_sums(x * x) / x.shape[-1] + eps) * scale


NORMS = {"rms": rms_norm, "layer": layer_norm}


def norm(x: jax.Array, scale: jax.Array, eps: float, *, kind: str = "rms", is_native: bool) -> jax.Array:
    """The norm of this kind, by ``kernels_pallas.native`` where that runs."""
    if is_native:
        return native_norm.norm(x, scale, eps, is_centred=kind == "layer")
    return NORMS[kind](x, scale, eps)


def all_heads_norm(x: jax.Array, scale: jax.Array, config: ModelConfig, placement: Placement, axis: str) -> jax.Array:
    """Norm over the dimensions of all heads at once, of ``x [rows, width]`` that is divided over devices by head."""
    shard = placement.shard
    degree = shard.degree(axis)
    if degree == 1:
        return norm(x, scale, config.norm_eps, kind=config.norm_kind, is_native=placement.is_native)
    width = x.shape[-1] * degree
    if config.norm_kind == "layer":
        x = x - shard.sum(row_sums(x), axis) / width
    return x / jnp.sqrt(shard.sum(row_sums(x * x), axis) / width + config.norm_eps) * scale


def row_sums(x: jax.Array) -> jax.Array:
    """``[rows, width]`` float32 -> ``[rows, 1]``, each row summed in one order whatever the number of rows.

    On CPU a product with ones: XLA's backend vectorises a plain reduction there along the rows or along the width
    depending on how many rows there are, and the two differ in the last bits.
    """
    return jax.lax.platform_dependent(x, cpu=_ones_product, default=lambda x: jnp.sum(x, axis=-1, keepdims=True))


def _ones_product(x: jax.Array) -> jax.Array:
    ones = jnp.ones((8, x.shape[-1]), jnp.float32)
    sums = jax.lax.dot_general(
        x, ones, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return sums[:, :1]


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def gated_linear(x: jax.Array, weight: Dense | PackedDense, config: ModelConfig) -> jax.Array:
    """``gated`` of the two halves of ``linear``: ``[rows, in]`` -> ``[rows, out / 2]`` float32."""
    if isinstance(weight, PackedDense) and weight.bias is None and can_gate(config.activation, weight.shape[0]):
        return gated_product(x, weight.kernel, weight.shape[0], config.activation)
    gate, up = jnp.split(linear(x, weight), 2, axis=-1)
    return gated(gate, up, config)


def gated(gate: jax.Array, up: jax.Array, config: ModelConfig) -> jax.Array:
    """``activation(gate) * up``, or the clamped form of gpt-oss (see ``ModelConfig.activation``)."""
    if config.activation != "swiglu_clamped":
        return ACTIVATIONS[config.activation](gate) * up
    limit = config.activation_limit
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(_CLAMPED_SLOPE * gate)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """``cap * tanh(x / cap)``; None leaves x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def embed(table: jax.Array | PackedDense, token_ids: jax.Array, shard: Shard) -> jax.Array:
    """``[tokens]`` ids -> ``[tokens, hidden]`` float32, from this device's rows of ``table [vocab, hidden]``."""

    def rows(indices: jax.Array) -> jax.Array:
        if isinstance(table, PackedDense):
            return packed_rows(table.kernel, indices, table.shape[1])
        return table[indices].astype(jnp.float32)

    if shard.degree("vocab") == 1:
        return rows(token_ids)
    local = token_ids - shard.index("vocab") * table.shape[0]
    is_own = (local >= 0) & (local < table.shape[0])
    found = jnp.where(is_own[:, None], rows(jnp.where(is_own, local, 0)), 0)
    return shard.sum(found.astype(table.dtype), "vocab").astype(jnp.float32)
