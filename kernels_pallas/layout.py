"""How a paged cache lies in an accelerator's memory.

Pages are one array ``[pages, page_size, lanes]``.  A token's lanes are ``[k0 v0 k1 v1 ...]``, one K and one V of
``head_dim`` for each KV head, padded with zeros to a multiple of 128: the layout that TPU compilers keep row-major for
every head size, and that a GPU's bulk copies can slice by head.  Under a mesh the lanes are sharded by KV head, each
shard with its own padding.  The latent form (MLA) stores one latent a token instead: keys are all of its
``head_dim`` lanes, values the first ``value_dim`` of them.

Quantised pages (int8, float8_e4m3fn) come with ``scales [pages, 1, scale_lanes]`` float32, one scale a token, KV head
and side: lane ``(2 * head + side) * page_size + token`` (side 0 for K, 1 for V), padded to a multiple of 128.
The latent form has one scale a token, used for both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LANES = 128
QUANTIZED_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}


def pad_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def page_lanes(num_kv_heads: int, head_dim: int, value_dim: int | None = None) -> int:
    """Lanes of a token in one shard: ``value_dim`` given means the latent form."""
    return pad_to(num_kv_heads * head_dim * (2 if value_dim is None else 1), LANES)


def scale_lanes(num_kv_heads: int, page_size: int, value_dim: int | None = None) -> int:
    """Lanes of a page's row of scales in one shard."""
    return pad_to(num_kv_heads * page_size * (2 if value_dim is None else 1), LANES)


def is_quantized(dtype) -> bool:
    return jnp.dtype(dtype).name in QUANTIZED_MAX


def pack_tokens(keys: jax.Array, values: jax.Array | None) -> jax.Array:
    """``[..., kv_heads, head_dim]`` K and V -> ``[..., lanes]``; ``values=None`` is the latent form."""
    both = keys[..., None, :] if values is None else jnp.stack([keys, values], axis=-2)
    lanes = both.reshape(*both.shape[:-3], -1)
    return jnp.pad(lanes, [(0, 0)] * (lanes.ndim - 1) + [(0, pad_to(lanes.shape[-1], LANES) - lanes.shape[-1])])


def unpack_tokens(
    lanes: jax.Array, num_kv_heads: int, head_dim: int, value_dim: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """``[..., lanes]`` -> K ``[..., kv_heads, head_dim]`` and V ``[..., kv_heads, head_dim or value_dim]``."""
    sides = 2 if value_dim is None else 1
    used = lanes[..., : num_kv_heads * sides * head_dim]
    both = used.reshape(*lanes.shape[:-1], num_kv_heads, sides, head_dim)
    return both[..., 0, :], both[..., -1, :value_dim]


def unpack_scales(scales: jax.Array, num_kv_heads: int, page_size: int, latent: bool) -> tuple[jax.Array, jax.Array]:
    """``[..., scale_lanes]`` -> the scales of K and of V, ``[..., page_size, kv_heads]`` each."""
    sides = 1 if latent else 2
    used = scales[..., : num_kv_heads * sides * page_size]
    both = jnp.moveaxis(used.reshape(*scales.shape[:-1], num_kv_heads, sides, page_size), -1, -3)
    return both[..., 0], both[..., -1]


def quantize(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Symmetric quantisation over the last axis: ``x ~ q * scale[..., None]``.

    Returns q (``dtype``) and scale float32.  A row of zeros gets scale 1.
    """
    top = QUANTIZED_MAX[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(amax > 0, amax / top, 1.0)
    q = x / scale[..., None]
    q = jnp.round(q) if jnp.dtype(dtype) == jnp.int8 else q
    return jnp.clip(q, -top, top).astype(dtype), scale


def quantize_tokens(keys, values, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Pack new tokens for pages of ``dtype``: lanes ``[rows, q, lanes]``, and where that dtype is quantised the scales
    ``[rows, q, kv_heads * sides]`` float32 in the order of the scale rows."""
    if not is_quantized(dtype):
        return pack_tokens(keys.astype(dtype), None if values is None else values.astype(dtype)), None
    keys, k_scale = quantize(keys, dtype)
    if values is None:
        return pack_tokens(keys, None), k_scale
    values, v_scale = quantize(values, dtype)
    scales = jnp.stack([k_scale, v_scale], axis=-1)
    return pack_tokens(keys, values), scales.reshape(*scales.shape[:-2], -1)
