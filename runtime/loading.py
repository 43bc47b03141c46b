"""From a checkpoint and a configuration to an engine that is ready to serve."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
import time

import jax
from absl import logging
from tokenizers import Tokenizer
from tqdm import tqdm

from precast.models import cache as kv_cache
from precast.models import layout, transformer
from precast.models.checkpoint import Checkpoint
from precast.models.config import ModelConfig
from precast.runtime import plan as plans
from precast.runtime import weight_cache
from precast.runtime.config import ConfigError, EngineConfig, Shapes, derive_shapes
from precast.runtime.detokenize import Detokenizer
from precast.runtime.engine import Engine
from precast.runtime.programs import MAX_BANNED_IDS, enumerate_programs, needed_first
from precast.runtime.request import MAX_STOP_TOKEN_IDS

_DEFAULT_KV_CACHE_MEMORY = 1 << 29


def load_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    tokenizer: Tokenizer | None,
    progress: bool = False,
    xla_flags: str = "",
) -> Engine:
    """Loads weights and programs; whatever the plan folder lacks is compiled and kept.

    Args:
      checkpoint: the model.
      config: as asked for.
      tokenizer: for text and stop strings; None serves token ids only.
      progress: show bars while loading and compiling.
      xla_flags: XLA_FLAGS of the process, part of what an executable depends on.

    Raises:
      ConfigError: a setting does not fit the model or the memory.
      CheckpointError: the weights cannot be read.
    """
    model = checkpoint.config
    config, shapes, spec = resolve(model, config)
    eos_token_ids = checkpoint.text.eos_token_ids if checkpoint.text else ()
    if len(eos_token_ids) + MAX_STOP_TOKEN_IDS > MAX_BANNED_IDS:
        raise ConfigError(
            f"the model has {len(eos_token_ids)} end tokens: the limit is {MAX_BANNED_IDS - MAX_STOP_TOKEN_IDS}"
        )
    key = plans.make_key(
        model=dataclasses.asdict(model), shapes=dataclasses.asdict(shapes), dtype=config.dtype, xla_flags=xla_flags
    )
    root = pathlib.Path(config.plan_dir or default_plan_dir(checkpoint.path))
    folder = plans.PlanFolder(root, key)
    checkpoint.check()
    have = plans.load(folder, first=needed_first(shapes))
    weights = _load_weights(checkpoint, root, config.dtype, shapes, progress)
    programs = enumerate_programs(model, shapes, weights, spec)
    plan = plans.build(programs, folder, have, progress=progress)
    logging.info("plan %s\n%s", folder.path, plan.table())
    return Engine(
        model=model,
        config=config,
        shapes=shapes,
        plan=plan,
        weights=weights,
        eos_token_ids=eos_token_ids,
        detokenizer=Detokenizer(tokenizer) if tokenizer is not None else None,
    )


def resolve(model: ModelConfig, config: EngineConfig) -> tuple[EngineConfig, Shapes, kv_cache.CacheSpec]:
    """Settles what was left open: dtype, length and number of pages.

    Raises ConfigError when the memory does not hold one page, or max_model_len is beyond the model.
    """
    dtype = config.dtype
    if dtype == "auto":
        dtype = model.dtype if model.dtype in ("float32", "bfloat16") else "bfloat16"
    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {longest}: the model is made for at most {model.max_position_embeddings} positions"
        )
    spec = kv_cache.CacheSpec.of(model, num_pages=0, page_size=config.page_size, dtype=dtype)
    pages_each = -(-longest // config.page_size)
    memory = config.kv_cache_memory
    if memory is None:
        memory = min(_DEFAULT_KV_CACHE_MEMORY, _host_memory() // 4)
    num_pages = min(memory // spec.page_bytes, pages_each * config.slots)
    if num_pages < 1:
        raise ConfigError(
            f"kv_cache_memory is {memory} bytes: one page of {config.page_size} tokens takes {spec.page_bytes}; "
            "raise kv_cache_memory or lower page_size"
        )
    held = num_pages * config.page_size
    if held < longest:
        logging.warning(
            "max_model_len is lowered from %d to %d, what %d bytes of KV pages hold; raise kv_cache_memory for more",
            *(longest, held, memory),
        )
        longest = held
    if longest < 2:
        raise ConfigError(f"max_model_len is {longest}: it must be at least 2; raise kv_cache_memory")
    config = dataclasses.replace(config, dtype=dtype, max_model_len=longest, kv_cache_memory=memory)
    spec = dataclasses.replace(spec, num_pages=num_pages + 1)
    return config, derive_shapes(config, max_model_len=longest, num_pages=spec.num_pages), spec


def default_plan_dir(path: str) -> pathlib.Path:
    """Beside the model where that can be written, else in the user's cache."""
    model = pathlib.Path(path)
    beside = model / ".precast" if model.is_dir() else model.with_name(model.name + ".precast")
    try:
        beside.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=beside):
            return beside
    except OSError:
        return pathlib.Path.home() / ".cache" / "precast" / "plans"


def _load_weights(
    checkpoint: Checkpoint, root: pathlib.Path, dtype: str, shapes: Shapes, progress: bool
) -> transformer.Weights:
    """Maps the weights kept beside the plans, or lays them out from the checkpoint."""
    began = time.monotonic()
    keeps = jax.default_backend() == "cpu" and checkpoint.path.endswith(".gguf")
    key = plans.make_key(weights=checkpoint.fingerprint, dtype=dtype, num_positions=shapes.max_model_len)
    folder = root / f"weights-{plans.key_digest(key)}"
    weights = weight_cache.load(folder, checkpoint.fingerprint) if keeps else None
    if weights is None:
        with tqdm(total=checkpoint.config.num_layers, desc="loading", unit="layer", disable=not progress) as bar:
            weights = layout.build(
                checkpoint.config, checkpoint.read, dtype=dtype, num_positions=shapes.max_model_len, on_layer=bar.update
            )
        if keeps:
            weight_cache.store(folder, checkpoint.fingerprint, weights)
    jax.block_until_ready(weights)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    logging.info("%.0f MB of weights loaded in %.1f s", size / 1e6, time.monotonic() - began)
    return weights


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
