"""The official OpenAI client, through the real gateway, against a real server."""

import concurrent.futures
import subprocess

import openai
import pytest
from processes import BIN, wait_for

from precast.server.client import fetch_bundle
from precast.server.text import TextEncoder

MODEL = "tiny"
CHAT = [{"role": "user", "content": "hello there"}]


def complete(client, prompt="hello the", **options):
    options = {"temperature": 0, "max_tokens": 20, **options}
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def chat(client, messages=CHAT, **options):
    options = {"temperature": 0, "max_tokens": 20, **options}
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def ignoring_eos(**body):
    return {"extra_body": {"ignore_eos": True, **body}}


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list().data] == [MODEL]


def test_a_completion_in_a_stream_is_the_completion(client):
    whole = complete(client, **ignoring_eos())
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **ignoring_eos()))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 20
    [usage] = [chunk.usage for chunk in chunks if chunk.usage]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 20)


def test_a_chat_in_a_stream_is_the_chat(client):
    whole = chat(client, **ignoring_eos())
    chunks = list(chat(client, stream=True, **ignoring_eos()))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]


def test_the_client_over_grpc_answers_as_the_gateway_does(client, server):
    over_http = chat(client, max_tokens=30).choices[0].message.content or ""
    command = [BIN / "runtime-client", f"--server={server.address}", "--max_tokens=30", CHAT[0]["content"]]
    over_grpc = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert over_grpc == over_http + "\n"


def test_both_ways_in_take_the_same_ids(client, server):
    with server.stub() as stub:
        encoder = TextEncoder(fetch_bundle(stub))
    for content in ("hello there", " the\n\thello ", "é😀 ü", "a" * 50):
        messages = [{"role": "system", "content": "the"}, {"role": "user", "content": content}]
        assert chat(client, messages, max_tokens=1).usage.prompt_tokens == len(encoder.encode_chat(messages))
        assert complete(client, content, max_tokens=1).usage.prompt_tokens == len(encoder.encode_prompt(content))


def test_two_sequences_of_which_the_first_is_that_of_one(client):
    sampled = {"temperature": 1.0, "seed": 11, **ignoring_eos()}
    one = complete(client, **sampled)
    two = complete(client, n=2, **sampled)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == one.choices[0].text != two.choices[1].text
    assert two.usage.completion_tokens == 40


def test_a_seed_repeats_and_another_does_not(client):
    texts = [complete(client, temperature=1.0, seed=seed, **ignoring_eos()).choices[0].text for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs_of_a_chat(client):
    [choice] = chat(client, max_tokens=6, logprobs=True, top_logprobs=3, **ignoring_eos()).choices
    entries = choice.logprobs.content
    assert entries and all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)
    for entry in entries:  # greedy: the likeliest is the one that was taken
        assert entry.logprob == max(other.logprob for other in entry.top_logprobs)


def test_logprobs_in_a_stream_are_those_of_the_whole(client):
    whole = chat(client, max_tokens=6, logprobs=True, **ignoring_eos()).choices[0].logprobs.content
    chunks = chat(client, max_tokens=6, logprobs=True, stream=True, **ignoring_eos())
    streamed = [c.logprobs.content for chunk in chunks for c in chunk.choices if c.logprobs]
    assert [e.logprob for part in streamed for e in part or []] == [entry.logprob for entry in whole]


def test_a_stop_string_ends_the_text_before_it(client):
    text = complete(client, **ignoring_eos()).choices[0].text
    stop = text[6:9]
    [choice] = complete(client, stop=[stop], **ignoring_eos()).choices
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"
    streamed = complete(client, stop=[stop], stream=True, **ignoring_eos())
    assert "".join(c.text for chunk in streamed for c in chunk.choices) == choice.text


def test_a_stop_string_ends_the_work_too(client, server):
    text = complete(client, max_tokens=100, **ignoring_eos()).choices[0].text
    before = server.metric("vllm:generation_tokens_total")
    complete(client, max_tokens=100, stop=[text[3:6]], **ignoring_eos())
    assert server.metric("vllm:generation_tokens_total") - before < 50


def test_a_client_that_leaves_frees_its_slot(client, server):
    stream = complete(client, max_tokens=350, stream=True, **ignoring_eos())
    next(iter(stream))
    stream.close()
    wait_for(server.is_idle)


def test_many_at_once_get_what_they_get_alone(client):
    prompts = [f"hello {number} the" * (1 + number % 3) for number in range(12)]
    options = [{"temperature": number % 2, "seed": number, **ignoring_eos()} for number in range(12)]
    alone = [complete(client, prompt, **some).choices[0].text for prompt, some in zip(prompts, options, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(complete, client, prompt, **some) for prompt, some in zip(prompts, options, strict=True)]
        assert [call.result().choices[0].text for call in calls] == alone


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""]])
@pytest.mark.parametrize("options", [{}, {"stream": True}, {"n": 2}, {"echo": True}])
def test_empty_prompts(client, prompt, options):
    with pytest.raises(openai.BadRequestError):
        list(complete(client, prompt, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "x" * 5000},
        {"max_tokens": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"n": 0},
        {"n": 100},
        {"logprobs": 50},
        {"presence_penalty": 3},
        {"extra_body": {"min_tokens": 5, "max_tokens": 2}},
        {"extra_body": {"stop_token_ids": [320]}},
        {"extra_body": {"repetition_penalty": -1.0}},
        {"extra_body": {"min_p": 2}},
    ],
)
def test_values_out_of_range(client, options):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **options)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "x" * 5000}]])
def test_chats_that_cannot_be(client, messages):
    with pytest.raises(openai.BadRequestError):
        chat(client, messages)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema"),  # the gateway makes it a schema
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "json_schema"),
        ({"extra_body": {"regex": "[0-9]+"}}, "regex"),
        ({"extra_body": {"ebnf": "root ::= 'a'"}}, "grammar"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "required"},
         "json_schema"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_is_refused_by_name(client, options, field, stream):
    with pytest.raises(
        openai.BadRequestError, match=f"{field} is not supported by this server: ask without structured"
    ):
        chat(client, stream=stream, **options)


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_a_huge_max_tokens_is_cut_to_the_context(client):
    answer = complete(client, max_tokens=10**9, **ignoring_eos())
    assert answer.usage.total_tokens == 384 and answer.choices[0].finish_reason == "length"
