"""The list of device programs that one engine needs, as functions with the shapes of their arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from precast.models import cache as kv_cache
from precast.models import transformer
from precast.models.cache import Segment
from precast.models.config import ModelConfig
from precast.runtime import sample, step
from precast.runtime.config import Shapes
from precast.runtime.request import MAX_LOGIT_BIAS
from precast.runtime.vocab import Vocab
from precast.sharding.rules import partition

# End tokens of the model and stop ids of the request that min_tokens bans.
MAX_BANNED_IDS = 64


@dataclasses.dataclass(frozen=True)
class Program:
    """One function to compile: its name in the plan, and its arguments as shapes.

    Attributes:
      function: of one device's parts, or of whole arrays where there is no mesh.
      arguments: of all devices together, with shardings where there is a mesh.
      outputs: likewise, as far as their shardings matter: a prefix tree of PartitionSpecs.
      donated: positions of the arguments whose buffers the results reuse.
      mesh: devices to compile for; None is the default device.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    outputs: Any
    donated: tuple[int, ...] = ()
    mesh: jax.sharding.Mesh | None = None

    def jitted(self) -> Any:
        """The function under ``jax.jit``, as it is lowered and exported."""
        if self.mesh is None:
            return jax.jit(self.function, donate_argnums=self.donated)
        specs = jax.tree.map(lambda x: x.sharding.spec, self.arguments)
        function = jax.shard_map(self.function, mesh=self.mesh, in_specs=specs, out_specs=self.outputs, check_vma=False)
        mesh = self.mesh
        shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), self.outputs)
        return jax.jit(function, donate_argnums=self.donated, out_shardings=shardings)

    def lower(self) -> jax.stages.Lowered:
        return self.jitted().lower(*self.arguments)


def backbone_name(decode_rows: int, prefill_tokens: int) -> str:
    return f"backbone-{decode_rows}x1+{prefill_tokens}"


def head_name(rows: int) -> str:
    return f"head-{rows}"


def score_name(tokens: int) -> str:
    return f"score-{tokens}"


ADMIT = "admit"
CREATE = "create"


def enumerate_programs(
    config: ModelConfig,
    shapes: Shapes,
    weights: transformer.Weights,
    cache_spec: kv_cache.CacheSpec,
    mesh: jax.sharding.Mesh | None = None,
) -> list[Program]:
    """Every program that the scheduler can ask for, and no other.

    Args:
      config: the model.
      shapes: what the scheduler can reach.
      weights: arrays or shapes, laid out for the placement and mesh.
      cache_spec: of the KV cache, placement included.
      mesh: devices to compile for; None is the default device.
    """
    placement = cache_spec.placement
    vocab = step.vocab_of(config, placement)
    weights = _shapes(weights)
    head_weights = transformer.head_weights(weights)
    cache = kv_cache.shapes(cache_spec, mesh)
    state = _state_shapes(shapes.slots, vocab, mesh)
    whole = _Replicated(mesh)
    hidden = whole.array(np.float32, shapes.head_rows, config.hidden_size)
    cache_out, state_out = partition(cache_spec.axes), _specs(state)
    static = {"config": config, "placement": placement}

    programs = []

    def add(name: str, function: Callable[..., Any], arguments: tuple[Any, ...], outputs: Any, *donated: int) -> None:
        programs.append(Program(name, function, arguments, outputs, donated, mesh))

    for decode_rows, prefill_tokens in backbone_sizes(shapes):
        inputs = _backbone_inputs(shapes, decode_rows, prefill_tokens, whole)
        arguments = (transformer.body_weights(weights), cache, state.last_tokens, inputs)
        name = backbone_name(decode_rows, prefill_tokens)
        add(name, functools.partial(step.backbone, **static), arguments, (cache_out, P(), P()), 1)
    for rows in shapes.decode_rows:
        row_inputs = sample.Rows(slots=whole.int32(rows), num_sampled=whole.int32(rows))
        arguments = (head_weights, state, hidden, row_inputs)
        add(head_name(rows), functools.partial(step.head, **static), arguments, (state_out, P()), 1)
    for tokens in sorted({*shapes.prefill_tokens, *shapes.mixed_tokens}):
        scored = whole.array(np.float32, tokens, config.hidden_size)
        score = functools.partial(step.score, **static)
        add(score_name(tokens), score, (head_weights, scored, whole.int32(tokens)), P())
    options = jax.tree.map(lambda x: whole.array(x.dtype, *x.shape[1:]), state.options)
    admission = (state, whole.int32(), options, whole.int32(shapes.max_model_len), whole.int32(), whole.int32())
    add(ADMIT, functools.partial(sample.admit, vocab=vocab), admission, state_out, 0)
    create = functools.partial(_create, cache_spec, shapes.slots, vocab.width)
    add(CREATE, create, (), (cache_out, state_out))
    return programs


