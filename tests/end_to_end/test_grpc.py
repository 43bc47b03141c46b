"""A real server over a raw gRPC channel: what the gateway would not let through, and health."""

import concurrent.futures
import contextlib
import json
import subprocess
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from processes import BIN, generate, output_ids, wait_for
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

SERVICE = "vllm.grpc.engine.VllmEngine"


@pytest.fixture
def stub(server):
    with server.stub() as made:
        yield made


def test_health_and_reflection(server, stub):
    assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
    assert server.http("/health") == (200, "ready\n")
    assert server.http("/elsewhere")[0] == 404
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        [listed] = reflection.ServerReflectionInfo(iter([asked]))
        assert SERVICE in {service.name for service in listed.list_services_response.service}


def test_the_advertised_length_is_the_enforced_one(stub):
    limit = stub.GetModelInfo(pb.GetModelInfoRequest()).max_context_length
    assert limit == 384
    [ids] = output_ids(stub.Generate(generate([5] * (limit - 1), max_tokens=2, ignore_eos=True)))
    assert len(ids) == 1
    [ids] = output_ids(stub.Generate(generate([5] * (limit - 2), max_tokens=2, ignore_eos=True)))
    assert len(ids) == 2
    for length in (limit, limit + 1, 100_000):
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(generate([5] * length)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(length) in caught.value.details() and str(limit) in caught.value.details()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (generate([]), "prompt"),
        (generate([320]), "prompt"),
        (generate([2**32 - 1]), "prompt"),
        (generate([5], logit_bias={320: 1.0}), "logit_bias"),
        (generate([5], logit_bias={5: float("nan")}), "logit_bias"),
        (generate([5], logit_bias=dict.fromkeys(range(50000), 0.0)), "logit_bias"),
        (generate([5], stop_token_ids=[2**31]), "stop_token_ids"),
        (generate([5], temperature=float("nan")), "temperature"),
        (generate([5], min_p=-0.5), "min_p"),
        (generate([5], repetition_penalty=-1.0), "repetition_penalty"),
        (generate([5], max_tokens=1, min_tokens=2), "min_tokens"),
        (generate([5], stop=[str(index) for index in range(100_000)]), "stop"),
        (generate([5], n=65), "n is"),
        (generate([5], prompt_logprobs=21), "prompt_logprobs"),
    ],
)
def test_bad_requests_beside_good_ones(stub, request_, field):
    good = [generate([5, 6, 7 + index], max_tokens=20, ignore_eos=True) for index in range(3)]
    alone = [output_ids(stub.Generate(one)) for one in good]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(lambda one=one: output_ids(stub.Generate(one))) for one in good]
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request_))
        assert [one.result() for one in running] == alone
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details() and len(caught.value.details()) < 4000


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**32 - 1},
        {"top_p": 1e-30, "temperature": 1e9},
        {"temperature": 1e-38},
        {"min_p": 1.0, "temperature": 2.0},
        {"max_tokens": 2**32 - 1},
        {"max_tokens": None, "min_tokens": 2**32 - 1},
        {"seed": -(2**31), "temperature": 1.0},
        {"seed": 2**31 - 1, "temperature": 1.0, "n": 4},
        {"repetition_penalty": 1e3},
        {"repetition_penalty": 0.0015},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": dict.fromkeys(range(320), -100.0)},
        {"logit_bias": {319: 100.0}},
        {"stop_token_ids": list(range(32)), "stop": ["\n", "é", "\0", "x" * 10_000]},
        {"n": 64, "logprobs": 20, "prompt_logprobs": 20},
        {"logprobs": 20, "prompt_logprobs": 0, "temperature": 1.0, "top_k": 1},
    ],
)
def test_extreme_values_that_are_legal(stub, params):
    params = {"ignore_eos": True, **params}
    lengths = [len(ids) for ids in output_ids(stub.Generate(generate([5, 6, 7], **params)))]
    assert len(lengths) == params.get("n", 1) and all(lengths)


def test_prompt_logprobs_alone(stub):
    [answer] = stub.Generate(generate([5, 6, 7], max_tokens=0, prompt_logprobs=2))
    assert list(answer.complete.input_logprobs.token_ids) == [5, 6, 7]
    values = answer.complete.input_logprobs.token_logprobs
    assert not values[0].HasField("value") and all(entry.value < 0 for entry in values[1:])
    assert [len(top.token_ids) for top in answer.complete.input_logprobs.top_logprobs] == [0, 2, 2]
    assert not answer.complete.output_ids


def test_a_matched_stop_is_told(stub):
    [ids] = output_ids(stub.Generate(generate([5, 6, 7], max_tokens=10, ignore_eos=True)))
    [answer] = stub.Generate(generate([5, 6, 7], max_tokens=10, ignore_eos=True, stop_token_ids=[ids[4]]))
    first = ids.index(ids[4])
    assert list(answer.complete.output_ids) == ids[: first + 1]
    assert (answer.complete.finish_reason, answer.complete.matched_token_id) == ("stop", ids[4])


