"""A model as files that JAX alone can run: prefill, decode and the sampler as ``jax.export`` artefacts.

One set for each platform, since functions with Pallas kernels cannot share one; no accelerator or compiler of one is
needed to write it.  They take lists, dicts and arrays only: whoever loads one needs nothing of this project.  Each
sequence of a batch owns a run of the cache's pages, so that no page table shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from precast.kernels_pallas.targets import Target
from precast.models import cache as kv_cache
from precast.models import layout, transformer
from precast.models.cache import CacheSpec, Segment
from precast.models.config import ModelConfig
from precast.models.placement import Placement
from precast.runtime import programs, sample, step
from precast.runtime.config import ConfigError

PLATFORMS = {"cpu": "cpu", "tpu": "tpu", "gpu": "cuda"}
# What JAX calls the chips, which its own parts of the kernels ask for.
_TPU_KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
# Of kernels whose serialised form JAX does not promise to read in later versions.
_UNCHECKED_CALLS = ("mosaic_gpu_v2",)
# What the sampler takes for each sequence besides logits, and the dtype.
SAMPLER_OPTIONS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "num_sampled": np.int32,
}


@dataclasses.dataclass(frozen=True)
class ExportShapes:
    """What the artefacts are made for.

    Attributes:
      batch: sequences at a time.
      prefill_tokens: prompt tokens of each that one call of prefill reads; longer prompts take several calls.
      max_tokens: room in the cache for one sequence, prompt and output together.
      page_size: tokens a KV page.
    """

    batch: int = 2
    prefill_tokens: int = 64
    max_tokens: int = 512
    page_size: int = 64

    def __post_init__(self) -> None:
        """Raises ConfigError for a value outside its range."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ConfigError(f"{field.name} is {value}: it must be at least 1")
        if self.page_size < 8 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size is {self.page_size}: it must be a power of two of at least 8")
        if self.prefill_tokens > self.max_tokens:
            raise ConfigError(
                f"prefill_tokens is {self.prefill_tokens}: it must be at most max_tokens, {self.max_tokens}"
            )


