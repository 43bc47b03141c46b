"""The small parts that every layer shares: dense products, norms, activations, the vocabulary's two ends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from precast.models.config import ModelConfig
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
class LoneDense:
    """A dense layer's weight for steps in which only the first row counts: ``kernel [in, out]``, bias as ``Dense``."""

    kernel: Matrix
    bias: Matrix | None = None


def linear(x: jax.Array, weight: Dense | LoneDense) -> jax.Array:
    """``x @ kernel.T + bias``: ``[rows, in]`` -> ``[rows, out]`` float32, accumulated in float32.

    Every dense product of a model goes through here.  The kernel is ``[out, in]`` because in that orientation
    XLA's CPU backend sums every output in one order whatever the number of rows from two up: a row's result
    does not depend on how many others share the step.  (With ``[in, out]`` in float32 it splits the sum
    differently at 2 to 48 rows, and one row takes another path in either orientation.)

    With a LoneDense every row of the result is that of ``x``'s first.  One row times ``[in, out]`` takes half the
    time of two rows times ``[out, in]`` in float32 on CPU, and sums in the same order (see ``lone_is_exact``).
    """
    kernel = weight.kernel
    if isinstance(weight, LoneDense):
        y = jax.lax.dot_general(x[:1].astype(kernel.dtype), kernel, (((1,), (0,)), ((), ())))
        y = jnp.broadcast_to(y, (x.shape[0], y.shape[1]))
        return y if weight.bias is None else y + weight.bias
    y = jax.lax.dot_general(
        x.astype(kernel.dtype), kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return y if weight.bias is None else y + weight.bias


def lone_is_exact(shapes: Collection[tuple[int, int]]) -> bool:
    """Whether this host gives one row times ``[in, out]`` the bits of two rows times ``[out, in]``, in float32.

    It depends on the processor.  shapes: of the kernels, ``[out, in]``.
    """
    rng = np.random.default_rng(0)

    def agrees(shape: tuple[int, int]) -> bool:
        kernel = rng.standard_normal(shape, np.float32)
        x = rng.standard_normal((2, shape[1]), np.float32)
        two, one = jax.jit(linear)(x, Dense(kernel)), jax.jit(linear)(x, LoneDense(np.ascontiguousarray(kernel.T)))
        return np.array_equal(two[0], one[0])

    return all(agrees(shape) for shape in shapes)


def linear_sum(x: jax.Array, weight: Dense | LoneDense, shard: Shard, axis: str) -> jax.Array:
    """``linear`` of an input whose width is divided over devices along ``axis``: the parts' products added up."""
    if shard.degree(axis) == 1:
        return linear(x, weight)
    y = shard.sum(linear(x, Dense(weight.kernel)).astype(weight.kernel.dtype), axis).astype(jnp.float32)
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


def all_heads_norm(x: jax.Array, scale: jax.Array, config: ModelConfig, shard: Shard, axis: str) -> jax.Array:
    """Norm over the dimensions of all heads at once, of ``x [rows, width]`` that is divided over devices by head."""
    degree = shard.degree(axis)
    if degree == 1:
        return NORMS[config.norm_kind](x, scale, config.norm_eps)
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


def embed(table: jax.Array, token_ids: jax.Array, shard: Shard) -> jax.Array:
    """``[tokens]`` ids -> ``[tokens, hidden]`` float32, from this device's rows of ``table [vocab, hidden]``."""
    if shard.degree("vocab") == 1:
        return table[token_ids].astype(jnp.float32)
    local = token_ids - shard.index("vocab") * table.shape[0]
    is_own = (local >= 0) & (local < table.shape[0])
    rows = jnp.where(is_own[:, None], table[jnp.where(is_own, local, 0)], 0)
    return shard.sum(rows, "vocab").astype(jnp.float32)
