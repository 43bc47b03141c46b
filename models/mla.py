"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form.

Keys and values of all heads are rebuilt from one latent a token.  Folding the rebuilding matrices into the
query and into the output leaves attention of all heads over one shared key, the latent with the rotary part
behind it, and one shared value, the latent: that is what the cache holds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from precast.models import cache as kv_cache
from precast.models import rope
from precast.models.attention import Tokens, attend
from precast.models.config import ModelConfig
from precast.models.layers import linear, per_head_linear, rms_norm


def latent_attention(
    weights: dict[str, Any],
    layer_cache: kv_cache.LayerCache,
    x: jax.Array,
    tokens: Tokens,
    config: ModelConfig,
    layer: int,
) -> tuple[kv_cache.LayerCache, jax.Array]:
    """Arguments and result as ``attention.attention``.

    weights: ``q``, or ``q_down``, ``q_down_norm`` and ``q_up``; ``kv_down`` and ``kv_down_norm``; ``key_up``
    ``[heads, latent, nope]`` and ``value_up`` ``[heads, value, latent]``; ``o``.
    """
    mla = config.mla
    assert mla is not None
    if "q" in weights:
        queries = linear(x, weights["q"])
    else:
        narrow = rms_norm(linear(x, weights["q_down"]), weights["q_down_norm"], mla.norm_eps)
        queries = linear(narrow, weights["q_up"])
    queries = queries.reshape(x.shape[0], config.num_heads, -1)
    plain, turning = jnp.split(queries, [mla.qk_nope_head_dim], axis=-1)
    latent, key = jnp.split(linear(x, weights["kv_down"]), [mla.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, weights["kv_down_norm"], mla.norm_eps)[:, None, :]
    cos, sin = tokens.angles["full"]
    keys = jnp.concatenate([latent, rope.rotate(key[:, None, :], cos, sin)], axis=-1)
    layer_cache = kv_cache.write(layer_cache, keys, latent, tokens.page_ids, tokens.offsets)
    queries = jnp.concatenate([per_head_linear(plain, weights["key_up"]), rope.rotate(turning, cos, sin)], axis=-1)
    mixed = attend(queries, layer_cache, tokens, config, layer)
    values = per_head_linear(mixed, weights["value_up"])
    return layer_cache, linear(values.reshape(x.shape[0], -1), weights["o"])
