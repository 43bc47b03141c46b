"""A server's life from ready to the exit status, over a fake engine."""

import asyncio
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import fake_engine
import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from precast.server.address import Address, StartError
from precast.server.service import ModelInfo
from precast.server.serving import serve

MODEL = ModelInfo("/models/tiny", "tiny", "llama", 320, "float32")


def run_server(client, drain_timeout=5.0):
    """Serves until ``client(engine, address)``, in a thread of its own, has brought it to an end."""
    engine = fake_engine.FakeEngine(step_seconds=0.001)
    threads, errors = [], []

    def guarded(address):
        try:
            client(engine, address)
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_ready(address):
        threads.append(threading.Thread(target=guarded, args=(address,)))
        threads[0].start()

    serving = serve(engine, MODEL, None, Address("127.0.0.1", 0, 0), drain_timeout=drain_timeout, on_ready=on_ready)
    status = asyncio.run(serving)
    threads[0].join()
    if errors:
        raise errors[0]
    assert not engine.requests
    return status


def generate(address, max_tokens):
    """The status of one request: OK or an error's."""
    with grpc.insecure_channel(f"127.0.0.1:{address.port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        tokenized, params = pb.TokenizedInput(input_ids=[5]), pb.SamplingParams(max_tokens=max_tokens)
        try:
            list(stub.Generate(pb.GenerateRequest(tokenized=tokenized, sampling_params=params)))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def health(address):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{address.metrics_port}/health", timeout=5) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0(number):
    def client(engine, address):
        assert generate(address, 3) is grpc.StatusCode.OK and health(address) == 200
        os.kill(os.getpid(), number)

    assert run_server(client) == 0


def with_one_request_waiting(end, statuses):
    """A client that calls ``end(engine)`` while a request is under way."""

    def client(engine, address):
        engine.gate.clear()
        request = threading.Thread(target=lambda: statuses.append(generate(address, 3)))
        request.start()
        while not engine.requests:
            time.sleep(0.01)
        end(engine)
        request.join()

    return client


def test_a_fault_ends_it_with_1():
    statuses = []
    client = with_one_request_waiting(lambda engine: engine.fail("a step raised"), statuses)
    assert run_server(client) == 1
    assert statuses == [grpc.StatusCode.INTERNAL]


def test_what_a_drain_cuts_off_is_told():
    statuses = []
    client = with_one_request_waiting(lambda engine: os.kill(os.getpid(), signal.SIGTERM), statuses)
    assert run_server(client, drain_timeout=0.2) == 0
    assert statuses == [grpc.StatusCode.UNAVAILABLE]


def test_a_host_that_is_not_here():
    with pytest.raises(StartError, match=r"192\.0\.2\.1"):
        Address("192.0.2.1", 0, 0).check()
