"""The device programs of a step: pure functions, compiled ahead of time by ``plan``.

``backbone`` runs tokens through the model and picks the hidden states to sample from; it is compiled once a
number of tokens.  ``head`` turns those into token ids; it is compiled once a number of rows.  ``score`` gives
prompt log-probabilities, ``admit`` (in ``sample``) prepares a slot.  Tokens flow from step to step on the device,
keyed by slot, so that a step is launched before the last one's tokens are read.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from precast.models import transformer
from precast.models.cache import Cache, Packed, Segment
from precast.models.config import ModelConfig
from precast.models.placement import Placement
from precast.runtime.sample import Rows, Sampled, SlotState, raw_logprobs, sample
from precast.runtime.vocab import Vocab

SCORE_ROWS = 32


@flax.struct.dataclass
class DecodeInputs:
    """One query a row.

    Attributes:
      slots: ``[rows]`` int32; the dummy slot for padding.
      starts: ``[rows]`` int32, each query's position.
      lengths: ``[rows]`` int32, 1 for a live row and 0 for padding.
      page_table: ``[rows, width]`` int32.
    """

    slots: Packed
    starts: Packed
    lengths: Packed
    page_table: Packed


@flax.struct.dataclass
class BackboneInputs:
    """What one launch of ``backbone`` reads besides weights, cache and last tokens.

    decode or prefill is None in a program without that segment.  select: ``[head_rows]`` int32, indices into the
    step's tokens (decode rows first, then prefill blocks) whose hidden states go to the head.
    """

    decode: DecodeInputs | None
    prefill: Segment | None
    select: Packed


def backbone(
    weights: transformer.Weights,
    cache: Cache,
    last_tokens: jax.Array,
    inputs: BackboneInputs,
    *,
    config: ModelConfig,
    placement: Placement,
) -> tuple[Cache, jax.Array, jax.Array | None]:
    """Runs one step's tokens through the model.

    Args:
      weights: of the model.
      cache: donated.
      last_tokens: ``[slots + 1]`` int32, what each slot sampled last: the decode rows' input.
      inputs: segments and the rows to select.
      config, placement: of the model.

    Returns:
      The cache; the selected hidden states ``[head_rows, hidden]`` float32; and the prefill segment's hidden states
      ``[prefill tokens, hidden]`` for scoring, or None without one.
    """
    segments = []
    if inputs.decode is not None:
        rows = inputs.decode
        segments.append(Segment(last_tokens[rows.slots][:, None], rows.starts, rows.lengths, rows.page_table))
    if inputs.prefill is not None:
        segments.append(inputs.prefill)
    cache, hidden = transformer.forward(weights, cache, tuple(segments), config=config, placement=placement)
    scored = None if inputs.prefill is None else hidden[hidden.shape[0] - inputs.prefill.num_tokens :]
    return cache, hidden[inputs.select], scored


def head(
    weights: transformer.Weights,
    state: SlotState,
    hidden: jax.Array,
    rows: Rows,
    *,
    config: ModelConfig,
    placement: Placement,
) -> tuple[SlotState, Sampled]:
    """Samples a token for the first ``len(rows.slots)`` of ``hidden [head_rows, hidden]`` (state donated)."""
    logits = transformer.unembed(weights, hidden[: rows.slots.shape[0]], config, placement)
    return sample(logits, state, rows, vocab=vocab_of(config, placement))


def vocab_of(config: ModelConfig, placement: Placement) -> Vocab:
    """The part of the vocabulary that one device holds."""
    return Vocab(config.vocab_size, placement.local(config.vocab_size, "vocab"), placement.shard)


def score(
    weights: transformer.Weights,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    config: ModelConfig,
    placement: Placement,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of ``targets [tokens]`` int32 after ``hidden [tokens, hidden]``.

    Returns what ``sample.raw_logprobs`` does.  Works through SCORE_ROWS tokens at a time, so that no more than
    those rows of the vocabulary exist at once.
    """
    tokens = hidden.shape[0]
    rest = -tokens % SCORE_ROWS
    hidden = jnp.pad(hidden, ((0, rest), (0, 0))).reshape(-1, SCORE_ROWS, hidden.shape[1])
    targets = jnp.pad(targets, (0, rest)).reshape(-1, SCORE_ROWS)

    def part(block: tuple[jax.Array, jax.Array]):
        logits = transformer.unembed(weights, block[0], config, placement)
        return raw_logprobs(logits, block[1], vocab=vocab_of(config, placement))

    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], jax.lax.map(part, (hidden, targets)))
