"""Rotary position embedding (arXiv:2104.09864) from tables of float32 cosines and sines.

The tables are made once on the host, so that a position's angle is one number whatever program reads it.
Halves are rotated against each other, as in the Hugging Face checkpoints; weights that are meant for
interleaved pairs are put in that order when they are laid out (see ``halves_first``).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from precast.models.config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int, num_positions: int) -> np.ndarray:
    """Radians per position of each pair, ``[dim / 2]`` float32.

    Kinds whose frequencies depend on a sequence's length ("dynamic", "longrope") take the longest that is
    served, num_positions, for all requests: a cached key must not depend on how long its request became.
    """
    base = rope.theta
    if rope.kind == "dynamic":
        stretch = max(num_positions / rope.original_max_position_embeddings, 1.0)
        base *= (rope.factor * stretch - (rope.factor - 1)) ** (dim / (dim - 2))
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = 1.0 / np.float64(base) ** exponent.astype(np.float64)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, frequencies, dim)
    elif rope.kind == "longrope":
        is_long = num_positions > rope.original_max_position_embeddings
        frequencies = frequencies / np.asarray(rope.long_factor if is_long else rope.short_factor)
    if rope.divisors:
        frequencies = frequencies / np.asarray(rope.divisors)
    return frequencies.astype(np.float32)


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Three bands by wavelength: short ones stay, long ones are divided, those between are blended."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, frequencies: np.ndarray, dim: int) -> np.ndarray:
    """A ramp over the pairs from unchanged to divided (arXiv:2309.00071)."""

    def pair_of(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    divided = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    return divided * frequencies / rope.factor + (1 - divided) * frequencies


def tables(config: ModelConfig, num_positions: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(cos, sin), each ``[num_positions, dim / 2]`` float32, of "full" layers and of "sliding" ones that differ."""
    kinds = {"full": config.rope}
    if config.rope_sliding is not None:
        kinds["sliding"] = config.rope_sliding
    positions = np.arange(num_positions, dtype=np.float32)[:, None]
    made = {}
    for kind, rope in kinds.items():
        angles = positions * inverse_frequencies(rope, config.rotary_dim(rope), num_positions)[None, :]
        factor = np.float32(rope.attention_factor)
        made[kind] = (np.cos(angles) * factor, np.sin(angles) * factor)
    return made


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first ``dim`` dimensions of ``x [tokens, heads, head_dim]`` by ``cos, sin [tokens, dim / 2]``."""
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def halves_first(array: np.ndarray, num_heads: int, first: int, dim: int) -> np.ndarray:
    """Reorders rows of a projection so that its interleaved pairs become halves.

    Scores do not change when queries and keys are reordered alike.

    Args:
      array: ``[num_heads * head_dim, …]``.
      num_heads: heads in it.
      first, dim: in each head, rows first to first + dim - 1 are the pairs (0, 1), (2, 3), …
    """
    heads = array.reshape(num_heads, -1, *array.shape[1:])
    order = np.arange(heads.shape[1])
    pairs = order[first : first + dim]
    order[first : first + dim] = np.concatenate([pairs[::2], pairs[1::2]])
    return heads[:, order].reshape(array.shape)
