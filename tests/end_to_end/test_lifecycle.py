"""How a server starts, refuses to start, drains and ends."""

import concurrent.futures
import contextlib
import pathlib
import shutil
import signal
import socket
import subprocess
import time

import grpc
import openai
import processes
import pytest
from processes import BIN, FLAGS, generate, output_ids, wait_for
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

LONG = {"max_tokens": 350, "ignore_eos": True}


def outcome(stub, request):
    """("done", number of tokens) or (status, details)."""
    try:
        responses = list(stub.Generate(request))
    except grpc.RpcError as error:
        return error.code(), error.details()
    return "done", sum(map(len, output_ids(responses)))


@contextlib.contextmanager
def under_load(tiny, folder, *flags):
    """A server with eight streams on four slots, half of them queued."""
    with (
        processes.server(tiny, folder, *FLAGS, *flags) as server,
        server.stub() as stub,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        requests = [generate([5, index + 5], stream=True, **LONG) for index in range(8)]
        calls = [pool.submit(outcome, stub, request) for request in requests]
        wait_for(lambda: server.metric("vllm:num_requests_running") == 4)
        yield server, stub, calls


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_finishes_what_runs_and_waits(shared_server, tiny, tmp_path, number):
    with under_load(tiny, tmp_path) as (server, stub, calls):
        server.process.send_signal(number)
        wait_for(lambda: not stub.HealthCheck(pb.HealthCheckRequest()).healthy)
        assert outcome(stub, generate([5]))[0] is grpc.StatusCode.UNAVAILABLE
        assert server.http("/health") == (503, "the server is shutting down\n")
        assert [call.result() for call in calls] == [("done", 350)] * 8
        assert server.process.wait(20) == 0


def test_a_drain_without_time_tells_every_client(shared_server, tiny, tmp_path):
    with under_load(tiny, tmp_path, "--drain_timeout=0") as (server, _, calls):
        assert server.stop() == 0
        results = [call.result() for call in calls]
        assert all(code == "done" or code is grpc.StatusCode.UNAVAILABLE for code, _ in results)
        assert any("shut down" in str(details) for _, details in results)


def test_a_drain_behind_the_gateway(shared_server, tiny, tmp_path):
    with (
        processes.server(tiny, tmp_path, *FLAGS) as server,
        processes.gateway(server.address, tmp_path) as client,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        options = {"model": "tiny", "prompt": "hello", "extra_body": {"ignore_eos": True}}
        calls = [pool.submit(client.completions.create, max_tokens=350, **options) for _ in range(4)]
        wait_for(lambda: server.metric("vllm:num_requests_running") == 4)
        server.process.terminate()
        wait_for(lambda: server.http("/health")[0] == 503)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**options)
        assert caught.value.status_code == 503
        assert [call.result().usage.completion_tokens for call in calls] == [350] * 4
        assert server.process.wait(20) == 0


def test_a_second_signal_ends_at_once(shared_server, tiny, tmp_path):
    with under_load(tiny, tmp_path) as (server, stub, _):
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not stub.HealthCheck(pb.HealthCheckRequest()).healthy)
        began = time.monotonic()
        assert server.stop() == 128 + signal.SIGTERM
        assert time.monotonic() - began < 2


def test_a_signal_while_loading_ends_cleanly(tiny, tmp_path):
    log = tmp_path / "log"
    # Nothing is compiled yet, which takes seconds from the bar's first line on.
    flags = (f"--model={tiny}", f"--plan_dir={tmp_path / 'plans'}", "--port=0", "--metrics_port=0", *FLAGS)
    with log.open("wb") as errors:
        process = subprocess.Popen([BIN / "runtime-serve", *flags], stdout=subprocess.PIPE, stderr=errors, text=True)
    with process:
        try:
            wait_for(lambda: "compiling: " in log.read_text() or process.poll() is not None, 60)
            process.terminate()
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0 and out == ""
    assert "stopped before it was ready" in log.read_text() and "Traceback" not in log.read_text()


def test_idle_connections_do_not_hold_a_drain_up(shared_server, tiny, tmp_path):
    with processes.server(tiny, tmp_path, *FLAGS) as server:
        host = ("127.0.0.1", server.port)
        with socket.create_connection(host), socket.create_connection(("127.0.0.1", server.metrics_port)):
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 10


def failing_start(*flags):
    """The last line of a start that must fail, with nothing else that looks like a crash."""
    done = subprocess.run([BIN / "runtime-serve", *flags], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode not in (0, None) and done.stdout == "" and "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_flags_that_cannot_be():
    assert "slts" in failing_start("--slts=3")
    assert "--port" in failing_start("--port=70000")
    assert "float8" in failing_start("--dtype=float8")
    assert "slots is 0" in failing_start("--slots=0")
    assert "must differ" in failing_start("--port=50999", "--metrics_port=50999")
    assert "kv_cache_memory" in failing_start("--kv_cache_memory=much")
    assert "'tiny'" in failing_start("tiny")


def test_a_taken_port_is_found_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        for flag in ("--port", "--metrics_port"):
            line = failing_start(f"{flag}={port}", "--model=/nowhere")
            assert f"{flag} {port}" in line and "in use" in line
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "no such file"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"architectures": ["Foo"], "model_type": "foo"}'), "foo"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (lambda folder: _truncate(folder / "model.safetensors"), "model.safetensors"),
    ],
)
def test_models_that_cannot_be(tiny, tmp_path, spoil, words):
    folder = tmp_path / "spoilt"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns(".precast"))
    spoil(folder)
    line = failing_start(f"--model={folder}", "--port=0", "--metrics_port=0", *FLAGS)
    assert line.startswith("runtime-serve: ") and words in line


def test_limits_that_do_not_fit(tiny):
    ports = ("--port=0", "--metrics_port=0")
    assert "max_model_len" in failing_start(f"--model={tiny}", *ports, "--max_model_len=100000")
    assert "kv_cache_memory" in failing_start(f"--model={tiny}", *ports, "--kv_cache_memory=10")


def test_a_limit_that_memory_lowers_is_the_one_that_counts(tiny, tmp_path):
    # A page of 16 tokens takes 2 layers x 2 sides x 2 heads x 8 x 4 bytes x 16: three are 12 kB.
    flags = ("--dtype=float32", "--slots=2", "--page_size=16", "--token_budget=4", "--kv_cache_memory=12KiB")
    with processes.server(tiny, tmp_path, *flags) as server, server.stub() as stub:
        assert "up to 48 tokens" in server.ready_line
        assert "lowered from 512 to 48" in server.log.read_text()
        assert stub.GetModelInfo(pb.GetModelInfoRequest()).max_context_length == 48
        assert outcome(stub, generate([5] * 47, max_tokens=5)) == ("done", 1)
        code, details = outcome(stub, generate([5] * 48))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "48" in details
        [load] = stub.GetLoads(pb.GetLoadsRequest()).loads
        assert load.max_total_num_tokens == 48


def _truncate(path: pathlib.Path):
    path.write_bytes(path.read_bytes()[:-1000])
