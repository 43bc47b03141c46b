"""Real processes: runtime-serve and the gateway, started and watched as an operator would."""

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import grpc
import openai
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

BIN = pathlib.Path(sys.executable).parent
FLAGS = ("--dtype=float32", "--slots=4", "--page_size=16", "--token_budget=36", "--max_model_len=384")


@dataclasses.dataclass
class Server:
    """A runtime-serve process that has said ready."""

    process: subprocess.Popen
    port: int
    metrics_port: int
    ready_line: str
    log: pathlib.Path

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def stub(self):
        with grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield vllm_engine_pb2_grpc.VllmEngineStub(channel)

    def http(self, path):
        """Status and body of a GET on the metrics port."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name):
        """Sum of a metric over its labels."""
        lines = [
            line for line in self.http("/metrics")[1].splitlines() if re.match(rf"{re.escape(name)}(\{{|\s)", line)
        ]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def is_idle(self):
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(f"vllm:{name}") == 0 for name in names)

    def stop(self, number=signal.SIGTERM):
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def server(model, folder, *flags, **environment):
    """Starts runtime-serve on free ports; kills it at the end if it is still there."""
    log = pathlib.Path(folder) / f"server-{time.monotonic_ns()}.log"
    command = [BIN / "runtime-serve", f"--model={model}", "--port=0", "--metrics_port=0", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, text=True, env=os.environ | environment
        )
    with process:
        try:
            ready_line = process.stdout.readline()
            found = re.match(
                r"ready: .* on grpc://127\.0\.0\.1:(\d+), metrics on http://127\.0\.0\.1:(\d+)/", ready_line
            )
            assert found, f"{ready_line}\n{log.read_text()[-3000:]}"
            yield Server(process, int(found[1]), int(found[2]), ready_line, log)
        finally:
            process.kill()


@contextlib.contextmanager
def gateway(address, folder):
    """Starts smg in front of a server; gives an OpenAI client that does not retry."""
    port, metrics_port = free_port(), free_port()
    command = [BIN / "smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"grpc://{address}"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "warn"]
    with (pathlib.Path(folder) / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    with process:
        try:
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
                wait_for(lambda: _is_ready(client), 60)
                yield client
        finally:
            process.kill()


def _is_ready(client):
    """Whether the gateway knows the model and has its tokenizer, which it fetches a little later."""
    try:
        models = client.models.list().data
        body = {"model": models[0].id, "prompt": "Hello"} if models else None
        return body is not None and bool(client.post("/tokenize", body=body, cast_to=object))
    except openai.OpenAIError:
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def generate(ids, request_id="", stream=False, **params):
    """A request by token ids, greedy unless told otherwise."""
    params = {"temperature": 0.0, "max_tokens": 8, **params}
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=ids),
        stream=stream,
        sampling_params=pb.SamplingParams(**params),
    )


def output_ids(responses):
    """The whole output of each sequence, by index."""
    found = {r.complete.index: list(r.complete.output_ids) for r in responses if r.HasField("complete")}
    return [found[index] for index in sorted(found)]
