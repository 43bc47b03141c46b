"""The service over a fake engine: what goes in and out, and what clients that misbehave get."""

import hashlib
import threading
import time

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from precast.server.bundle import TokenizerBundle


def request(ids=(5, 6, 7), stream=False, request_id="r", **params):
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=ids),
        stream=stream,
        sampling_params=pb.SamplingParams(**params),
    )


def error_of(call):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert len(caught.value.details()) < 4000
    return caught.value.code(), caught.value.details()


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_answer_with_everything_in_it(stub):
    [answer] = stub.Generate(request(max_tokens=3, logprobs=2, prompt_logprobs=1))
    done = answer.complete
    assert list(done.output_ids) == [1, 2, 3]
    assert (done.finish_reason, done.prompt_tokens, done.completion_tokens) == ("length", 3, 3)
    assert list(done.output_logprobs.token_ids) == [1, 2, 3]
    assert [len(top.values) for top in done.output_logprobs.top_logprobs] == [2, 2, 2]
    assert list(done.input_logprobs.token_ids) == [5, 6, 7]
    assert [entry.HasField("value") for entry in done.input_logprobs.token_logprobs] == [False, True, True]


def test_a_stream_has_a_chunk_a_step_and_one_end_a_sequence(stub):
    answers = list(stub.Generate(request(max_tokens=2, n=2, stream=True, logprobs=0)))
    chunks = [(a.chunk.index, list(a.chunk.token_ids)) for a in answers if a.HasField("chunk")]
    ends = [(a.complete.index, list(a.complete.output_ids)) for a in answers if a.HasField("complete")]
    assert chunks == [(0, [1]), (1, [1]), (0, [2]), (1, [2])]
    assert ends == [(0, [1, 2]), (1, [1, 2])]
    assert all(len(a.chunk.output_logprobs.token_logprobs) == 1 for a in answers if a.HasField("chunk"))
    assert not any(a.complete.HasField("output_logprobs") for a in answers)


def test_zero_means_not_given_where_zero_is_no_value(stub, engine):
    list(stub.Generate(request(max_tokens=1)))
    [(_, _, params)] = engine.submitted
    assert (params.n, params.top_p, params.top_k, params.repetition_penalty, params.temperature) == (
        1,
        1.0,
        0,
        1.0,
        1.0,
    )
    assert params.seed is None and params.logprobs is None and params.stop is None and params.logit_bias is None


def test_zeros_that_mean_something_arrive(stub, engine):
    list(stub.Generate(request(temperature=0.0, seed=0, logprobs=0, max_tokens=1)))
    [(_, _, params)] = engine.submitted
    assert (params.temperature, params.seed, params.logprobs) == (0.0, 0, 0)


def test_text_gets_one_begin_token(stub, engine):
    for text in ("hello", "<s>hello"):
        list(stub.Generate(pb.GenerateRequest(text=text, sampling_params=pb.SamplingParams(max_tokens=1))))
    (_, first, _), (_, second, _) = engine.submitted
    assert first == second and first.count(0) == 1 and first[0] == 0


def test_a_text_that_can_never_fit_is_refused_by_its_size(stub, engine):
    engine.config.max_model_len = 10
    code, details = error_of(stub.Generate(pb.GenerateRequest(text="x" * 121)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt has 121 bytes: the limit is 120, max_model_len 10 tokens of at most 12 bytes each" in details


def test_a_missing_request_id_is_made_up(stub, engine):
    list(stub.Generate(request(request_id="", max_tokens=1)))
    list(stub.Generate(request(request_id="", max_tokens=1)))
    (first, _, _), (second, _, _) = engine.submitted
    assert first and second and first != second


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(ids=()), "prompt"),
        (pb.GenerateRequest(request_id="r"), "input"),
        (request(top_p=1.5), "top_p"),
        (request(top_p=float("nan")), "top_p"),
        (request(temperature=float("inf")), "temperature"),
        (request(logprobs=-1), "logprobs"),
        (request(n=65), "n is 65"),
        (request(stop=[""]), "stop"),
        (request(stop=["x"] * 17), "stop has 17"),
        (request(stop_token_ids=[320]), "stop_token_ids"),
        (request(logit_bias={-1: 1.0}), "logit_bias"),
        (request(logit_bias={2**31 - 1: 1.0}), "logit_bias"),
        (request(logit_bias={1: float("nan")}), "logit_bias"),
        (request(max_tokens=0), "max_tokens"),
        (request(max_tokens=1, min_tokens=2), "min_tokens"),
        (request(json_schema="{}"), "json_schema"),
        (request(json_object=True), "json_object"),
        (request(truncate_prompt_tokens=3), "truncate_prompt_tokens"),
        (pb.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (pb.GenerateRequest(text="a", mm_inputs=pb.MultimodalInputs(mm_hashes=["x"])), "mm_inputs"),
        (pb.GenerateRequest(text="a", data_parallel_rank=0), "data_parallel_rank"),
    ],
)
def test_bad_requests_name_the_field(stub, engine, bad, words):
    code, details = error_of(stub.Generate(bad))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and words in details
    assert not engine.requests
    assert len(list(stub.Generate(request(max_tokens=2)))) == 1


