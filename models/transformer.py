"""The one forward pass that every family shares; ``ModelConfig``'s traits say what differs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from precast.models import cache as kv_cache
from precast.models.attention import Segment, attention, lay_out
from precast.models.config import ModelConfig
from precast.models.layers import ACTIVATIONS, Dense, embed, linear, rms_norm

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
    new_cache = []
    for layer, layer_cache in zip(weights["layers"], cache, strict=True):
        layer_cache, mixed = attention(
            layer, layer_cache, rms_norm(x, layer["attn_norm"], config.norm_eps), tokens, config
        )
        x = x + mixed
        x = x + mlp(layer, rms_norm(x, layer["mlp_norm"], config.norm_eps), config)
        new_cache.append(layer_cache)
    return tuple(new_cache), rms_norm(x, weights["final_norm"], config.norm_eps)


def mlp(weights: Weights, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Gated feed-forward: ``down(act(gate(x)) * up(x))``, ``[tokens, hidden]`` float32."""
    gate, up = jnp.split(linear(x, weights["gate_up"]), 2, axis=-1)
    return linear(ACTIVATIONS[config.activation](gate) * up, weights["down"])


def unembed(weights: Weights, hidden: jax.Array) -> jax.Array:
    """``[rows, hidden]`` -> logits ``[rows, vocab]`` float32; a tied model reads the embedding table."""
    return linear(hidden, Dense(weights["embed"]) if "head" not in weights else weights["head"])
