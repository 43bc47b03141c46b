"""Same request, same tokens: whatever else runs, wherever it sits, however often it is preempted."""

import random

import numpy as np
import pytest
import toy_models

from precast.runtime.request import FinishReason, SamplingParams


def prompts(count, seed, longest=40):
    rng = random.Random(seed)
    return [[rng.randrange(10, toy_models.VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def rand(tmp_path_factory):
    return toy_models.random_llama(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="module")
def roomy(rand, make_engine):
    """4 slots, pages of 4, chunks of 8, and pages for everybody."""
    return make_engine(rand, max_model_len=64, kv_cache_memory=1 << 20)


@pytest.fixture
def engine(roomy):
    """``roomy`` with an empty prefix cache."""
    return make_cold(roomy)


def make_cold(engine):
    engine._scheduler.pool.forget()
    return engine


def mixed_params(i):
    """Every kind of option in turn."""
    options = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 7, "logprobs": 3},
        {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 1.0},
        {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "top_k": 200},
        {"temperature": 0.0, "logit_bias": {11: 5.0, 12: -5.0}, "repetition_penalty": 1.1},
        {"temperature": 1.5, "top_p": 0.99, "min_tokens": 6, "stop_token_ids": [20, 21, 22]},
    ]
    return SamplingParams(seed=1000 + i, max_tokens=8 + i % 13, **options[i % len(options)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_64_seeded_requests_alone_and_in_company(rand, make_engine, run, dtype):
    engine = make_engine(rand, dtype=dtype, max_model_len=64, slots=8, token_budget=40, kv_cache_memory=1 << 20)
    requests = [(ids, mixed_params(i)) for i, ids in enumerate(prompts(64, 1))]
    alone = {}
    for i, request in enumerate(requests):
        alone[i] = run(engine, [request])[0, 0]
    rng = random.Random(2)
    for trial in range(2):
        order = rng.sample(range(64), 64)
        arrive = sorted(rng.randrange(60) for _ in order)
        together = run(engine, [requests[i] for i in order], arrive=arrive)
        for position, i in enumerate(order):
            got = together[position, 0]
            assert got.token_ids == alone[i].token_ids, f"request {i}, trial {trial}"
            assert got.text == alone[i].text
            assert got.logprobs == alone[i].logprobs
            assert got.finish_reason == alone[i].finish_reason


def test_preemption_changes_nothing(rand, roomy, make_engine, run):
    """Pages for 32 tokens, six requests of 10 + 12: some must be preempted, and more than once."""
    requests = [(ids[:10], mixed_params(i)) for i, ids in enumerate(prompts(48, 3, longest=30)) if len(ids) >= 10][:12]
    tight = make_tight(rand, make_engine)
    assert tight.stats().num_pages == 8
    expected = run(roomy, requests)
    got = run(tight, requests)
    assert tight.stats().preemptions_total > 3
    for i in range(len(requests)):
        assert got[i, 0].token_ids == expected[i, 0].token_ids
        assert got[i, 0].logprobs == expected[i, 0].logprobs
        assert got[i, 0].text == expected[i, 0].text


def make_tight(rand, make_engine):
    """Pages for 32 tokens in all."""
    return make_engine(rand, kv_cache_memory=8 * 1024, prefix_caching=False)


def test_prefix_cache_changes_nothing_and_at_least_one_token_is_computed(engine, run):
    """Every length and every cached prefix of it, page 4 and chunk 8."""
    ids = [10 + (7 * i * i) % 300 for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=5)
    for length in range(1, 41):
        cold = make_cold(engine)
        expected = run(cold, [(ids[:length], params)])[0, 0]
        assert expected.deltas[-1].num_cached_tokens == 0
        for warmed in {1, length // 2, length - 1, length} - {0}:
            make_cold(engine)
            run(engine, [(ids[:warmed], SamplingParams(temperature=0, max_tokens=1))])
            got = run(engine, [(ids[:length], params)])[0, 0]
            assert got.token_ids == expected.token_ids, (length, warmed)
            assert got.deltas[-1].num_cached_tokens == min(warmed, length - 1) // 4 * 4


def test_salt_keeps_prefixes_apart(engine, run):
    ids = list(range(10, 30))
    cached = []
    for number, salt in enumerate(["", "a", "a", "", "b"]):
        deltas = []
        engine.add(engine.prepare(str(number), ids, SamplingParams(max_tokens=1), deltas.append, salt=salt))
        while engine.has_work:
            engine.step()
        cached.append(deltas[-1].num_cached_tokens)
    assert cached == [0, 0, 16, 16, 0]


def test_children_share_the_prompt_and_use_their_own_seeds(engine, run):
    ids = list(range(10, 30))
    outputs = run(engine, [(ids, SamplingParams(n=3, seed=5, max_tokens=10))])
    make_cold(engine)
    for child in range(3):
        single = run(engine, [(ids, SamplingParams(seed=5 + child, max_tokens=10))])[0, 0]
        assert outputs[0, child].token_ids == single.token_ids
    assert [outputs[0, child].deltas[-1].num_cached_tokens for child in range(3)] == [0, 16, 16]


def test_running_streams_get_a_token_every_step_while_a_long_prompt_seeps_in(engine):
    long_prompt = [10] * 60
    requests = [([10, 11], SamplingParams(temperature=0, max_tokens=30)) for _ in range(3)]
    requests.append((long_prompt, SamplingParams(temperature=0, max_tokens=4)))
    outputs = {}
    seen = []

    def watch(engine, step):
        seen.append([len(outputs[i]) for i in range(4)])

    for i, (ids, params) in enumerate(requests):
        outputs[i] = []
        engine.add(engine.prepare(str(i), ids, params, outputs[i].append))
    while engine.has_work:
        engine.step()
        watch(engine, 0)
    first = next(step for step, counts in enumerate(seen) if min(counts[:3]) == 1)
    last = next(step for step, counts in enumerate(seen) if counts[3] == 1)
    assert last - first >= 60 // 8 - 2
    for step in range(first, last):
        assert [b - a for a, b in zip(seen[step][:3], seen[step + 1][:3], strict=True)] == [1, 1, 1]


def test_request_that_outgrows_the_pool_ends_with_length(rand, make_engine, run):
    engine = make_tight(rand, make_engine)
    assert engine.config.max_model_len == 32
    got = run(engine, [(list(range(10, 30)), SamplingParams(temperature=0, max_tokens=100))])[0, 0]
    assert got.finish_reason == FinishReason.LENGTH
    assert len(got.token_ids) == 12
    with pytest.raises(ValueError, match=r"prompt has 40 tokens: the limit is 31"):
        engine.prepare("x", list(range(10, 50)), SamplingParams(), print)


def test_abort_at_every_step(engine):
    """Pages and slots are free at once, in whatever phase, and the others do not notice."""
    params = SamplingParams(temperature=0, max_tokens=8)
    witness = None
    for at in range(12):
        outputs = {"a": [], "b": []}
        engine.add(engine.prepare("a", list(range(10, 35)), params, outputs["a"].append))
        engine.add(engine.prepare("b", list(range(40, 50)), params, outputs["b"].append))
        for step in range(40):
            if step == at:
                engine.abort("a")
                assert "a" not in [one.request.request_id for one in engine._scheduler.running]
            if engine.has_work:
                engine.step()
            engine.check_integrity()
        assert outputs["a"][-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        assert sum(delta.finish_reason is not None for delta in outputs["a"]) == 1
        ids = [token_id for delta in outputs["b"] for token_id in delta.token_ids]
        witness = witness or ids
        assert ids == witness and len(ids) == 8
        assert engine.stats().num_free_pages == engine.stats().num_pages


def test_prompt_logprobs_agree_with_output_logprobs(engine, run):
    """What a prompt position scores is what sampling reported when that token was drawn; chunks do not matter."""
    start = list(range(10, 15))
    drawn = run(engine, [(start, SamplingParams(seed=3, max_tokens=30, logprobs=5))])[0, 0]
    full = start + drawn.token_ids
    scored = run(engine, [(full, SamplingParams(max_tokens=0, prompt_logprobs=5))])[0, 0]
    assert scored.token_ids == [] and scored.finish_reason == FinishReason.LENGTH
    (prompt_logprobs,) = [delta.prompt_logprobs for delta in scored.deltas if delta.prompt_logprobs]
    assert prompt_logprobs[0] is None and len(prompt_logprobs) == len(full)
    assert list(prompt_logprobs[5:]) == drawn.logprobs
    totals = np.exp([[value for _, value in one.top] for one in drawn.logprobs]).sum(axis=1)
    assert (totals <= 1 + 1e-5).all()


def test_one_slot(rand, roomy, make_engine, run):
    engine = make_engine(rand, slots=1, max_model_len=64, kv_cache_memory=1 << 20)
    requests = [(ids, mixed_params(i)) for i, ids in enumerate(prompts(6, 9))]
    got, expected = run(engine, requests), run(roomy, requests)
    assert [got[i, 0].token_ids for i in range(6)] == [expected[i, 0].token_ids for i in range(6)]


def test_no_compile_after_ready_over_every_option(rand, make_engine, run):
    """Odd limits on purpose: 7 slots, 61 tokens."""
    engine = make_engine(rand, slots=7, max_model_len=61, token_budget=23, kv_cache_memory=40 * 1024)
    requests = [([10 + n % 300 for n in range(length)], mixed_params(length)) for length in range(1, 60, 3)]
    requests.append(([10, 11, 12], SamplingParams(n=3, max_tokens=4, logprobs=20, prompt_logprobs=0)))
    run(engine, requests, arrive=[i // 2 for i in range(len(requests))])
    assert engine.stats().compiles_after_ready == 0


CHAIN = {10: {20: 5.0}, 20: {21: 5.0}, 21: {2: 5.0, 22: 4.0}, 22: {23: 5.0}, 23: {9: 5.0, 24: 4.0}, 24: {25: 5.0}}


@pytest.fixture(scope="module")
def chained(make_engine, tmp_path_factory):
    """From token 10: 20 21 2(eos), without that 22 23 9(eos), without that 24 25 …; token 30 is poisoned."""
    model = toy_models.chain(CHAIN, tmp_path_factory.mktemp("chain"), poisoned=[30])
    return make_engine(model, max_model_len=64, kv_cache_memory=1 << 20)


@pytest.mark.parametrize(
    ("options", "expected", "reason", "matched"),
    [
        ({}, [20, 21, 2], "stop", 2),
        ({"min_tokens": 2}, [20, 21, 2], "stop", 2),
        ({"min_tokens": 3}, [20, 21, 22, 23, 9], "stop", 9),
        ({"min_tokens": 4}, [20, 21, 22, 23, 9], "stop", 9),
        ({"min_tokens": 6}, [20, 21, 22, 23, 24, 25], "length", None),
        ({"stop_token_ids": [21]}, [20, 21], "stop", 21),
        ({"ignore_eos": True, "max_tokens": 3}, [20, 21, 2], "length", None),
        ({"ignore_eos": True, "stop_token_ids": [2]}, [20, 21, 2], "stop", 2),
        ({"max_tokens": 1}, [20], "length", None),
        ({"max_tokens": 2, "min_tokens": 2}, [20, 21], "length", None),
    ],
)
def test_where_an_output_ends(chained, run, options, expected, reason, matched):
    got = run(chained, [([10], SamplingParams(**{"temperature": 0, "max_tokens": 6, **options}))])[0, 0]
    assert got.token_ids == expected
    assert (got.finish_reason, got.deltas[-1].matched_stop) == (reason, matched)
    assert got.deltas[-1].num_output_tokens == len(expected)


def test_stop_strings_end_the_text_and_keep_the_tokens(chained, run):
    tokens = [chained._detokenizer.token_bytes(i).decode() for i in (20, 21, 22)]
    params = {"temperature": 0, "max_tokens": 6, "min_tokens": 6}
    free = run(chained, [([10], SamplingParams(**params))])[0, 0]
    assert free.text.startswith("".join(tokens))
    for include in (False, True):
        options = {"temperature": 0, "max_tokens": 6, "stop": tokens[1], "include_stop_str_in_output": include}
        got = run(chained, [([10], SamplingParams(**options))])[0, 0]
        assert got.text == tokens[0] + tokens[1] * include
        assert got.token_ids == [20, 21]
        assert (got.finish_reason, got.deltas[-1].matched_stop) == (FinishReason.STOP, tokens[1])


def test_logits_that_are_not_numbers_end_that_request_alone(chained, run):
    params = SamplingParams(temperature=0, max_tokens=6)
    alone = run(chained, [([10], params)])[0, 0]
    outputs = run(chained, [([10], params), ([30], params), ([10, 30], params), ([10], params)])
    assert outputs[1, 0].finish_reason == outputs[2, 0].finish_reason == FinishReason.ERROR
    assert "not finite" in outputs[1, 0].deltas[-1].error
    assert outputs[0, 0].token_ids == outputs[3, 0].token_ids == alone.token_ids
    # The pages that held them hold nothing of it for the next one.
    assert run(chained, [([10], params)])[0, 0].token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        (list(range(64)), "prompt has 64 tokens: the limit is 63"),
        ([320], "prompt contains 320: ids must be integers from 0 to 319"),
        ([-1], "prompt contains -1"),
        ([2**31], "prompt contains 2147483648"),
        (["5"], "prompt contains '5'"),
        ([3.5], "prompt contains 3.5"),
    ],
)
def test_bad_prompts_are_refused(chained, prompt, message):
    with pytest.raises(ValueError, match=message):
        chained.prepare("x", prompt, SamplingParams(), print)
    chained.check_integrity()
    assert not chained.has_work


def test_longest_prompts(chained, run):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for length in (61, 62, 63):
        got = run(chained, [([10] * length, params)])[0, 0]
        assert len(got.token_ids) == min(5, 64 - length) and got.finish_reason == FinishReason.LENGTH
