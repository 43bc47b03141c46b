"""One server's life: listen, say ready, serve until a signal or a fault, drain, stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from precast.runtime.engine_thread import EngineThread
from precast.server.address import Address, StartError
from precast.server.metrics import MetricsServer, ServerMetrics
from precast.server.service import SERVICE_NAME, EngineService, ModelInfo
from precast.server.text import TextEncoder

MAX_REQUEST_BYTES = 16 << 20
MAX_RESPONSE_BYTES = 64 << 20
MAX_METADATA_BYTES = 16 << 10
MAX_CONCURRENT_RPCS = 4096
_FLUSH_SECONDS = 5.0  # for messages under way to clients, once their requests have ended
_FAULT_POLL_SECONDS = 0.1
_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # otherwise a second server on a taken port starts without an error
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # finds clients that are gone without a word
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
)


async def serve(
    engine: EngineThread,
    model: ModelInfo,
    text: TextEncoder | None,
    address: Address,
    *,
    drain_timeout: float,
    on_ready: Callable[[Address], None],
) -> int:
    """Serves until SIGTERM, SIGINT or a fault of the engine.

    Args:
      engine: running; it is stopped at the end.
      text: None for a model without a tokenizer.
      drain_timeout: seconds that running and queued requests get after the first signal.
      on_ready: is told the ports once everything answers.

    Returns:
      The process's exit status: 0 after a signal, 1 after a fault.

    Raises:
      StartError: a port was taken meanwhile.
    """
    metrics = ServerMetrics(engine, model.served_name)
    service = EngineService(engine, model, metrics, text)
    health_service = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue] (set at run time)
    server = grpc.aio.server(options=_GRPC_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(f"{address.host}:{address.port}")
        metrics_server = MetricsServer(address.host, address.metrics_port, metrics, service.unavailable_because)
    except (RuntimeError, OSError) as error:
        raise StartError(f"cannot listen on {address.host}: {error}") from None
    await server.start()
    for name in ("", SERVICE_NAME):
        await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
    stop = _stop_on_signals()
    on_ready(Address(address.host, port, metrics_server.port))
    await _until_stop_or_fault(stop, engine)

    service.begin_drain()
    await health_service.enter_graceful_shutdown()
    if engine.failure is None:
        await asyncio.to_thread(engine.drain, drain_timeout)
    await service.wait_until_idle(_FLUSH_SECONDS)
    await server.stop(grace=1.0)
    metrics_server.stop()
    engine.stop()
    return 0 if engine.failure is None else 1


def _stop_on_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


async def _until_stop_or_fault(stop: asyncio.Event, engine: EngineThread) -> None:
    while engine.failure is None and not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), _FAULT_POLL_SECONDS)
        except TimeoutError:
            continue
