"""The sampler against the published formulas and the reference implementation's processors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from precast.runtime import programs, sample
from precast.runtime.request import SamplingParams
from precast.runtime.vocab import Vocab
from precast.sharding.shard import Shard

VOCAB, ROWS = 320, 8
VOCABULARY = Vocab(VOCAB, VOCAB, Shard())


@functools.lru_cache
def compiled():
    """``sample`` for ROWS rows, as the engine would compile it."""
    state = programs.empty_slots(ROWS, VOCAB)
    rows = sample.Rows(np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32))
    return (
        jax.jit(functools.partial(sample.sample, vocab=VOCABULARY))
        .lower(np.zeros((ROWS, VOCAB), np.float32), state, rows)
        .compile()
    )


def state_with(options):
    """Slot state in which every slot has the same options."""
    state = programs.empty_slots(ROWS, VOCAB)
    for name, value in options.items():
        getattr(state.options, name)[...] = value
    return state


def draw(logits, count=4000, seed=0, **options):
    """``count`` draws from one row of logits, at output positions 0, 1, …"""
    logits = np.tile(np.asarray(logits, np.float32), (ROWS, 1))
    state = state_with({"temperature": 1.0, **options})
    state.options.seed[:, 1] = seed + np.arange(ROWS + 1)
    drawn = []
    for step in range(count // ROWS):
        rows = sample.Rows(np.arange(ROWS, dtype=np.int32), np.full(ROWS, step, np.int32))
        drawn.append(np.asarray(compiled()(logits, state, rows)[1].token_ids))
    return np.concatenate(drawn)


def known_row():
    """Probabilities .5 .3 .1 .1 on ids 40, 10, 20, 30 and next to nothing elsewhere."""
    logits = np.full(VOCAB, -60.0)
    logits[[40, 10, 20, 30]] = np.log([0.5, 0.3, 0.1, 0.1])
    return logits


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {40: 0.5, 10: 0.3, 20: 0.1, 30: 0.1}),
        ({"top_k": 1}, {40: 1}),
        ({"top_k": 2}, {40: 5 / 8, 10: 3 / 8}),
        ({"top_k": VOCAB}, {40: 0.5, 10: 0.3, 20: 0.1, 30: 0.1}),
        ({"top_k": 10**9}, {40: 0.5, 10: 0.3, 20: 0.1, 30: 0.1}),
        ({"top_p": 1e-8}, {40: 1}),
        ({"top_p": 0.5}, {40: 1}),
        ({"top_p": 0.8}, {40: 5 / 8, 10: 3 / 8}),
        ({"top_p": 0.999999}, {40: 0.5, 10: 0.3, 20: 0.1, 30: 0.1}),
        ({"min_p": 0.2}, {40: 0.5, 10: 0.3, 20: 0.1, 30: 0.1}),
        ({"min_p": 0.21}, {40: 5 / 8, 10: 3 / 8}),
        ({"min_p": 1.0}, {40: 1}),
        ({"top_k": 2, "top_p": 0.6}, {40: 1}),
        ({"top_k": 3, "min_p": 0.5}, {40: 5 / 8, 10: 3 / 8}),
        ({"temperature": 0.5}, {40: 25 / 36, 10: 9 / 36, 20: 1 / 36, 30: 1 / 36}),
    ],
)
def test_support_and_frequencies(options, expected):
    counts = np.bincount(draw(known_row(), **options), minlength=VOCAB)
    assert set(np.flatnonzero(counts)) <= set(expected)
    total = counts.sum()
    chi_square = sum((counts[i] - total * p) ** 2 / (total * p) for i, p in expected.items())
    assert chi_square < 20, (chi_square, {i: counts[i] for i in expected})


def test_draws_of_one_request_are_independent_and_flat():
    logits = np.where(np.arange(VOCAB) % 10 == 0, 0.0, -np.inf)
    drawn = draw(logits, count=6400).reshape(-1, ROWS)
    assert (drawn[1:] != drawn[:-1]).mean() > 0.9
    counts = np.bincount(drawn.ravel() // 10, minlength=32)
    assert ((counts - 200) ** 2 / 200).sum() < 70
    pairs = np.zeros((32, 32))
    np.add.at(pairs, (drawn[:-1].ravel() // 10, drawn[1:].ravel() // 10), 1)
    assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() < 1250


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lowest_id_in_a_mixed_batch(temperature):
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, [7, 8, 300]] = 1.0
    state = state_with({})
    state.options.temperature[1::2] = temperature
    for step in range(20):
        rows = sample.Rows(np.arange(ROWS, dtype=np.int32), np.full(ROWS, step, np.int32))
        assert set(np.asarray(compiled()(logits, state, rows)[1].token_ids)[::2]) == {7}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 2.0, 1e6])
def test_temperatures_stay_finite(temperature):
    logits = np.full(VOCAB, 2.9)
    logits[[5, 9]] = 11.06, 80.0
    drawn = draw(logits, count=64, temperature=temperature, top_p=0.9, min_p=0.1)
    assert set(drawn) == {9} if temperature <= 2 else len(set(drawn)) > 8


def test_a_row_that_is_not_finite_is_reported_and_the_others_are_not_touched():
    logits = np.tile(known_row().astype(np.float32), (ROWS, 1))
    rows = sample.Rows(np.arange(ROWS, dtype=np.int32), np.zeros(ROWS, np.int32))
    good = np.asarray(compiled()(logits, state_with({"temperature": 1.0}), rows)[1].token_ids)
    for bad in (np.nan, np.inf):
        spoiled = logits.copy()
        spoiled[3, 100] = bad
        got = np.asarray(compiled()(spoiled, state_with({"temperature": 1.0}), rows)[1].token_ids)
        assert got[3] == -1
        assert (np.delete(got, 3) == np.delete(good, 3)).all()


@pytest.mark.parametrize("seed", range(6))
def test_cuts_keep_what_the_reference_processors_keep(seed):
    """Flat and peaked distributions, small and large k: through the candidates and through the bisection."""
    rng = np.random.default_rng(seed)
    for spread in (0.1, 1.0, 5.0):
        logits = (rng.standard_normal((ROWS, VOCAB)) * spread).astype(np.float32)
        top_k = rng.integers(1, VOCAB, ROWS).astype(np.int32)
        top_k[::3] = VOCAB
        top_p = rng.uniform(0.05, 0.999, ROWS).astype(np.float32)
        state = programs.empty_slots(ROWS - 1, VOCAB)
        state.options.top_k[...], state.options.top_p[...], state.options.temperature[...] = top_k, top_p, 1.0
        scaled = logits - logits.max(axis=1, keepdims=True)
        cut = np.asarray(
            jax.jit(functools.partial(sample._threshold, vocab=VOCABULARY))(
                scaled, np.exp(scaled), jax.tree.map(jnp.asarray, state.options)
            )
        )
        for row in range(ROWS):
            scores = torch.tensor(logits[row : row + 1])
            scores = logits_process.TopKLogitsWarper(int(top_k[row]))(None, scores)
            scores = logits_process.TopPLogitsWarper(float(top_p[row]))(None, scores)
            kept = torch.isfinite(scores[0]).numpy()
            ours = scaled[row] >= cut[row]
            # The reference sums the other way round: the token at the border may differ by rounding.
            assert abs(int(kept.sum()) - int(ours.sum())) <= 1
            assert (kept <= ours).all() or (ours <= kept).all()


def test_top_p_closes_over_50000_equal_tokens():
    vocab = 50_000
    state = programs.empty_slots(1, vocab)
    state.options.top_p[...], state.options.temperature[...] = 0.5, 1.0
    scaled = np.zeros((2, vocab), np.float32)
    scaled[:, 25_000:] = -1e-3
    cut = np.asarray(
        jax.jit(functools.partial(sample._threshold, vocab=Vocab(vocab, vocab, Shard())))(
            scaled, np.exp(scaled), jax.tree.map(jnp.asarray, state.options)
        )
    )
    assert ((scaled >= cut[:, None]).sum(axis=1) == 25_000).all()


def test_processors_agree_with_the_reference():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32) * 3
    prompt, output = rng.integers(0, VOCAB, 20), rng.integers(0, VOCAB, 30)
    state = state_with({"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25})
    state.in_prompt[:, prompt] = True
    np.add.at(state.output_counts, (slice(None), output), 1)
    state.options.bias_ids[:, :2], state.options.bias_values[:, :2] = [5, 6], [4.0, -100.0]
    rows = sample.Rows(np.arange(ROWS, dtype=np.int32), np.full(ROWS, 30, np.int32))
    options = jax.tree.map(lambda x: jnp.asarray(x[:ROWS]), state.options)
    got = np.asarray(
        sample._process(jnp.asarray(logits), jax.tree.map(jnp.asarray, state), options, rows, vocab=VOCABULARY)
    )
    seen = torch.tensor(np.concatenate([prompt, output]))[None]
    for row in range(ROWS):
        expected = logits_process.RepetitionPenaltyLogitsProcessor(1.3)(seen, torch.tensor(logits[row : row + 1]))
        expected = expected[0].numpy()
        counts = np.bincount(output, minlength=VOCAB)
        expected = expected - 0.5 * (counts > 0) + 0.25 * counts
        expected[5] += 4
        expected[6] -= 100
        np.testing.assert_allclose(got[row], expected, rtol=1e-5, atol=1e-5)


def test_min_tokens_bans_the_listed_ids_and_no_other():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    state = state_with({"min_tokens": 3})
    state.options.banned_ids[:, :2] = 2, 9
    rows = sample.Rows(np.arange(ROWS, dtype=np.int32), np.array([0, 1, 2, 3, 4, 0, 0, 0], np.int32))
    options = jax.tree.map(lambda x: jnp.asarray(x[:ROWS]), state.options)
    got = np.asarray(
        sample._process(jnp.asarray(logits), jax.tree.map(jnp.asarray, state), options, rows, vocab=VOCABULARY)
    )
    banned = np.isneginf(got)
    assert banned.sum(axis=1).tolist() == [2, 2, 2, 0, 0, 2, 2, 2]
    assert banned[0, [2, 9]].all() and not banned[:, -1].any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 1e38),
        ("temperature", 1e30),
        ("presence_penalty", 3.0),
        ("frequency_penalty", float("-inf")),
        ("n", 0),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", 2**63),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", dict.fromkeys(range(300), 1.0) | {f"{i}": 1.0 for i in range(300)}),
        ("logit_bias", {"5": 1.0}),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value}).validate(VOCAB)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ValueError, match=r"min_tokens is 5: it must be at most max_tokens, 4"):
        SamplingParams(min_tokens=5, max_tokens=4).validate(VOCAB)
