"""The engine over the accelerators' layout (stacked layers, one flat pool, a page a prefill row) with plain kernels.

It runs where no accelerator is, and its tokens are those of the CPU's own layout.
"""

import functools

import numpy as np
import pytest
import toy_models

from precast.runtime.config import ConfigError
from precast.runtime.request import SamplingParams

SETTINGS = {"dtype": "float32", "slots": 3, "max_model_len": 64, "page_size": 8, "token_budget": 27}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    traits = {"layer_kinds": ("sliding", "full"), "sliding_window": 11, "num_layers": 2}
    return toy_models.random_llama(tmp_path_factory.mktemp("model"), **traits)


@pytest.fixture(scope="module")
def reference_engine(make_engine):
    return functools.partial(make_engine, **SETTINGS | {"kernels": "reference"})


def requests():
    """Prompts of several chunks, one that shares 16 tokens with another, and an odd mix of options."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(10, 300, length).tolist() for length in (40, 17, 3, 8, 30)]
    prompts.append([*prompts[0][:16], 77, 78])
    params = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(seed=1, max_tokens=9, logprobs=2),
        SamplingParams(seed=2, max_tokens=30, n=2, top_p=0.9),
        SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1),
        SamplingParams(seed=3, max_tokens=16, top_k=20, repetition_penalty=1.2),
        SamplingParams(temperature=0, max_tokens=8),
    ]
    return list(zip(prompts, params, strict=True))


def test_tokens_are_those_of_the_cpu_layout(model, make_engine, reference_engine, run):
    expected = run(make_engine(model, **SETTINGS), requests())
    engine = reference_engine(model)
    assert engine.shapes.prefill_block == engine.shapes.page_size == 8
    found = run(engine, requests())
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in expected.items()}
    for key, one in found.items():
        for ours, theirs in zip(one.logprobs, expected[key].logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    engine.check_integrity()
    assert engine.stats().compiles_after_ready == 0


def test_preemption_changes_nothing(model, reference_engine, run):
    page_bytes = 2 * 8 * 128 * 4  # layers, tokens, lanes (32 of them used), float32
    expected = run(reference_engine(model), requests())
    engine = reference_engine(model, kv_cache_memory=9 * page_bytes)
    found = run(engine, requests())
    assert engine.stats().preemptions_total > 0
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in expected.items()}
    engine.check_integrity()


def test_a_budget_below_one_page_is_refused(model, reference_engine):
    with pytest.raises(ConfigError, match="token_budget is 10: it must be at least 11, slots"):
        reference_engine(model, token_budget=10)