def test_a_running_id_is_refused_and_a_finished_one_is_free(server, stub):
    call = stub.Generate(generate([5], "same", stream=True, max_tokens=120, ignore_eos=True))
    next(call)
    with pytest.raises(grpc.RpcError, match="same"):
        list(stub.Generate(generate([5], "same")))
    stub.Abort(pb.AbortRequest(request_ids=["same"]))
    assert [r.complete.finish_reason for r in call if r.HasField("complete")] == ["abort"]
    wait_for(server.is_idle)
    assert output_ids(stub.Generate(generate([5], "same")))


def test_deadlines_free_everything_in_queue_and_in_run(server, stub):
    requests = [generate([5, index + 5], max_tokens=120, n=4, ignore_eos=True) for index in range(8)]
    calls = [stub.Generate(one, timeout=0.01 * index) for index, one in enumerate(requests)]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(server.is_idle)


def test_cancels_at_any_moment(server, stub):
    for delay in range(20):
        call = stub.Generate(generate([5] * 60, stream=True, max_tokens=60, n=2, ignore_eos=True))
        threading.Timer(delay * 0.005, call.cancel).start()
        with contextlib.suppress(grpc.RpcError):
            list(call)
    wait_for(server.is_idle)


def test_malformed_and_oversized_messages(server):
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Generate")
        for data in (b"\xff" * 100, b"\x0a\xff", b"\x12\x80"):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(data))
            assert caught.value.code() is grpc.StatusCode.UNKNOWN  # by the gRPC library, before any of our code
            assert len(caught.value.details()) < 1000
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\x00" * (17 << 20)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(f"/{SERVICE}/Nothing")(b""))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError):
            list(call(generate([5]).SerializeToString(), metadata=[("x-large", "y" * 1_000_000)]))


def test_a_long_prompt_within_the_limit_of_messages(stub):
    with pytest.raises(grpc.RpcError, match="384"):
        list(stub.Generate(generate([5] * 2_000_000)))


def test_salts_keep_prefixes_apart_until_the_cache_is_flushed(stub):
    def cached(salt):
        metadata = (("precast-cache-salt", salt),) if salt else ()
        [answer] = stub.Generate(generate([7] * 60, max_tokens=1), metadata=metadata)
        return answer.complete.cached_tokens

    stub.FlushCache(common_pb2.FlushCacheRequest())
    assert [cached(salt) for salt in ("", "", "a", "b", "a")] == [0, 48, 0, 0, 48]
    assert stub.FlushCache(common_pb2.FlushCacheRequest()).success
    assert [cached(salt) for salt in ("", "a", "a")] == [0, 0, 48]


def test_who_has_priority_runs_first(server, stub):
    order = []

    def run(name, priority):
        metadata = (("precast-priority", str(priority)),)
        request = generate([5, 6], n=4, max_tokens=300, ignore_eos=True)  # takes all slots
        assert len(output_ids(stub.Generate(request, metadata=metadata))) == 4
        order.append(name)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        calls = []
        for waiting, (name, priority) in enumerate([("running", 0), ("later", 1), ("sooner", -1)]):
            calls.append(pool.submit(run, name, priority))
            wait_for(lambda waiting=waiting: server.metric("vllm:num_requests_waiting") == 4 * waiting)
            wait_for(lambda: server.metric("vllm:num_requests_running") == 4)
        for call in calls:
            call.result()
    assert order == ["running", "sooner", "later"]


def test_metrics_count(server, stub):
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count")
    before = [server.metric(name) for name in names]
    list(stub.Generate(generate([5, 6, 7], max_tokens=4, ignore_eos=True)))
    assert [server.metric(name) - then for name, then in zip(names, before, strict=True)] == [3, 4, 1]
    assert server.metric("vllm:cache_config_info") == 1
    assert server.metric("vllm:compiles_after_ready_total") == 0


@pytest.mark.parametrize(
    ("flag", "status"),
    [("--seed=99999999999", 2), ("--max_tokens=5000000000", 2), ("--top_p=0", 2), ("--temperature=nan", 1),
     ("--timeout=0.0001", 1), ("--server=nowhere:1", 1), ("--save_tokenizer=/proc/x", 1)],
)  # fmt: skip
def test_what_the_client_cannot_do_is_one_line(shared_server, flag, status):
    texts = [] if "save" in flag else ["hello"]
    command = [BIN / "runtime-client", f"--server={shared_server.address}", flag, *texts]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status and done.stdout == ""
    assert done.stderr.startswith("runtime-client: ") and len(done.stderr.splitlines()) == 1


def test_the_client_ends_quietly_when_nobody_reads(shared_server):
    command = (
        f"{BIN / 'runtime-client'} --server={shared_server.address} --max_tokens=300 --raw 'hello the' | head -c 1"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, timeout=60)
    assert len(done.stdout) == 1 and done.stderr == ""


def test_the_saved_tokenizer_is_the_servers(shared_server, tiny, tmp_path):
    command = [BIN / "runtime-client", f"--server={shared_server.address}", f"--save_tokenizer={tmp_path}"]
    subprocess.run(command, check=True)
    assert (tmp_path / "tokenizer.json").read_text() == (tiny / "tokenizer.json").read_text()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
