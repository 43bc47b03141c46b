"""Self-attention of one layer over the paged cache."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from precast.models import rope
from precast.models.cache import Cache, Places, Reading, Segment, update_and_attend
from precast.models.config import ModelConfig
from precast.models.layers import all_heads_norm, linear, linear_sum, norm
from precast.models.placement import Placement


@flax.struct.dataclass
class Tokens:
    """What all layers of a step share: each token's place in the cache, and its angles.

    angles: (cos, sin) of each token, ``[tokens, rotary_dim / 2]``, by kind of layer.
    """

    places: Places
    angles: dict[str, tuple[jax.Array, jax.Array]]


def lay_out(segments: tuple[Segment, ...], rope_tables: dict[str, Any], page_size: int) -> Tokens:
    """Works out once a step what every layer's attention needs."""
    positions = jnp.concatenate([segment.positions().reshape(-1) for segment in segments])
    # Padding may stand past the tables' end; its angles are never used.
    positions = jnp.minimum(positions, rope_tables["full"][0].shape[0] - 1)
    return Tokens(Places.of(segments, page_size), jax.tree.map(lambda table: table[positions], rope_tables))


def reading(config: ModelConfig, layer: int) -> Reading:
    """How a layer's queries read the cache."""
    return Reading(
        scale=config.attention_scale or config.head_dim**-0.5,
        window=config.layer_window(layer),
        soft_cap=config.attention_soft_cap,
        value_dim=None if config.mla is None else config.mla.kv_lora_rank,
    )


def attention(
    weights: dict[str, Any],
    cache: Cache,
    x: jax.Array,
    tokens: Tokens,
    config: ModelConfig,
    placement: Placement,
    kind: int,
    layer: int | jax.Array,
) -> tuple[Cache, jax.Array]:
    """Writes the tokens' keys and values, then attends over the pages.

    Args:
      weights: ``qkv`` and ``o``, Dense; ``q_norm`` and ``k_norm``, ``sinks [heads]`` for models that have them.
      cache: donated through the step.
      x: ``[tokens, hidden]`` float32, normed.
      tokens: what ``lay_out`` made.
      kind: a layer whose traits this one shares.
      layer: the layer's number.

    Returns:
      The cache and ``[tokens, hidden]`` float32.
    """
    queries, keys, values = project(weights, x, tokens, config, placement, kind)
    cache, mixed = update_and_attend(
        cache, layer, queries, keys, values, tokens.places, reading(config, kind),
        placement, num_layers=config.num_layers, sinks=weights.get("sinks"),
    )  # fmt: skip
    return cache, linear_sum(mixed.reshape(x.shape[0], -1), weights["o"], placement.shard, "heads")


def project(
    weights: dict[str, Any], x: jax.Array, tokens: Tokens, config: ModelConfig, placement: Placement, kind: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries ``[tokens, heads, head_dim]``, keys and values ``[tokens, kv_heads, head_dim]``, float32, normed and
    turned as they meet; arguments as of ``attention``."""
    heads, kv_heads = placement.local_heads(config)
    head_dim = config.head_dim
    widths = [heads * head_dim, (heads + kv_heads) * head_dim]
    queries, keys, values = jnp.split(linear(x, weights["qkv"]), widths, axis=-1)
    queries = _qk_norm(queries, weights.get("q_norm"), config, placement, "heads").reshape(-1, heads, head_dim)
    keys = _qk_norm(keys, weights.get("k_norm"), config, placement, "kv_heads").reshape(-1, kv_heads, head_dim)
    turn = config.layer_rope_kind(kind)
    if turn is not None:
        queries = rope.rotate(queries, *tokens.angles[turn])
        keys = rope.rotate(keys, *tokens.angles[turn])
    return queries, keys, values.reshape(-1, kv_heads, head_dim)


def _qk_norm(x: jax.Array, scale: jax.Array | None, config: ModelConfig, placement: Placement, axis: str) -> jax.Array:
    """Norm of ``x [tokens, heads * head_dim]``, each head on its own or all at once, as ``config.qk_norm`` says."""
    if scale is None:
        return x
    if config.qk_norm == "all":
        return all_heads_norm(x, scale, config, placement, axis)
    one = jnp.ones(config.head_dim, jnp.float32)
    heads = x.reshape(-1, config.head_dim)
    heads = norm(heads, one, config.norm_eps, kind=config.norm_kind, is_native=placement.is_native)
    return (heads.reshape(x.shape[0], -1, config.head_dim) * scale).reshape(x.shape)
