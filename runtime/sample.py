"""From logits to token ids, on the device, with every parameter an array.

Each slot's options live on the device from admission on (``SlotState``), so a step sends only which slots
take part.  The order is: penalties and logit bias, the ban on end tokens before ``min_tokens``, temperature,
top_k, top_p over what top_k left, min_p, one draw.  A row's result depends on that row alone: its key is
``fold_in(key(seed), number of tokens sampled before)``, and every sum runs in an order that the other rows
do not change.

Greedy rows take the true argmax, lowest id on ties.  Cuts are by value: tokens tied with the last one kept
are kept too, as in the transformers library's processors.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from precast.models.attention import Packed
from precast.models.layers import row_sums
from precast.runtime.request import MAX_LOGPROBS

LANES = 64
NUM_CANDIDATES = 64
_LARGEST = 1e30
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
      output_counts: ``[slots + 1, vocab]`` int16, occurrences in the output.
      in_prompt: ``[slots + 1, vocab]`` bool.
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
) -> SlotState:
    """Prepares a slot for a request (state donated).

    Args:
      slot: int32 scalar.
      options: the request's.
      token_ids: ``[max_model_len]`` int32, prompt and then what a preempted request has already produced.
      num_prompt, num_tokens: int32 scalars, how many of token_ids are prompt, and how many there are.
    """
    vocab = state.output_counts.shape[1]
    index = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    prompt = jnp.zeros((vocab,), jnp.bool_).at[token_ids].max(index < num_prompt, mode="drop")
    produced = (index >= num_prompt) & (index < num_tokens)
    counts = jnp.zeros((vocab,), jnp.int16).at[token_ids].add(produced.astype(jnp.int16), mode="drop")
    return dataclasses.replace(
        state,
        options=jax.tree.map(lambda all_slots, one: all_slots.at[slot].set(one), state.options, options),
        output_counts=state.output_counts.at[slot].set(counts),
        in_prompt=state.in_prompt.at[slot].set(prompt),
    )


def sample(logits: jax.Array, state: SlotState, rows: Rows) -> tuple[SlotState, Sampled]:
    """Draws one token a row.

    Args:
      logits: ``[rows, vocab]`` float32.
      state: donated.
      rows: which slot each row belongs to.
    """
    options = jax.tree.map(lambda x: x[rows.slots], state.options)
    finite = jnp.isfinite(blocked(logits).max(axis=(1, 2)))
    special = _needs_processing(options, rows) | (options.temperature > 0)
    # Only the ids leave the branches: logits that did would be copied.
    token_ids = jax.lax.cond(
        jnp.any(special), _process_and_draw, lambda logits, *_: argmax(logits), *(logits, state, options, rows)
    )
    logprobs, top_ids, top_logprobs = jax.lax.cond(
        jnp.any(options.want_logprobs), raw_logprobs, _no_logprobs, logits, token_ids
    )
    state = dataclasses.replace(
        state,
        last_tokens=state.last_tokens.at[rows.slots].set(token_ids),
        output_counts=state.output_counts.at[rows.slots, token_ids].add(jnp.int16(1)),
    )
    return state, Sampled(jnp.where(finite, token_ids, -1), logprobs, top_ids, top_logprobs)


def raw_logprobs(logits: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-softmax at ``token_ids [rows]``, and the MAX_LOGPROBS likeliest ids with theirs, best first."""
    logits = _whole_vectors(logits)
    top = logits.max(axis=-1, keepdims=True)
    log_total = jnp.log(_total(blocked(jnp.exp(logits - top), fill=0.0)))[:, None] + top
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    values, ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - values.shape[1]))
    values, ids = jnp.pad(values, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)
    return (chosen - log_total)[:, 0], ids, values - log_total


def argmax(logits: jax.Array) -> jax.Array:
    """``[rows, vocab]`` -> ``[rows]`` int32, lowest id on ties: first the block, then the lane in it."""
    blocks = blocked(logits)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    lanes = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * LANES + jnp.argmax(lanes, axis=-1)).astype(jnp.int32)


def blocked(x: jax.Array, fill: float = -jnp.inf) -> jax.Array:
    """``[rows, vocab]`` -> ``[rows, blocks, LANES]``, the last block filled up."""
    x = _whole_vectors(x, fill)
    return x.reshape(x.shape[0], -1, LANES)


def _whole_vectors(x: jax.Array, fill: float = -jnp.inf) -> jax.Array:
    """Fills rows up to a multiple of LANES: exp rounds alike in whole vectors only, not in a loop's scalar tail."""
    rest = -x.shape[1] % LANES
    return jnp.pad(x, ((0, 0), (0, rest)), constant_values=fill) if rest else x


def _needs_processing(options: SlotOptions, rows: Rows) -> jax.Array:
    return (
        (options.repetition_penalty != 1)
        | (options.presence_penalty != 0)
        | (options.frequency_penalty != 0)
        | jnp.any(options.bias_values != 0, axis=-1)
        | (rows.num_sampled < options.min_tokens)
    )


