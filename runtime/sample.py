"""From logits to token ids, on the device, with every parameter an array.

Each slot's options live on the device from admission on (``SlotState``), so a step sends only which slots
take part.  The order is: penalties and logit bias, the ban on end tokens before ``min_tokens``, temperature,
top_k, top_p over what top_k left, min_p, one draw.  A row's result depends on that row alone: its key is
``fold_in(key(seed), number of tokens sampled before)``, and every sum runs in an order that the other rows
do not change.  Logits may be one device's part of the vocabulary: what crosses devices is in ``vocab``.

Greedy rows take the true argmax, lowest id on ties.  Cuts are by value: tokens tied with the last one kept
are kept too, as in the transformers library's processors.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from precast.models.cache import Packed
from precast.models.layers import row_sums
from precast.runtime.request import MAX_LOGPROBS
from precast.runtime.vocab import Vocab, whole_vectors

NUM_CANDIDATES = 64
_LARGEST = 1e30
_MOST_COUNTED = np.iinfo(np.int16).max
# A cumulative probability within this of top_p has reached it: what softmax's rounding can move.
TOP_P_SLACK = 1e-6


@flax.struct.dataclass
class SlotOptions:
    """One request's sampling options, or a stack of them by slot (leading axis ``[slots + 1]``).

    All scalars when single.  seed is ``[2]`` uint32 (high, low word); bias_ids ``[MAX_LOGIT_BIAS]`` int32 with
    bias_values float32 (0 where unused); banned_ids ``[n]`` int32 are masked before min_tokens, -1 unused.
    """

    temperature: Packed
    top_k: Packed
    top_p: Packed
    min_p: Packed
    repetition_penalty: Packed
    presence_penalty: Packed
    frequency_penalty: Packed
    seed: Packed
    bias_ids: Packed
    bias_values: Packed
    banned_ids: Packed
    min_tokens: Packed
    want_logprobs: Packed


@flax.struct.dataclass
class SlotState:
    """What the device remembers of each slot between steps; the last slot is a dummy for padding rows.

    Attributes:
      last_tokens: ``[slots + 1]`` int32, the token sampled last: the next step's input.
      options: SlotOptions with a leading slot axis.
      output_counts: ``[slots + 1, vocab]`` int16, occurrences in the output, at most 32,767; each device has those of
        its part of the vocabulary.
      in_prompt: ``[slots + 1, vocab]`` bool, likewise.
    """

    last_tokens: Packed
    options: SlotOptions
    output_counts: Packed
    in_prompt: Packed


@flax.struct.dataclass
class Rows:
    """Rows to sample in this step: ``slots [rows]`` and ``num_sampled [rows]``, int32; padding has the dummy slot."""

    slots: Packed
    num_sampled: Packed


@flax.struct.dataclass
class Sampled:
    """A step's results, by row.

    token_ids: ``[rows]`` int32; -1 where the logits were not finite.
    logprobs: ``[rows]`` float32 of the sampled tokens; top_ids, top_logprobs ``[rows, MAX_LOGPROBS]``, best
    first.  All of the raw distribution, and zeros unless some row asked for them.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def admit(
    state: SlotState,
    slot: jax.Array,
    options: SlotOptions,
    token_ids: jax.Array,
    num_prompt: jax.Array,
    num_tokens: jax.Array,
    *,
    vocab: Vocab,
) -> SlotState:
    """Prepares a slot for a request (state donated).

    Args:
      slot: int32 scalar.
      options: the request's.
      token_ids: ``[max_model_len]`` int32, prompt and then what a preempted request has already produced.
      num_prompt, num_tokens: int32 scalars, how many of token_ids are prompt, and how many there are.
      vocab: of the state.
    """
    index = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    columns = vocab.local(token_ids)
    prompt = jnp.zeros((vocab.width,), jnp.bool_).at[columns].max(index < num_prompt, mode="drop")
    produced = (index >= num_prompt) & (index < num_tokens)
    counts = jnp.zeros((vocab.width,), jnp.int32).at[columns].add(produced.astype(jnp.int32), mode="drop")
    return dataclasses.replace(
        state,
        options=jax.tree.map(lambda all_slots, one: all_slots.at[slot].set(one), state.options, options),
        output_counts=state.output_counts.at[slot].set(jnp.minimum(counts, _MOST_COUNTED).astype(jnp.int16)),
        in_prompt=state.in_prompt.at[slot].set(prompt),
    )


