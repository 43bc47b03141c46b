"""Mixtures of experts: which experts a token visits, and the grouped products that visit them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from precast.kernels_pallas.grouped_product import grouped_product
from precast.models.config import ModelConfig, MoeConfig
from precast.models.layers import gated, gated_linear, grouped_linear, linear, row_sums
from precast.models.placement import Placement

# Rows that are routed at a time.
_ROUTE_BLOCK = 8


def mixture(weights: dict[str, Any], x: jax.Array, config: ModelConfig, placement: Placement) -> jax.Array:
    """The experts' weighted sum for each token of ``x [tokens, hidden]``, float32.

    weights: ``router`` Dense float32, ``correction_bias [experts]`` if any; ``experts_gate_up`` and
    ``experts_down``, Dense with kernels ``[experts, out, in]``; ``shared_gate_up`` and ``shared_down``
    if there is an expert that all visit, and ``shared_gate [hidden]`` float32 if its output is weighed.
    """
    moe = config.moe
    assert moe is not None
    ids, mix = _route(linear(x, weights["router"]), moe, weights.get("correction_bias"))
    outputs = _visit(weights, x, ids, config, placement)
    # Term by term, so that the order of the sum is that of the token's own choice.
    total = outputs[:, 0] * mix[:, :1]
    for choice in range(1, moe.experts_per_token):
        total = total + outputs[:, choice] * mix[:, choice : choice + 1]
    if moe.shared_intermediate_size:
        shared = linear(gated_linear(x, weights["shared_gate_up"], config), weights["shared_down"])
        if moe.shared_gate:
            shared = shared * jax.nn.sigmoid(row_sums(x * weights["shared_gate"]))
        total = total + shared
    shard = placement.shard
    if shard.degree("mlp") == 1:
        return total
    return shard.sum(total.astype(weights["experts_down"].kernel.dtype), "mlp").astype(jnp.float32)


def _route(logits: jax.Array, moe: MoeConfig, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """``route``, on CPU in blocks of one height: XLA's backend vectorises a softmax there by the number of rows, and a
    row's last bits with it."""

    def whole(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return route(logits, moe, correction_bias)

    def in_blocks(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, experts = logits.shape
        blocks = jnp.pad(logits, ((0, -tokens % _ROUTE_BLOCK), (0, 0))).reshape(-1, _ROUTE_BLOCK, experts)
        routed = jax.lax.map(whole, blocks)
        return jax.tree.map(lambda x: x.reshape(-1, moe.experts_per_token)[:tokens], routed)

    return jax.lax.platform_dependent(logits, cpu=in_blocks, default=whole)


def route(logits: jax.Array, moe: MoeConfig, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Chooses experts (the lowest index on ties) and their weights.

    Args:
      logits: ``[tokens, experts]`` float32.
      moe: how.
      correction_bias: ``[experts]`` float32, enters the choice only.

    Returns:
      Expert ids ``[tokens, experts_per_token]`` int32, best first, and their weights, float32.
    """
    if moe.router == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    elif moe.router == "softmax":
        scores = _softmax(logits)
    else:
        scores = logits
    choice = scores if correction_bias is None else scores + correction_bias
    if moe.num_groups > 1:
        choice = _within_groups(choice, moe)
    _, ids = jax.lax.top_k(choice, moe.experts_per_token)
    mix = jnp.take_along_axis(scores, ids, axis=-1)
    if moe.router == "softmax_chosen":
        mix = _softmax(mix)
    if moe.normalize:
        mix = mix / (row_sums(mix) + 1e-20)
    return ids.astype(jnp.int32), mix * moe.scaling


def _softmax(x: jax.Array) -> jax.Array:
    exponentials = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return exponentials / row_sums(exponentials)


def _within_groups(choice: jax.Array, moe: MoeConfig) -> jax.Array:
    """Scores with those outside the best groups at minus infinity."""
    tokens, experts = choice.shape
    groups = choice.reshape(tokens, moe.num_groups, experts // moe.num_groups)
    best, _ = jax.lax.top_k(groups, 1 if moe.group_score == "max" else 2)
    score = best[..., 0] if moe.group_score == "max" else best[..., 0] + best[..., 1]
    _, kept = jax.lax.top_k(score, moe.groups_kept)
    is_kept = (kept[:, :, None] == jnp.arange(moe.num_groups)).any(axis=1)
    return jnp.where(is_kept[:, :, None], groups, -jnp.inf).reshape(tokens, experts)


def _visit(
    weights: dict[str, Any], x: jax.Array, ids: jax.Array, config: ModelConfig, placement: Placement
) -> jax.Array:
    """Each token through each of its experts ``ids [tokens, k]``: ``[tokens, k, hidden]`` float32, this device's part
    of the sum."""
    gate_up, down = weights["experts_gate_up"], weights["experts_down"]
    tokens, k = ids.shape
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=down.kernel.shape[0]).astype(jnp.int32)
    rows, experts = x[order // k], flat[order]

    def products(rows: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        if placement.is_cpu:
            y = grouped_linear(rows, kernel, sizes)
        else:
            y = grouped_product(rows, kernel, sizes, target=placement.target)
        return y if bias is None else y + bias[experts]

    gate, up = jnp.split(products(rows, gate_up.kernel, gate_up.bias), 2, axis=-1)
    bias = None if down.bias is None else placement.shard.once(down.bias, "expert_mlp")
    rows = products(gated(gate, up, config), down.kernel, bias)
    return rows[jnp.argsort(order)].reshape(tokens, k, -1)
