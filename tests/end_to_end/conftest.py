"""One server and one gateway for the tests that leave them as they were; a small random model."""

import pathlib
import sys

import processes
import pytest
from processes import FLAGS

sys.path.append(str(pathlib.Path(__file__).parent.parent / "server"))  # for tiny_model

import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The model's folder; compiled programs stay beside it, so that only the first server compiles."""
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512)


@pytest.fixture(scope="session")
def shared_server(tiny, tmp_path_factory):
    with processes.server(tiny, tmp_path_factory.mktemp("logs"), *FLAGS) as server:
        yield server
        assert server.metric("vllm:compiles_after_ready_total") == 0
        assert server.stop() == 0


@pytest.fixture(scope="session")
def shared_client(shared_server, tmp_path_factory):
    with processes.gateway(shared_server.address, tmp_path_factory.mktemp("gateway")) as client:
        yield client


@pytest.fixture
def server(shared_server):
    """The shared server; afterwards it must be idle, all pages free, and answer as before."""
    canary = processes.generate([5, 6, 7, 8], max_tokens=12, ignore_eos=True)
    with shared_server.stub() as stub:
        before = processes.output_ids(stub.Generate(canary))
        yield shared_server
        processes.wait_for(shared_server.is_idle)
        assert processes.output_ids(stub.Generate(canary)) == before


@pytest.fixture
def client(server, shared_client):
    """An OpenAI client of the gateway before ``server``."""
    return shared_client