def test_metadata_reaches_the_engine(stub, engine):
    given = (("precast-tenant", "acme"), ("precast-priority", "-3"), ("precast-cache-salt", "s 1"), ("x-other", "y"))
    list(stub.Generate(request(max_tokens=1), metadata=given))
    list(stub.Generate(request(max_tokens=1)))
    assert engine.metadata == [(-3, "s 1", "acme"), (0, "", "")]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ([("precast-priority", "high")], "precast-priority is 'high': it must be an integer"),
        ([("precast-priority", "1.5")], "precast-priority is '1.5'"),
        ([("precast-priority", "")], "precast-priority is ''"),
        ([("precast-priority", str(2**31))], "precast-priority is '2147483648'"),
        ([("precast-priority", "9" * 5000)], "precast-priority is '999"),
        ([("precast-priority", "1"), ("precast-priority", "2")], "precast-priority is given more than once"),
        ([("precast-tenant", "")], "precast-tenant has 0 characters"),
        ([("precast-tenant", "x" * 129)], "precast-tenant has 129 characters: it must have from 1 to 128"),
        ([("precast-cache-salt", "x" * 129)], "precast-cache-salt has 129 characters"),
    ],
)
def test_bad_metadata_is_named(stub, engine, metadata, words):
    code, details = error_of(stub.Generate(request(max_tokens=1), metadata=metadata))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and words in details and len(details) < 200
    assert not engine.submitted


def test_errors_do_not_repeat_a_long_input(stub):
    code, details = error_of(stub.Generate(request(stop=["y" * 100_000] * 40)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and len(details) < 1000


def test_a_cancelled_stream_aborts_its_request(stub, engine):
    call = stub.Generate(request(max_tokens=10**6, stream=True))
    next(call)
    call.cancel()
    wait_for(lambda: not engine.requests)


def test_a_deadline_aborts_its_request(stub, engine):
    engine.gate.clear()
    code, _ = error_of(stub.Generate(request(), timeout=0.2))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: not engine.requests)
    engine.gate.set()


def test_abort_ends_the_stream_it_names_and_no_other(stub, engine):
    engine.gate.clear()
    first = stub.Generate(request(request_id="first", max_tokens=5))
    second = stub.Generate(request(request_id="second", max_tokens=5))
    wait_for(lambda: len(engine.requests) == 2)
    stub.Abort(pb.AbortRequest(request_ids=["first", "unknown"]))
    assert [a.complete.finish_reason for a in first] == ["abort"]
    engine.gate.set()
    assert [a.complete.finish_reason for a in second] == ["length"]


def test_a_client_too_far_behind_is_ended_and_no_other(stub, slow_stub, engine):
    slow = slow_stub.Generate(request(request_id="slow", max_tokens=10**6, stream=True, logprobs=20))
    wait_for(lambda: "slow" in engine.aborted, 20)
    assert len(list(stub.Generate(request(max_tokens=3)))) == 1
    code, details = error_of(slow)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "messages behind" in details or "read nothing" in details


def test_a_client_that_stops_reading_is_ended_after_a_time(slow_stub, engine):
    # Fewer messages than may queue, more bytes than fit the window: only time can end it.
    slow = slow_stub.Generate(request(request_id="slow", max_tokens=490, stream=True, logprobs=20))
    wait_for(lambda: "slow" in engine.aborted, 20)
    code, details = error_of(slow)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "read nothing" in details


def test_a_fault_ends_requests_with_internal_and_health_with_no(stub, engine):
    engine.gate.clear()
    call = stub.Generate(request())
    wait_for(lambda: engine.requests)
    assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
    engine.fail("step raised")
    code, details = error_of(call)
    assert code is grpc.StatusCode.INTERNAL and "step raised" in details
    assert not stub.HealthCheck(pb.HealthCheckRequest()).healthy
    assert error_of(stub.Generate(request()))[0] is grpc.StatusCode.UNAVAILABLE


def test_drain_refuses_new_work_and_tells_what_it_cuts_off(stub, engine, service):
    engine.gate.clear()
    call = stub.Generate(request())
    wait_for(lambda: engine.requests)
    service.begin_drain()
    assert not stub.HealthCheck(pb.HealthCheckRequest()).healthy
    assert stub.GetServerInfo(pb.GetServerInfoRequest()).is_paused
    assert error_of(stub.Generate(request(request_id="late")))[0] is grpc.StatusCode.UNAVAILABLE
    threading.Thread(target=engine.drain, args=(0.1,)).start()
    code, details = error_of(call)
    assert code is grpc.StatusCode.UNAVAILABLE and "shut down" in details


def test_the_tokenizer_arrives_whole(stub, bundle):
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert hashlib.sha256(data).hexdigest() == chunks[-1].sha256
    assert TokenizerBundle.unzip(data) == bundle
    assert bundle.zip() == data


def test_what_the_server_says_of_itself(stub, engine):
    model = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.model_type, model.vocab_size) == ("tiny", "llama", 320)
    assert (model.max_context_length, list(model.eos_token_ids)) == (engine.config.max_model_len, [1])
    info = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.server_type, info.block_size, info.max_num_seqs, info.is_paused) == ("vllm-grpc", 4, 4, False)
    [load] = stub.GetLoads(pb.GetLoadsRequest()).loads
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (8, 32, 0.25)


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.Embed(pb.EmbedRequest()),
        lambda stub: stub.StartProfile(common_pb2.StartProfileRequest()),
        lambda stub: stub.StopProfile(common_pb2.StopProfileRequest()),
        lambda stub: list(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())),
    ],
)
def test_what_is_not_there_says_so(stub, call):
    with pytest.raises(grpc.RpcError) as caught:
        call(stub)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