@dataclasses.dataclass(frozen=True)
class Exporter:
    """The functions of one model for one target."""

    config: ModelConfig
    target: Target
    shapes: ExportShapes
    dtype: str

    @property
    def platform(self) -> str:
        """As JAX names it."""
        return PLATFORMS[self.target.backend]

    @property
    def placement(self) -> Placement:
        return Placement(self.target)

    @functools.cached_property
    def cache_spec(self) -> CacheSpec:
        pages = 1 + self.shapes.batch * -(-self.shapes.max_tokens // self.shapes.page_size)
        return CacheSpec.of(
            self.config, num_pages=pages, page_size=self.shapes.page_size, dtype=self.dtype, placement=self.placement
        )

    @functools.cached_property
    def cache(self) -> Any:
        """Shapes of the cache's arrays, nested."""
        return kv_cache.shapes(self.cache_spec, None)

    @functools.cached_property
    def weights(self) -> Any:
        """Shapes of the weights, nested."""
        return layout.shapes(
            self.config, dtype=self.dtype, num_positions=self.shapes.max_tokens, placement=self.placement, mesh=None
        )

    def artefacts(self) -> dict[str, bytes]:
        """Each function's serialised export, by name.

        Raises NotImplementedError for what the target's kernels do not cover; the message names the limit.
        """
        batch, vocab = self.shapes.batch, self.config.vocab_size
        ids, each = _shape(np.int32, batch, self.shapes.prefill_tokens), _shape(np.int32, batch)
        state = (jax.tree.leaves(self.weights), jax.tree.leaves(self.cache))
        options = {name: _shape(dtype, batch) for name, dtype in SAMPLER_OPTIONS.items()}
        options["seed"] = _shape(np.uint32, batch, 2)
        return {
            "prefill": self._export(self._prefill, (*state, ids, each, each), donated=(1,)),
            "decode": self._export(self._decode, (*state, each, each), donated=(1,)),
            "sample": self._export(self._sample, (_shape(np.float32, batch, vocab), options)),
        }

    def _export(self, function: Callable[..., Any], arguments: tuple[Any, ...], donated: tuple[int, ...] = ()) -> bytes:
        checks = [export.DisabledSafetyCheck.custom_call(target) for target in _UNCHECKED_CALLS]
        exporting = export.export(
            jax.jit(function, donate_argnums=donated), platforms=[self.platform], disabled_checks=checks
        )
        with _described(self.target):
            return bytes(exporting(*arguments).serialize())

    def _prefill(self, weights, cache, token_ids, starts, lengths):
        """Reads up to ``prefill_tokens`` of each prompt.

        Args:
          weights, cache: lists of arrays; the cache is donated.
          token_ids: ``[batch, prefill_tokens]`` int32, padded at the end.
          starts: ``[batch]`` int32, position of each first token.
          lengths: ``[batch]`` int32, tokens that are not padding.

        Returns:
          Logits after each last token ``[batch, vocab]`` float32, no numbers where that has no room; and the cache.
        """
        return self._run(weights, cache, token_ids, starts, lengths)

    def _decode(self, weights, cache, token_ids, positions):
        """Appends ``token_ids [batch]`` int32 at ``positions [batch]`` int32; returns as ``_prefill`` does."""
        return self._run(weights, cache, token_ids[:, None], positions, jnp.ones_like(positions))

    def _run(self, weights, cache, token_ids, starts, lengths):
        weights = jax.tree.unflatten(jax.tree.structure(self.weights), weights)
        cache = jax.tree.unflatten(jax.tree.structure(self.cache), cache)
        batch, q = token_ids.shape
        table = jnp.arange(1, self.cache_spec.num_pages, dtype=jnp.int32).reshape(batch, -1)
        # The kernels read no page past a sequence's own.
        live = jnp.minimum(lengths, jnp.maximum(self.shapes.max_tokens - starts, 0))
        rows = Segment(token_ids, starts, live, table)
        cache, hidden = transformer.forward(weights, cache, (rows,), config=self.config, placement=self.placement)
        last = hidden.reshape(batch, q, -1)[jnp.arange(batch), jnp.maximum(lengths - 1, 0)]
        logits = transformer.unembed(weights, last, self.config, self.placement)
        return jnp.where((live == lengths)[:, None], logits, jnp.nan), jax.tree.leaves(cache)

    def _sample(self, logits, options):
        """Draws a token a sequence, as the engine does.

        Args:
          logits: ``[batch, vocab]`` float32.
          options: by name, ``[batch]``: temperature (0 is greedy), top_k (0 is off), top_p (1 is off), min_p (0 is
            off), num_sampled (tokens drawn before), and seed ``[batch, 2]`` uint32, high word first.

        Returns:
          Token ids ``[batch]`` int32; -1 where the logits are not finite.
        """
        batch = self.shapes.batch
        state = jax.tree.map(jnp.asarray, programs.empty_slots(batch, self.config.vocab_size))
        given = {name: value for name, value in options.items() if name != "num_sampled"}
        padded = {name: jnp.concatenate([value, jnp.zeros_like(value[:1])]) for name, value in given.items()}
        state = dataclasses.replace(state, options=dataclasses.replace(state.options, **padded))
        rows = sample.Rows(slots=jnp.arange(batch, dtype=jnp.int32), num_sampled=options["num_sampled"])
        _, sampled = sample.sample(logits, state, rows, vocab=step.vocab_of(self.config, self.placement))
        return sampled.token_ids


@contextlib.contextmanager
def _described(target: Target) -> Iterator[None]:
    """While it lasts JAX traces for one device of the target's chip."""
    if target.backend == "cpu":
        yield
        return
    if target.backend == "tpu":
        device = AbstractDevice(_TPU_KINDS[target.tpu.name], target.tpu.cores, "tpu")
    else:
        device = AbstractDevice(f"NVIDIA {target.gpu.name.upper()}", target.gpu.num_sms, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        yield


def _shape(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
