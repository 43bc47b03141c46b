"""The offline API over a small model: what prompts and options may be."""

import numpy as np
import pytest

from precast import LLM, SamplingParams
from precast.runtime.request import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny):
    settings = {"dtype": "float32", "slots": 4, "page_size": 16, "token_budget": 36, "max_model_len": 384}
    return LLM(str(tiny), progress=False, **settings)  # what the servers of the other tests have, compiled once


@pytest.fixture(autouse=True)
def nothing_stays(llm):
    yield
    assert not llm._engine.has_work
    llm._engine.check_integrity()


def test_options_under_vllms_name(llm):
    [by_name] = llm.generate("hello", sampling_params=GREEDY)
    [by_place] = llm.generate(["hello"], [GREEDY])
    assert by_name.outputs[0].token_ids == by_place.outputs[0].token_ids and len(by_name.outputs[0].token_ids) == 4
    [chat] = llm.chat([{"role": "user", "content": "hello"}], sampling_params=GREEDY)
    assert len(chat.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    "ids", [(5, 6, 7), np.array([5, 6, 7]), np.array([5, 6, 7], np.uint8), [np.int32(5), 6, np.int64(7)]]
)
def test_ids_of_any_integer_type(llm, ids):
    [result] = llm.generate({"prompt_token_ids": ids}, GREEDY)
    assert result.prompt_token_ids == [5, 6, 7] and {type(one) for one in result.prompt_token_ids} == {int}
    assert result.outputs == llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)[0].outputs


NO_IDS = (5, "56", [], [5.0], [-1], [320], [5] * 384, np.array([5.0]), np.array([[5]]))


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [5, 6], [[5]], {}, {"prompt": None}, {"prompt": 5}, "", "x" * 10_000, "\ud800"]
    + [{"prompt_token_ids": ids} for ids in NO_IDS],
)
def test_what_is_no_prompt(llm, prompt):
    with pytest.raises(ValueError, match=r"^(prompt|the text)") as caught:
        llm.generate(prompt, GREEDY)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("params", ["greedy", 5, [5], [GREEDY, GREEDY], {"temperature": 0}, []])
def test_what_are_no_options(llm, params):
    with pytest.raises(RequestError, match=r"^sampling_params"):
        llm.generate("hello", params)


@pytest.mark.parametrize(
    "messages",
    [[], [[]], "hello", 5, [5], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 5}]],
)
def test_what_is_no_chat(llm, messages):
    with pytest.raises(ValueError) as caught:
        llm.chat(messages, GREEDY)
    assert len(str(caught.value)) < 300


def test_a_long_text_is_refused_before_it_is_tokenised(llm, monkeypatch):
    monkeypatch.setattr(llm._text, "tokenizer", None)
    monkeypatch.setitem(llm._text.__dict__, "_max_token_bytes", 2)
    with pytest.raises(
        RequestError, match="prompt has 769 bytes: the limit is 768, max_model_len 384 tokens of at most 2"
    ):
        llm.generate("x" * 769, GREEDY)
