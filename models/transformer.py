"""The one forward pass that every family shares; ``ModelConfig``'s traits say what differs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from precast.models import cache as kv_cache
from precast.models.attention import Segment, Tokens, attention, lay_out
from precast.models.config import ModelConfig
from precast.models.layers import NORMS, Dense, embed, gated, linear, soft_cap
from precast.models.mla import latent_attention
from precast.models.moe import mixture

Weights = dict[str, Any]


def forward(
    weights: Weights, cache: kv_cache.Cache, segments: tuple[Segment, ...], *, config: ModelConfig
) -> tuple[kv_cache.Cache, jax.Array]:
    """Runs the tokens of all segments through the model.

    Dense layers run once over all tokens; attention runs a segment at a time over the paged cache.

    Args:
      weights: what ``models.layout`` built.
      cache: the paged KV cache; the caller donates it.
      segments: rows of tokens with their positions and pages.

    Returns:
      The cache with the new tokens written, and the final hidden states ``[tokens, hidden]`` float32, after the
      last norm, in the order of the segments' rows.
    """
    page_size = cache[0][1].shape[2]
    tokens = lay_out(segments, weights["rope"], page_size)
    x = embed(weights["embed"], jnp.concatenate([segment.token_ids.reshape(-1) for segment in segments]))
    x = x * config.embedding_multiplier
    new_cache = []
    for index, (layer, layer_cache) in enumerate(zip(weights["layers"], cache, strict=True)):
        layer_cache, x = _block(layer, layer_cache, x, tokens, config, index)
        new_cache.append(layer_cache)
    return tuple(new_cache), _norm(x, weights, "final_norm", config)


def _block(
    layer: Weights, layer_cache: kv_cache.LayerCache, x: jax.Array, tokens: Tokens, config: ModelConfig, index: int
) -> tuple[kv_cache.LayerCache, jax.Array]:
    """One layer: attention and feed-forward, each added to the residual ``x [tokens, hidden]`` float32."""
    attend = attention if config.mla is None else latent_attention
    feed_forward = mixture if config.layer_is_moe(index) else mlp
    normed = _norm(x, layer, "attn_norm", config)
    layer_cache, mixed = attend(layer, layer_cache, normed, tokens, config, index)
    mixed = _norm(mixed, layer, "attn_post_norm", config) * config.residual_multiplier
    if config.norm_placement == "parallel":
        return layer_cache, x + mixed + feed_forward(layer, normed, config) * config.residual_multiplier
    x = x + mixed
    fed = feed_forward(layer, _norm(x, layer, "mlp_norm", config), config)
    return layer_cache, x + _norm(fed, layer, "mlp_post_norm", config) * config.residual_multiplier


def _norm(x: jax.Array, layer: Weights, name: str, config: ModelConfig) -> jax.Array:
    """The named norm, for layers that have it."""
    return NORMS[config.norm_kind](x, layer[name], config.norm_eps) if name in layer else x


def mlp(weights: Weights, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Gated feed-forward: ``down(act(gate(x)) * up(x))``, ``[tokens, hidden]`` float32."""
    gate, up = jnp.split(linear(x, weights["gate_up"]), 2, axis=-1)
    return linear(gated(gate, up, config), weights["down"])


def unembed(weights: Weights, hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """``[rows, hidden]`` -> logits ``[rows, vocab]`` float32; a tied model reads the embedding table."""
    logits = linear(hidden, Dense(weights["embed"]) if "head" not in weights else weights["head"])
    return soft_cap(logits * config.logits_multiplier, config.logits_soft_cap)


def head_weights(weights: Weights) -> Weights:
    """The part of the weights that ``unembed`` reads."""
    return {
        name: weights[name]
        for name in ("embed", "head")
        if name in weights and (name == "head" or "head" not in weights)
    }
