"""Rotary position embedding (arXiv:2104.09864) from a table of float32 cosines and sines.

The table is made once on the host, so that a position's angle is one number whatever program reads it.
Halves are rotated against each other, as in the Hugging Face checkpoints.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from precast.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """``[rotary_dim / 2]`` float32."""
    dim = config.head_dim
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (1.0 / np.float32(config.rope.theta) ** exponent).astype(np.float32)


def table(config: ModelConfig, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each ``[num_positions, rotary_dim / 2]`` float32."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse_frequencies(config)[None, :]
    return np.cos(angles), np.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates ``x [tokens, heads, head_dim]`` by ``cos, sin [tokens, head_dim / 2]``."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
