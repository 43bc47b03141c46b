"""The list of device programs that one engine needs, as functions with the shapes of their arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precast.models import cache as kv_cache
from precast.models import transformer
from precast.models.attention import Segment
from precast.models.config import ModelConfig
from precast.runtime import sample, step
from precast.runtime.config import Shapes
from precast.runtime.request import MAX_LOGIT_BIAS

# End tokens of the model and stop ids of the request that min_tokens bans.
MAX_BANNED_IDS = 64


@dataclasses.dataclass(frozen=True)
class Program:
    """One function to compile: its name in the plan, and its arguments as shapes.

    donated: positions of the arguments whose buffers the results reuse.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()

    def jitted(self) -> Any:
        """The function under ``jax.jit``, as it is lowered and exported."""
        return jax.jit(self.function, donate_argnums=self.donated)

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
    config: ModelConfig, shapes: Shapes, weights: transformer.Weights, cache_spec: kv_cache.CacheSpec
) -> list[Program]:
    """Every program that the scheduler can ask for, and no other.

    Args:
      config: the model.
      shapes: what the scheduler can reach.
      weights: arrays or shapes.
      cache_spec: of the KV cache.
    """
    weights = _shapes(weights)
    head_weights = transformer.head_weights(weights)
    cache = kv_cache.shapes(cache_spec)
    state = _shapes(empty_slots(shapes.slots, config.vocab_size))
    hidden = jax.ShapeDtypeStruct((shapes.head_rows, config.hidden_size), np.float32)
    backbone = functools.partial(step.backbone, config=config)
    head = functools.partial(step.head, config=config)
    score = functools.partial(step.score, config=config)

    programs = []
    for decode_rows, prefill_tokens in backbone_sizes(shapes):
        inputs = _backbone_inputs(shapes, decode_rows, prefill_tokens)
        name = backbone_name(decode_rows, prefill_tokens)
        programs.append(Program(name, backbone, (weights, cache, state.last_tokens, inputs), donated=(1,)))
    for rows in shapes.decode_rows:
        row_inputs = sample.Rows(slots=_int32(rows), num_sampled=_int32(rows))
        programs.append(Program(head_name(rows), head, (head_weights, state, hidden, row_inputs), donated=(1,)))
    for tokens in sorted({*shapes.prefill_tokens, *shapes.mixed_tokens}):
        scored = jax.ShapeDtypeStruct((tokens, config.hidden_size), np.float32)
        programs.append(Program(score_name(tokens), score, (head_weights, scored, _int32(tokens))))
    options = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.options)
    admission = (state, _int32(), options, _int32(shapes.max_model_len), _int32(), _int32())
    programs.append(Program(ADMIT, sample.admit, admission, donated=(0,)))
    create = functools.partial(_create, cache_spec, shapes.slots, config.vocab_size)
    programs.append(Program(CREATE, create, ()))
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


def _create(cache_spec: kv_cache.CacheSpec, slots: int, vocab_size: int) -> tuple[kv_cache.Cache, sample.SlotState]:
    """An empty cache and empty slots."""
    state = jax.tree.map(lambda x: jnp.full(x.shape, x.flat[0], x.dtype), empty_slots(slots, vocab_size))
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


def _backbone_inputs(shapes: Shapes, decode_rows: int, prefill_tokens: int) -> step.BackboneInputs:
    decode = prefill = None
    if decode_rows:
        rows = _int32(decode_rows)
        decode = step.DecodeInputs(
            slots=rows, starts=rows, lengths=rows, page_table=_int32(decode_rows, shapes.table_width)
        )
    if prefill_tokens:
        blocks = prefill_tokens // shapes.prefill_block
        prefill = Segment(
            token_ids=_int32(blocks, shapes.prefill_block),
            starts=_int32(blocks),
            lengths=_int32(blocks),
            page_table=_int32(blocks, shapes.table_width),
        )
    return step.BackboneInputs(decode=decode, prefill=prefill, select=_int32(shapes.head_rows))


def _shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


def _int32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, np.int32)
