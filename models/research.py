"""A model as two plain functions, to differentiate, batch, jit, take apart or change.

``load`` gives ``prefill(params, token_ids)`` and ``decode(params, cache, token_ids, positions)``.  They are the shared
transformer with the accelerators' layout of weights and pages and the kernels' readable twins, which JAX can
differentiate and ``vmap`` on any backend.  The paged cache stays out of sight: sequence b of a batch owns a run of
pages, and ``keys_and_values`` shows what they hold.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from precast.kernels_pallas import layout as page_layout
from precast.kernels_pallas.targets import Target
from precast.models import cache as kv_cache
from precast.models import layout, rope, transformer
from precast.models.cache import CacheSpec, Segment
from precast.models.checkpoint import open_checkpoint
from precast.models.config import ModelConfig
from precast.models.placement import Placement

PLACEMENT = Placement(Target("reference"))
PAGE_SIZE = 16


class Model(NamedTuple):
    """What ``load`` gives: see ``prefill`` and ``decode`` for the functions, without their keyword arguments.

    params: nested dicts and tuples of arrays; like layers are stacked along a first axis where ``models.runs`` says so.
    """

    config: ModelConfig
    params: Any
    prefill: Callable[..., tuple[jax.Array, jax.Array]]
    decode: Callable[..., tuple[jax.Array, jax.Array]]


def load(path: str, *, dtype: str = "float32", max_tokens: int = 1024) -> Model:
    """Reads a checkpoint.

    Args:
      path: a Hugging Face directory, a GGUF file, a directory that ``runtime-convert`` wrote, or a hub id.
      dtype: of dense weights and the cache, "float32" or "bfloat16"; all else is float32.
      max_tokens: room for one sequence, prompt and output together; the cache's memory and the work of a gradient
        through it grow with it.

    Raises:
      CheckpointError: one line that says what is wrong and what to do.
      ValueError: max_tokens is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: it must be at least 1")
    checkpoint = open_checkpoint(path)
    checkpoint.check()
    config = checkpoint.config
    params = layout.build(config, checkpoint.read, dtype=dtype, num_positions=max_tokens, placement=PLACEMENT)
    # Nothing to train: the functions make these tables themselves.
    del params["rope"]
    settings = {"config": config, "max_tokens": max_tokens}
    return Model(config, params, functools.partial(prefill, **settings), functools.partial(decode, **settings))


def prefill(params: Any, token_ids: jax.Array, *, config: ModelConfig, max_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Reads prompts.

    Shorter prompts of a batch are padded at their end with any id: no token sees a later one, and ``decode`` writes
    over the padding.

    Args:
      params: as loaded.
      token_ids: ``[batch, tokens]`` int32, tokens at most max_tokens.
      config, max_tokens: as loaded.

    Returns:
      Logits after each token ``[batch, tokens, vocab]`` float32, and the cache for ``decode``, one array.

    Raises:
      ValueError: more tokens than there is room for.
    """
    batch, tokens = token_ids.shape
    if tokens > max_tokens:
        raise ValueError(f"token_ids has {tokens} tokens: load made room for max_tokens, {max_tokens}")
    spec = cache_spec(config, batch, max_tokens, params["embed"].dtype.name)
    rows = segment(token_ids, jnp.zeros((batch,), jnp.int32), spec)
    # Pages beyond the prompt would only make attention wider.
    rows = dataclasses.replace(rows, page_table=rows.page_table[:, : _pages(tokens)])
    return _run(params, kv_cache.create(spec), rows, config, max_tokens)


def decode(
    params: Any,
    cache: jax.Array,
    token_ids: jax.Array,
    positions: jax.Array,
    *,
    config: ModelConfig,
    max_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Appends one token to each sequence.

    Args:
      params: as loaded.
      cache: from ``prefill`` or ``decode`` of the same batch; not changed.
      token_ids: ``[batch]`` int32.
      positions: ``[batch]`` int32 of those tokens, from 0; what the cache holds from there on is forgotten.
      config, max_tokens: as loaded.

    Returns:
      Logits after the token ``[batch, vocab]`` float32, and the cache with the tokens in it.  Where a position is not
      below max_tokens the logits are no numbers and the cache is as it was.

    Raises:
      ValueError: the cache is of another batch.
    """
    (batch,) = token_ids.shape
    spec = cache_spec(config, batch, max_tokens, cache.dtype.name)
    shape = kv_cache.shapes(spec, None).shape
    if cache.shape != shape:
        raise ValueError(f"cache is {cache.shape}: for {batch} sequences it must be {shape}")
    has_room = positions < max_tokens
    rows = segment(token_ids[:, None], positions, spec)
    rows = dataclasses.replace(rows, lengths=has_room.astype(jnp.int32))
    logits, cache = _run(params, cache, rows, config, max_tokens)
    return jnp.where(has_room[:, None], logits[:, 0], jnp.nan), cache


def keys_and_values(cache: jax.Array, batch: int, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """What a cache holds.

    Args:
      cache: from ``prefill`` or ``decode``.
      batch: sequences in it.
      config: as loaded.

    Returns:
      Keys ``[layers, batch, positions, kv_heads, head_dim]``, turned by RoPE, and values likewise; positions are those
      that there is room for, rounded up.  For latent attention there is one head: latent and rotary key, and latent.
    """
    pages = cache.reshape(config.num_layers, -1, *cache.shape[1:])[:, 1:]
    lanes = pages.reshape(config.num_layers, batch, -1, cache.shape[-1])
    spec = cache_spec(config, batch, lanes.shape[2], cache.dtype.name)
    return page_layout.unpack_tokens(lanes, spec.num_kv_heads, spec.head_dim, spec.value_dim)


def cache_spec(config: ModelConfig, batch: int, max_tokens: int, dtype: str) -> CacheSpec:
    """The cache of a batch: a scratch page, then each sequence's pages."""
    num_pages = 1 + batch * _pages(max_tokens)
    return CacheSpec.of(config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=dtype, placement=PLACEMENT)


def segment(token_ids: jax.Array, starts: jax.Array, spec: CacheSpec) -> Segment:
    """``token_ids [batch, q]`` from positions ``starts [batch]`` on, each sequence in its own pages of the cache."""
    batch, q = token_ids.shape
    table = jnp.arange(1, spec.num_pages, dtype=jnp.int32).reshape(batch, -1)
    return Segment(token_ids, starts, jnp.full((batch,), q, jnp.int32), table)


def _run(
    params: Any, cache: jax.Array, rows: Segment, config: ModelConfig, max_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Logits ``[batch, q, vocab]`` and the cache."""
    weights = {**params, "rope": jax.tree.map(jnp.asarray, rope.tables(config, max_tokens))}
    cache, hidden = transformer.forward(weights, cache, (rows,), config=config, placement=PLACEMENT)
    logits = transformer.unembed(weights, hidden, config, PLACEMENT)
    return logits.reshape(*rows.token_ids.shape, -1), cache


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