def sample(logits: jax.Array, state: SlotState, rows: Rows, *, vocab: Vocab) -> tuple[SlotState, Sampled]:
    """Draws one token a row.

    Args:
      logits: ``[rows, vocab]`` float32, this device's part.
      state: donated.
      rows: which slot each row belongs to.
      vocab: of the logits.
    """
    options = jax.tree.map(lambda x: x[rows.slots], state.options)
    finite = jnp.isfinite(vocab.max(logits))
    special = _needs_processing(options, rows) | (options.temperature > 0)
    # Only the ids leave the branches: logits that did would be copied.
    token_ids = jax.lax.cond(
        jnp.any(special),
        lambda *operands: _process_and_draw(*operands, vocab=vocab),
        lambda logits, *_: vocab.argmax(logits),
        *(logits, state, options, rows),
    )
    logprobs, top_ids, top_logprobs = jax.lax.cond(
        jnp.any(options.want_logprobs),
        lambda *operands: raw_logprobs(*operands, vocab=vocab),
        _no_logprobs,
        *(logits, token_ids),
    )
    columns = vocab.local(token_ids)
    counted = jnp.minimum(state.output_counts.at[rows.slots, columns].get(mode="fill", fill_value=0), _MOST_COUNTED - 1)
    state = dataclasses.replace(
        state,
        last_tokens=state.last_tokens.at[rows.slots].set(token_ids),
        output_counts=state.output_counts.at[rows.slots, columns].set(counted + jnp.int16(1), mode="drop"),
    )
    return state, Sampled(jnp.where(finite, token_ids, -1), logprobs, top_ids, top_logprobs)


