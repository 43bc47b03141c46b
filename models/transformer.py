"""The one forward pass that every family shares; ``ModelConfig``'s traits say what differs.

Over a mesh this is the program of one device (inside ``shard_map``): weights and cache are its parts, activations are
whole, and what a divided product leaves is added up over the devices once after attention and once after the
feed-forward.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from precast.models import cache as kv_cache
from precast.models.attention import Tokens, attention, lay_out
from precast.models.cache import Segment
from precast.models.config import ModelConfig
from precast.models.layers import Dense, PackedDense, embed, gated_linear, linear, linear_sum, norm, soft_cap
from precast.models.mla import latent_attention
from precast.models.moe import mixture
from precast.models.placement import Placement
from precast.models.runs import Run, runs

Weights = dict[str, Any]
CPU = Placement()


def forward(
    weights: Weights,
    cache: kv_cache.Cache,
    segments: tuple[Segment, ...],
    *,
    config: ModelConfig,
    placement: Placement = CPU,
) -> tuple[kv_cache.Cache, jax.Array]:
    """Runs the tokens of all segments through the model.

    Dense layers run once over all tokens; attention runs a segment at a time over the paged cache.

    Args:
      weights: what ``models.layout`` built.
      cache: the paged KV cache; the caller donates it.
      segments: rows of tokens with their positions and pages.
      config: the whole model's.
      placement: target and mesh.

    Returns:
      The cache with the new tokens written, and the final hidden states ``[tokens, hidden]`` float32, after the
      last norm, in the order of the segments' rows.
    """
    tokens = lay_out(segments, weights["rope"], kv_cache.page_size(cache))
    token_ids = jnp.concatenate([segment.token_ids.reshape(-1) for segment in segments])
    x = embed(weights["embed"], token_ids, placement.shard) * config.embedding_scale(weights["embed"].dtype)
    if placement.is_native:
        # Products leave out rows of zeros at the end.
        is_live = jnp.concatenate([segment.is_live().reshape(-1) for segment in segments])
        x = jnp.where(is_live[:, None], x, 0)
    layers = weights["layers"]
    for run in runs(config, placement.is_stacked):
        cache, x = _run(layers[: len(run.positions)], cache, x, tokens, config, placement, run)
        layers = layers[len(run.positions) :]
    return cache, _norm(x, weights, "final_norm", config, placement)


def _run(
    layers: tuple[Weights, ...],
    cache: kv_cache.Cache,
    x: jax.Array,
    tokens: Tokens,
    config: ModelConfig,
    placement: Placement,
    run: Run,
) -> tuple[kv_cache.Cache, jax.Array]:
    """Like layers in a scan over their stacked weights, or one layer by itself."""
    period = len(run.positions)
    if run.repeats == 1:
        for i in range(period):
            cache, x = _block(layers[i], cache, x, tokens, config, placement, run.first + i, run.first + i)
        return cache, x

    def body(carry, repeat):
        cache, x = carry
        number, weights = repeat
        for i in range(period):
            layer = run.first + number * period + i
            cache, x = _block(weights[i], cache, x, tokens, config, placement, run.first + i, layer)
        return (cache, x), None

    (cache, x), _ = jax.lax.scan(body, (cache, x), (jnp.arange(run.repeats, dtype=jnp.int32), layers))
    return cache, x


def _block(
    weights: Weights,
    cache: kv_cache.Cache,
    x: jax.Array,
    tokens: Tokens,
    config: ModelConfig,
    placement: Placement,
    kind: int,
    layer: int | jax.Array,
) -> tuple[kv_cache.Cache, jax.Array]:
    """One layer: attention and feed-forward, each added to the residual ``x [tokens, hidden]`` float32.

    layer is its number, kind that of a layer whose traits it shares.
    """
    attend = attention if config.mla is None else latent_attention
    feed_forward = mixture if config.layer_is_moe(kind) else mlp
    normed = _norm(x, weights, "attn_norm", config, placement)
    cache, mixed = attend(weights, cache, normed, tokens, config, placement, kind, layer)
    mixed = _norm(mixed, weights, "attn_post_norm", config, placement) * config.residual_multiplier
    if config.norm_placement == "parallel":
        return cache, x + mixed + feed_forward(weights, normed, config, placement) * config.residual_multiplier
    x = x + mixed
    fed = feed_forward(weights, _norm(x, weights, "mlp_norm", config, placement), config, placement)
    return cache, x + _norm(fed, weights, "mlp_post_norm", config, placement) * config.residual_multiplier


def _norm(x: jax.Array, layer: Weights, name: str, config: ModelConfig, placement: Placement) -> jax.Array:
    """The named norm, for layers that have it."""
    if name not in layer:
        return x
    return norm(x, layer[name], config.norm_eps, kind=config.norm_kind, is_native=placement.is_native)


def mlp(weights: Weights, x: jax.Array, config: ModelConfig, placement: Placement) -> jax.Array:
    """Gated feed-forward: ``down(act(gate(x)) * up(x))``, ``[tokens, hidden]`` float32."""
    hidden = gated_linear(x, weights["gate_up"], config)
    return linear_sum(hidden, weights["down"], placement.shard, "mlp")


def unembed(weights: Weights, hidden: jax.Array, config: ModelConfig, placement: Placement = CPU) -> jax.Array:
    """``[rows, hidden]`` -> logits of this device's part of the vocabulary ``[rows, vocab]`` float32.

    A tied model reads the embedding table.  Rows of the vocabulary that are padding get minus infinity.
    """
    head = weights["head"] if "head" in weights else weights["embed"]
    logits = linear(hidden, head if isinstance(head, (Dense, PackedDense)) else Dense(head))
    logits = soft_cap(logits * config.logits_multiplier, config.logits_soft_cap)
    shard, width = placement.shard, logits.shape[1]
    if width * shard.degree("vocab") == config.vocab_size:
        return logits
    token_ids = shard.index("vocab") * width + jnp.arange(width, dtype=jnp.int32)
    return jnp.where(token_ids < config.vocab_size, logits, -jnp.inf)


def body_weights(weights: Weights) -> Weights:
    """The part of the weights that ``forward`` reads."""
    return {name: weight for name, weight in weights.items() if name != "head"}


def head_weights(weights: Weights) -> Weights:
    """The part of the weights that ``unembed`` reads."""
    return {
        name: weights[name]
        for name in ("embed", "head")
        if name in weights and (name == "head" or "head" not in weights)
    }