def _process(logits: jax.Array, state: SlotState, options: SlotOptions, rows: Rows) -> jax.Array:
    """Penalties (repetition: arXiv:1909.05858), logit bias, and the ban on end tokens before min_tokens."""
    counts = state.output_counts[rows.slots].astype(jnp.float32)
    seen = (counts > 0) | state.in_prompt[rows.slots]
    factor = jnp.where(seen, options.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits -= options.frequency_penalty[:, None] * counts
    logits -= jnp.where(counts > 0, options.presence_penalty[:, None], 0.0)
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    logits = logits.at[row, options.bias_ids].add(options.bias_values)
    banned = (options.banned_ids >= 0) & (rows.num_sampled < options.min_tokens)[:, None]
    # An unused entry aims past the end and is dropped; a negative index would wrap to the last token.
    # A penalty can push a logit past float32's range, where differences are no numbers any more.
    logits = jnp.clip(logits, -_LARGEST, _LARGEST)
    return logits.at[row, jnp.where(banned, options.banned_ids, logits.shape[1])].set(-jnp.inf, mode="drop")


def _process_and_draw(logits: jax.Array, state: SlotState, options: SlotOptions, rows: Rows) -> jax.Array:
    """Samples the rows with a temperature; the others take the argmax of their processed logits."""
    logits = jax.lax.cond(
        jnp.any(_needs_processing(options, rows)), _process, lambda logits, *_: logits, *(logits, state, options, rows)
    )
    greedy = argmax(logits)
    logits = _whole_vectors(logits)
    temperature = jnp.where(options.temperature > 0, options.temperature, 1.0)[:, None]
    scaled = (logits - jnp.take_along_axis(logits, greedy[:, None], axis=1)) / temperature
    weights = jnp.exp(scaled)
    cut = jnp.maximum(_threshold(scaled, weights, options), jnp.log(options.min_p))
    cut = jnp.minimum(cut, 0.0)
    kept = blocked(jnp.where(scaled >= cut[:, None], weights, 0.0), fill=0.0)
    keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), n))(
        options.seed, rows.num_sampled
    )
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)
    return jnp.where(options.temperature > 0, _pick(kept, uniform), greedy)


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverse of the cumulative distribution of ``weights [rows, blocks, LANES]`` at ``uniform [rows]``: first the
    block, then the lane.  Only an entry of positive weight is ever picked, whatever the sums round to."""
    masses = _block_sums(weights)
    cumulative = jnp.cumsum(masses, axis=-1)
    target = uniform * cumulative[:, -1]
    block = _first(cumulative > target[:, None], masses > 0)
    before = jnp.take_along_axis(cumulative - masses, block[:, None], axis=1)[:, 0]
    lanes = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    lane = _first(jnp.cumsum(lanes, axis=-1) > (target - before)[:, None], lanes > 0)
    return (block * LANES + lane).astype(jnp.int32)


def _first(reached: jax.Array, possible: jax.Array) -> jax.Array:
    """Index of the first entry both reached and possible; the last possible one where there is none."""
    both = reached & possible
    last = possible.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    return jnp.where(jnp.any(both, axis=-1), jnp.argmax(both, axis=-1), last)


def _threshold(scaled: jax.Array, weights: jax.Array, options: SlotOptions) -> jax.Array:
    """The least scaled logit that top_k and top_p keep, ``[rows]``.

    Read off the NUM_CANDIDATES likeliest tokens where those suffice; a row that needs more (a large top_k, a
    flat distribution) bisects over the whole vocabulary.
    """
    vocab = scaled.shape[1]
    some_k = (options.top_k > 0) & (options.top_k < vocab)
    some_p = options.top_p < 1
    total = _total(blocked(weights, fill=0.0))

    # Through the indices: a top_k of which only the values are used becomes a sort of the whole row on CPU.
    likeliest = jax.lax.top_k(scaled, min(NUM_CANDIDATES, vocab))[1]
    candidates = jnp.take_along_axis(scaled, likeliest, axis=1)
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
        jnp.all(known), lambda cut, *_: cut, _bisected, cut, known, scaled, weights, options, some_k, some_p, total
    )


def _bisected(cut, known, scaled, weights, options, some_k, some_p, total) -> jax.Array:
    """``_threshold`` for the rows not ``known``, by bisection over the float32 values' bit patterns."""
    order = _ordered(scaled)
    wanted = jnp.where(some_k, options.top_k, scaled.shape[1])
    kth = _largest(order, lambda kept: kept.sum(axis=-1) >= wanted)
    left = jnp.where(order >= kth[:, None], weights, 0.0)
    enough = options.top_p * (1 - TOP_P_SLACK) * jnp.where(some_k, _total(blocked(left, fill=0.0)), total)
    pth = _largest(order, lambda kept: _total(blocked(jnp.where(kept, left, 0.0), fill=0.0)) >= enough)
    exact = jnp.maximum(kth, jnp.where(some_p, pth, jnp.iinfo(jnp.int32).min))
    lowest = jnp.where(order >= exact[:, None], scaled, jnp.inf).min(axis=-1)
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


def _block_sums(weights: jax.Array) -> jax.Array:
    """``[rows, blocks, LANES]`` -> ``[rows, blocks]``."""
    return row_sums(weights.reshape(-1, LANES)).reshape(weights.shape[:2])


def _total(weights: jax.Array) -> jax.Array:
    """``[rows, blocks, LANES]`` -> ``[rows]``."""
    return row_sums(_block_sums(weights))[:, 0]


def _no_logprobs(logits: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = logits.shape[0]
    return (
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
    )