def raw_logprobs(logits: jax.Array, token_ids: jax.Array, *, vocab: Vocab) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-softmax at ``token_ids [rows]``, and the MAX_LOGPROBS likeliest ids with theirs, best first."""
    logits = whole_vectors(logits)
    top = vocab.max(logits)[:, None]
    log_total = jnp.log(vocab.total(jnp.exp(logits - top)))[:, None] + top
    chosen = vocab.at(logits, token_ids)
    values, ids = vocab.top(logits, min(MAX_LOGPROBS, vocab.size))
    missing = ((0, 0), (0, MAX_LOGPROBS - values.shape[1]))
    values, ids = jnp.pad(values, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)
    return (chosen - log_total)[:, 0], ids, values - log_total


def _needs_processing(options: SlotOptions, rows: Rows) -> jax.Array:
    return (
        (options.repetition_penalty != 1)
        | (options.presence_penalty != 0)
        | (options.frequency_penalty != 0)
        | jnp.any(options.bias_values != 0, axis=-1)
        | (rows.num_sampled < options.min_tokens)
    )


def _process(logits: jax.Array, state: SlotState, options: SlotOptions, rows: Rows, *, vocab: Vocab) -> jax.Array:
    """Penalties (repetition: arXiv:1909.05858), logit bias, and the ban on end tokens before min_tokens."""
    counts = state.output_counts[rows.slots].astype(jnp.float32)
    seen = (counts > 0) | state.in_prompt[rows.slots]
    factor = jnp.where(seen, options.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits -= options.frequency_penalty[:, None] * counts
    logits -= jnp.where(counts > 0, options.presence_penalty[:, None], 0.0)
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    logits = logits.at[row, vocab.local(options.bias_ids)].add(options.bias_values, mode="drop")
    # A penalty can push a logit past float32's range, where differences are no numbers any more.
    logits = jnp.where(jnp.isneginf(logits), logits, jnp.clip(logits, -_LARGEST, _LARGEST))
    is_banned = (rows.num_sampled < options.min_tokens)[:, None]
    banned = jnp.where(is_banned, options.banned_ids, -1)
    return logits.at[row, vocab.local(banned)].set(-jnp.inf, mode="drop")


def _process_and_draw(
    logits: jax.Array, state: SlotState, options: SlotOptions, rows: Rows, *, vocab: Vocab
) -> jax.Array:
    """Samples the rows with a temperature; the others take the argmax of their processed logits."""
    logits = jax.lax.cond(
        jnp.any(_needs_processing(options, rows)),
        lambda *operands: _process(*operands, vocab=vocab),
        lambda logits, *_: logits,
        *(logits, state, options, rows),
    )
    greedy = vocab.argmax(logits)
    logits = whole_vectors(logits)
    temperature = jnp.where(options.temperature > 0, options.temperature, 1.0)[:, None]
    scaled = (logits - vocab.at(logits, greedy)) / temperature
    weights = jnp.exp(scaled)
    cut = jnp.maximum(_threshold(scaled, weights, options, vocab), jnp.log(options.min_p))
    cut = jnp.minimum(cut, 0.0)
    kept = jnp.where(scaled >= cut[:, None], weights, 0.0)
    keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), n))(
        options.seed, rows.num_sampled
    )
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)
    return jnp.where(options.temperature > 0, vocab.pick(kept, uniform), greedy)


def _threshold(scaled: jax.Array, weights: jax.Array, options: SlotOptions, vocab: Vocab) -> jax.Array:
    """The least scaled logit that top_k and top_p keep, ``[rows]``.

    Read off the NUM_CANDIDATES likeliest tokens where those suffice; a row that needs more (a large top_k, a
    flat distribution) bisects over the whole vocabulary.
    """
    some_k = (options.top_k > 0) & (options.top_k < vocab.size)
    some_p = options.top_p < 1
    total = vocab.total(weights)

    candidates, _ = vocab.top(scaled, NUM_CANDIDATES)
    width = candidates.shape[1]
    kth = jnp.take_along_axis(candidates, jnp.clip(options.top_k - 1, 0, width - 1)[:, None], axis=1)
    # Tokens beyond the candidates may be tied with the k-th: then the candidates do not hold all that is kept.
    k_known = ~some_k | ((options.top_k <= width) & (kth > candidates[:, -1:])[:, 0])
    left = jnp.where((candidates >= kth) | ~some_k[:, None], jnp.exp(candidates), 0.0)
    left_total = jnp.where(some_k, row_sums(left)[:, 0], total)
    reached = jnp.cumsum(left, axis=-1) >= (options.top_p * (1 - TOP_P_SLACK) * left_total)[:, None]
    p_known = ~some_p | jnp.any(reached, axis=-1)
    pth = jnp.take_along_axis(candidates, jnp.argmax(reached, axis=-1)[:, None], axis=1)
    cut = jnp.maximum(jnp.where(some_k, kth[:, 0], -jnp.inf), jnp.where(some_p, pth[:, 0], -jnp.inf))
    known = (k_known & p_known) | (options.temperature == 0)
    return jax.lax.cond(
        jnp.all(known),
        lambda cut, *_: cut,
        lambda *operands: _bisected(*operands, vocab=vocab),
        *(cut, known, scaled, weights, options, some_k, some_p, total),
    )


def _bisected(cut, known, scaled, weights, options, some_k, some_p, total, *, vocab) -> jax.Array:
    """``_threshold`` for the rows not ``known``, by bisection over the float32 values' bit patterns."""
    order = _ordered(scaled)
    wanted = jnp.where(some_k, options.top_k, scaled.shape[1] * vocab.shard.degree("vocab"))
    kth = _largest(order, lambda kept: vocab.count(kept) >= wanted)
    left = jnp.where(order >= kth[:, None], weights, 0.0)
    enough = options.top_p * (1 - TOP_P_SLACK) * jnp.where(some_k, vocab.total(left), total)
    pth = _largest(order, lambda kept: vocab.total(jnp.where(kept, left, 0.0)) >= enough)
    exact = jnp.maximum(kth, jnp.where(some_p, pth, jnp.iinfo(jnp.int32).min))
    lowest = vocab.min(jnp.where(order >= exact[:, None], scaled, jnp.inf))
    return jnp.where(known, cut, lowest)


def _largest(order: jax.Array, holds) -> jax.Array:
    """Largest int32 t a row for which ``holds(order >= t)``, which must be true for the least t and monotone."""
    low = jnp.full(order.shape[:1], jnp.iinfo(jnp.int32).min, jnp.int32)

    def halve(step: jax.Array, low: jax.Array) -> jax.Array:
        # Adds the next lower power of two; the first addition, of 2 ** 31, wraps from the least value to 0.
        trial = low + jax.lax.shift_left(jnp.int32(1), jnp.int32(31) - step)
        return jnp.where(holds(order >= trial[:, None]), trial, low)

    return jax.lax.fori_loop(0, 32, halve, low)


def _ordered(x: jax.Array) -> jax.Array:
    """float32 -> int32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _no_logprobs(logits: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = logits.shape[0]
    return (
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
    )
