"""Greedy tokens of the demo model in float32 are those of transformers (``tests/data/golden.json``)."""

import json
import pathlib

import pytest

from precast import LLM, SamplingParams
from precast.server import demo, environment

GOLDEN = json.loads((pathlib.Path(__file__).parent.parent / "data" / "golden.json").read_text())


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = demo.fetch(environment.cache_dir())
    plans = str(tmp_path_factory.mktemp("plans"))
    settings = {"slots": 8, "max_model_len": 1024, "token_budget": 136, "kv_cache_memory": 256 << 20}
    return LLM(str(model), dtype="float32", plan_dir=plans, progress=False, **settings)


def test_golden_ids_together_and_alone(llm):
    params = SamplingParams(temperature=0, max_tokens=GOLDEN["max_new_tokens"])
    prompts = [{"prompt_token_ids": record["prompt_ids"]} for record in GOLDEN["records"]]
    together = llm.generate(prompts, params)
    for record, result in zip(GOLDEN["records"], together, strict=True):
        assert result.outputs[0].token_ids == record["output_ids"], record["name"]
        assert result.outputs[0].finish_reason == {"eos": "stop", "length": "length"}[record["finish"]]
    alone = llm.generate(prompts[-1], params)[0]
    assert alone.outputs[0].token_ids == GOLDEN["records"][-1]["output_ids"]
    assert alone.num_cached_tokens == (len(GOLDEN["records"][-1]["prompt_ids"]) - 1) // 64 * 64


def test_offline_results_have_the_expected_shape(llm):
    params = SamplingParams(n=2, seed=3, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    text, ids = llm.generate(["The capital of France is", {"prompt_token_ids": [504, 3575, 282]}], params)
    assert text.prompt == "The capital of France is" and text.prompt_token_ids == [504, 3575, 282, 4649, 314]
    assert ids.prompt is None and ids.prompt_token_ids == [504, 3575, 282]
    for result in (text, ids):
        assert result.finished and len(result.outputs) == 2
        assert result.outputs[0].token_ids != result.outputs[1].token_ids
        assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(result.prompt_token_ids)
        for output in result.outputs:
            assert len(output.token_ids) == len(output.logprobs) == 6
            assert output.finish_reason == "length" and output.text
            for token_id, alternatives in zip(output.token_ids, output.logprobs, strict=True):
                assert token_id in alternatives and 2 <= len(alternatives) <= 3
    (chat,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
    assert chat.outputs[0].text == "The capital of France is Paris." and chat.outputs[0].finish_reason == "stop"


def test_one_bad_request_stops_the_batch_before_it_runs(llm):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate([{"prompt_token_ids": [504]}, {"prompt_token_ids": []}])
    with pytest.raises(ValueError, match="params has 1 entries: there are 2 prompts"):
        llm.generate([{"prompt_token_ids": [504]}, {"prompt_token_ids": [504]}], [SamplingParams()])
    assert not llm._engine.has_work
