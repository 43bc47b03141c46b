"""The small parts that every layer shares: dense products, norms, activations, the vocabulary's two ends."""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Dense:
    """A dense layer's weight as the target lays it out: ``kernel [out, in]``, and ``bias [out]`` float32 or None."""

    kernel: jax.Array
    bias: jax.Array | None = None


def linear(x: jax.Array, weight: Dense) -> jax.Array:
    """``x @ kernel.T + bias``: ``[rows, in]`` -> ``[rows, out]`` float32, accumulated in float32.

    Every dense product of a model goes through here.  The kernel is ``[out, in]`` because in that orientation
    XLA's CPU backend sums every output in one order whatever the number of rows from two up: a row's result
    does not depend on how many others share the step.  (With ``[in, out]`` in float32 it splits the sum
    differently at 2 to 48 rows, and one row takes another path in either orientation.)
    """
    kernel = weight.kernel
    y = jax.lax.dot_general(
        x.astype(kernel.dtype), kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return y if weight.bias is None else y + weight.bias


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm (arXiv:1910.07467) of ``x [rows, width]`` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(row_sums(x * x) / x.shape[-1] + eps) * scale


def row_sums(x: jax.Array) -> jax.Array:
    """``[rows, width]`` float32 -> ``[rows, 1]``, each row summed in one order whatever the number of rows.

    A product with ones: XLA's CPU backend vectorises a plain reduction along the rows or along the width
    depending on how many rows there are, and the two differ in the last bits.
    """
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


def embed(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """``[tokens]`` ids -> ``[tokens, hidden]`` float32, from ``table [vocab, hidden]``."""
    return table[token_ids].astype(jnp.float32)
