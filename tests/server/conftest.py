"""A service over a fake engine, on a real gRPC channel."""

import asyncio
import threading

import fake_engine
import grpc
import pytest
import tiny_model
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from precast.server.bundle import TokenizerBundle
from precast.server.metrics import ServerMetrics
from precast.server.service import EngineService, ModelInfo, StreamLimits
from precast.server.text import TextEncoder


@pytest.fixture
def engine():
    made = fake_engine.FakeEngine(step_seconds=0.0005)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def bundle():
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": tiny_model.CHAT_TEMPLATE, "add_bos_token": True}
    return TokenizerBundle(tiny_model.tokenizer().to_str(), config, {"architectures": ["LlamaForCausalLM"]})


@pytest.fixture
def service(engine, bundle):
    model = ModelInfo("/models/tiny", "tiny", "llama", 320, "float32", ("LlamaForCausalLM",), (1,), 0)
    limits = StreamLimits(max_queued_deltas=500, stall_seconds=1.0)
    metrics = ServerMetrics(engine, "tiny")
    return EngineService(engine, model, metrics, TextEncoder(bundle), limits)


@pytest.fixture
def address(service):
    """Where ``service`` is served, in an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start():
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(0.5), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def stub(address):
    with grpc.insecure_channel(address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


@pytest.fixture
def slow_stub(address):
    """A client whose window is small: it takes 64 kB in before it is read."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)
