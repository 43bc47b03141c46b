"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form.

Keys and values of all heads are rebuilt from one latent a token.  Folding the rebuilding matrices into the
query and into the output leaves attention of all heads over one shared key, the latent with the rotary part
behind it, and one shared value, the latent: that is what the cache holds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from precast.models import rope
from precast.models.attention import Tokens, reading
from precast.models.cache import Cache, update_and_attend
from precast.models.config import ModelConfig
from precast.models.layers import linear, linear_sum, norm, per_head_linear
from precast.models.placement import Placement


def latent_attention(
    weights: dict[str, Any],
    cache: Cache,
    x: jax.Array,
    tokens: Tokens,
    config: ModelConfig,
    placement: Placement,
    kind: int,
    layer: int | jax.Array,
) -> tuple[Cache, jax.Array]:
    """Arguments and result as ``attention.attention``.

    weights: ``q``, or ``q_down``, ``q_down_norm`` and ``q_up``; ``kv_down`` and ``kv_down_norm``; ``key_up``
    ``[heads, latent, nope]`` and ``value_up`` ``[heads, value, latent]``; ``o``.
    """
    mla = config.mla
    assert mla is not None
    if "q" in weights:
        queries = linear(x, weights["q"])
    else:
        narrow = linear(x, weights["q_down"])
        narrow = norm(narrow, weights["q_down_norm"], mla.norm_eps, is_native=placement.is_native)
        queries = linear(narrow, weights["q_up"])
    queries = queries.reshape(x.shape[0], placement.local_heads(config)[0], -1)
    plain, turning = jnp.split(queries, [mla.qk_nope_head_dim], axis=-1)
    latent, key = jnp.split(linear(x, weights["kv_down"]), [mla.kv_lora_rank], axis=-1)
    latent = norm(latent, weights["kv_down_norm"], mla.norm_eps, is_native=placement.is_native)[:, None, :]
    cos, sin = tokens.angles["full"]
    keys = jnp.concatenate([latent, rope.rotate(key[:, None, :], cos, sin)], axis=-1)
    queries = jnp.concatenate([per_head_linear(plain, weights["key_up"]), rope.rotate(turning, cos, sin)], axis=-1)
    cache, mixed = update_and_attend(
        cache, layer, queries, keys, None, tokens.places, reading(config, kind),
        placement, num_layers=config.num_layers,
    )  # fmt: skip
    values = per_head_linear(mixed, weights["value_up"])
    return cache, linear_sum(values.reshape(x.shape[0], -1), weights["o"], placement.shard, "heads")
