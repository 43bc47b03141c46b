"""Self-attention of one layer over the paged cache."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from precast.kernels_pallas.paged_attention import cpu
from precast.models import cache as kv_cache
from precast.models import rope
from precast.models.config import ModelConfig
from precast.models.layers import NORMS, linear

# A jax.Array in a program, a NumPy array where the host packs it.
Packed = Any


@flax.struct.dataclass
class Segment:
    """Rows of equal width within a step: decode rows (one query each) or blocks of a prefill.

    Attributes:
      token_ids: ``[rows, q]`` int32.
      starts: ``[rows]`` int32, position of a row's first query.
      lengths: ``[rows]`` int32, live queries of a row; the rest is padding, and 0 makes the whole row padding.
      page_table: ``[rows, width]`` int32.
    """

    token_ids: Packed
    starts: Packed
    lengths: Packed
    page_table: Packed

    @property
    def num_tokens(self) -> int:
        rows, width = self.token_ids.shape
        return rows * width

    def positions(self) -> jax.Array:
        """``[rows, q]`` int32."""
        return self.starts[:, None] + jnp.arange(self.token_ids.shape[1], dtype=jnp.int32)

    def destinations(self, page_size: int) -> tuple[jax.Array, jax.Array]:
        """(page ids, offsets) each ``[rows * q]``: where each token's keys and values go, padding to scratch."""
        positions = self.positions()
        live = jnp.arange(positions.shape[1], dtype=jnp.int32)[None, :] < self.lengths[:, None]
        column = jnp.where(live, positions // page_size, 0)
        page_ids = jnp.take_along_axis(self.page_table, column, axis=1, mode="promise_in_bounds")
        page_ids = jnp.where(live, page_ids, kv_cache.SCRATCH_PAGE)
        return page_ids.reshape(-1), (positions % page_size).reshape(-1)


@flax.struct.dataclass
class Tokens:
    """What all layers of a step share: the segments, and each token's angles and place in the cache.

    angles: (cos, sin) of each token, ``[tokens, rotary_dim / 2]``, by kind of layer.
    """

    segments: tuple[Segment, ...]
    angles: dict[str, tuple[jax.Array, jax.Array]]
    page_ids: jax.Array
    offsets: jax.Array


def lay_out(segments: tuple[Segment, ...], rope_tables: dict[str, Any], page_size: int) -> Tokens:
    """Works out once a step what every layer's attention needs."""
    positions = jnp.concatenate([segment.positions().reshape(-1) for segment in segments])
    # Padding may stand past the tables' end; its angles are never used.
    positions = jnp.minimum(positions, rope_tables["full"][0].shape[0] - 1)
    places = [segment.destinations(page_size) for segment in segments]
    return Tokens(
        segments=segments,
        angles=jax.tree.map(lambda table: table[positions], rope_tables),
        page_ids=jnp.concatenate([page_ids for page_ids, _ in places]),
        offsets=jnp.concatenate([offsets for _, offsets in places]),
    )


def attention(
    weights: dict[str, Any],
    layer_cache: kv_cache.LayerCache,
    x: jax.Array,
    tokens: Tokens,
    config: ModelConfig,
    layer: int,
) -> tuple[kv_cache.LayerCache, jax.Array]:
    """Writes the tokens' keys and values, then attends each segment over its pages.

    Args:
      weights: ``qkv`` and ``o``, Dense; ``q_norm`` and ``k_norm``, ``sinks [heads]`` for models that have them.
      layer_cache: this layer's pages (donated through the step).
      x: ``[tokens, hidden]`` float32, normed.
      tokens: what ``lay_out`` made.
      layer: the layer's number.

    Returns:
      The layer's pages and ``[tokens, hidden]`` float32.
    """
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    widths = [heads * head_dim, (heads + kv_heads) * head_dim]
    queries, keys, values = jnp.split(linear(x, weights["qkv"]), widths, axis=-1)
    queries = _qk_norm(queries, weights.get("q_norm"), config).reshape(-1, heads, head_dim)
    keys = _qk_norm(keys, weights.get("k_norm"), config).reshape(-1, kv_heads, head_dim)
    kind = config.layer_rope_kind(layer)
    if kind is not None:
        queries = rope.rotate(queries, *tokens.angles[kind])
        keys = rope.rotate(keys, *tokens.angles[kind])
    values = values.reshape(-1, kv_heads, head_dim)
    layer_cache = kv_cache.write(layer_cache, keys, values, tokens.page_ids, tokens.offsets)
    mixed = attend(queries, layer_cache, tokens, config, layer, sinks=weights.get("sinks"))
    return layer_cache, linear(mixed.reshape(x.shape[0], -1), weights["o"])


def attend(
    queries: jax.Array,
    layer_cache: kv_cache.LayerCache,
    tokens: Tokens,
    config: ModelConfig,
    layer: int,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends ``queries [tokens, heads, key_dim]`` over the cache: ``[tokens, heads, value_dim]`` float32."""
    outputs = []
    first = 0
    for segment in tokens.segments:
        rows, width = segment.token_ids.shape
        mixed = cpu.paged_attention(
            queries[first : first + segment.num_tokens].reshape(rows, width, *queries.shape[1:]),
            *layer_cache,
            segment.page_table,
            jnp.where(segment.lengths > 0, segment.starts + segment.lengths, 0),
            segment.starts,
            scale=config.attention_scale or config.head_dim**-0.5,
            window=config.layer_window(layer),
            soft_cap=config.attention_soft_cap,
            sinks=sinks,
        )
        outputs.append(mixed.reshape(segment.num_tokens, *mixed.shape[2:]))
        first += segment.num_tokens
    return jnp.concatenate(outputs)


def _qk_norm(x: jax.Array, scale: jax.Array | None, config: ModelConfig) -> jax.Array:
    """Norm of ``x [tokens, heads * head_dim]``, each head on its own or all at once, as ``config.qk_norm`` says."""
    if scale is None:
        return x
    norm = NORMS[config.norm_kind]
    if config.qk_norm == "all":
        return norm(x, scale, config.norm_eps)
    one = jnp.ones((), jnp.float32)
    heads = norm(x.reshape(-1, config.head_dim), one, config.norm_eps)
    return (heads.reshape(x.shape[0], -1, config.head_dim) * scale).reshape(x.shape)