def needed_first(shapes: Shapes) -> list[str]:
    """What one short request needs, in order."""
    rows, tokens = shapes.decode_rows[0], shapes.prefill_tokens[0]
    return [CREATE, backbone_name(0, tokens), ADMIT, head_name(rows), backbone_name(rows, 0)]


def backbone_sizes(shapes: Shapes) -> list[tuple[int, int]]:
    """(decode rows, prefill tokens) of each backbone."""
    most = shapes.decode_rows[-1]
    return [
        *((rows, 0) for rows in shapes.decode_rows),
        *((0, tokens) for tokens in shapes.prefill_tokens),
        *((most, tokens) for tokens in shapes.mixed_tokens),
    ]


def _create(cache_spec: kv_cache.CacheSpec, slots: int, width: int) -> tuple[kv_cache.Cache, sample.SlotState]:
    """An empty cache and empty slots: one device's part."""
    state = jax.tree.map(lambda x: jnp.full(x.shape, x.flat[0], x.dtype), empty_slots(slots, width))
    return kv_cache.create(cache_spec), state


def empty_slots(slots: int, vocab_size: int) -> sample.SlotState:
    """Options that do nothing for each slot and the dummy one, as NumPy arrays of one value each."""
    n = slots + 1
    options = sample.SlotOptions(
        temperature=np.zeros(n, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        min_p=np.zeros(n, np.float32),
        repetition_penalty=np.ones(n, np.float32),
        presence_penalty=np.zeros(n, np.float32),
        frequency_penalty=np.zeros(n, np.float32),
        seed=np.zeros((n, 2), np.uint32),
        bias_ids=np.zeros((n, MAX_LOGIT_BIAS), np.int32),
        bias_values=np.zeros((n, MAX_LOGIT_BIAS), np.float32),
        banned_ids=np.full((n, MAX_BANNED_IDS), -1, np.int32),
        min_tokens=np.zeros(n, np.int32),
        want_logprobs=np.zeros(n, np.bool_),
    )
    return sample.SlotState(
        last_tokens=np.zeros(n, np.int32),
        options=options,
        output_counts=np.zeros((n, vocab_size), np.int16),
        in_prompt=np.zeros((n, vocab_size), np.bool_),
    )


def _state_shapes(slots: int, vocab: Vocab, mesh: jax.sharding.Mesh | None) -> sample.SlotState:
    """The slots' state on all devices together: what is counted by token id is divided, the rest is everywhere."""
    state = empty_slots(slots, vocab.width * vocab.shard.degree("vocab"))

    def shape(path: Any, x: np.ndarray) -> jax.ShapeDtypeStruct:
        axes = (None, "vocab") if path[0].name in ("output_counts", "in_prompt") else (None,) * x.ndim
        sharding = None if mesh is None else jax.sharding.NamedSharding(mesh, partition(axes))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(shape, state)


@dataclasses.dataclass(frozen=True)
class _Replicated:
    """Makes shapes of arrays that every device of the mesh holds whole."""

    mesh: jax.sharding.Mesh | None

    def array(self, dtype: Any, *shape: int) -> Any:
        sharding = None if self.mesh is None else jax.sharding.NamedSharding(self.mesh, P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def int32(self, *shape: int) -> Any:
        return self.array(np.int32, *shape)


def _backbone_inputs(shapes: Shapes, decode_rows: int, prefill_tokens: int, whole: _Replicated) -> step.BackboneInputs:
    decode = prefill = None
    if decode_rows:
        rows = whole.int32(decode_rows)
        table = whole.int32(decode_rows, shapes.table_width)
        decode = step.DecodeInputs(slots=rows, starts=rows, lengths=rows, page_table=table)
    if prefill_tokens:
        blocks = prefill_tokens // shapes.prefill_block
        prefill = Segment(
            token_ids=whole.int32(blocks, shapes.prefill_block),
            starts=whole.int32(blocks),
            lengths=whole.int32(blocks),
            page_table=whole.int32(blocks, shapes.table_width),
        )
    return step.BackboneInputs(decode=decode, prefill=prefill, select=whole.int32(shapes.head_rows))


def _shapes(arrays: Any) -> Any:
    """Shapes of arrays; shardings only of those over a mesh."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        named = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named)

    return jax.tree.map(shape, arrays)


def _specs(arrays: Any) -> Any:
    """PartitionSpecs of shapes; those without a sharding are whole."""
    return jax.tree.map(lambda x: P() if x.sharding is None else x.sharding.spec, arrays)
