"""Metrics under the names that schedulers and dashboards for LLM servers scrape, and their HTTP port.

Gauges and counters are read from the engine when somebody asks; only latencies are recorded as
requests go by.  Their clock is monotonic.
"""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from precast.runtime.engine_thread import EngineThread
from precast.runtime.request import OutputDelta

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)


class ServerMetrics:
    """The registry of one server."""

    def __init__(self, engine: EngineThread, model_name: str):
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model_name))
        self._model_name = model_name
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the arrival of a request to its first token", _SECONDS
        )
        self._per_token = self._histogram(
            "vllm:time_per_output_token_seconds", "Mean time between the tokens of a sequence", _TOKEN_SECONDS
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the arrival of a request to its last token", _SECONDS
        )

    def request(self, n: int) -> RequestLatency:
        """Starts the clock of a request with ``n`` sequences."""
        return RequestLatency(n, self._first_token, self._per_token, self._whole)

    def render(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
        family = prometheus_client.Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)


class RequestLatency:
    """The clock of one request; to be told of every delta as it is sent."""

    def __init__(
        self,
        n: int,
        first_token: prometheus_client.Histogram,
        per_token: prometheus_client.Histogram,
        whole: prometheus_client.Histogram,
    ):
        self._first_token, self._per_token, self._whole = first_token, per_token, whole
        self._start = time.monotonic()
        self._first: dict[int, float] = {}
        self._running = n

    def observe(self, delta: OutputDelta) -> None:
        now = time.monotonic()
        if delta.token_ids and delta.index not in self._first:
            if not self._first:
                self._first_token.observe(now - self._start)
            self._first[delta.index] = now
        if delta.finish_reason is None:
            return
        if delta.num_output_tokens > 1:
            self._per_token.observe((now - self._first[delta.index]) / (delta.num_output_tokens - 1))
        self._running -= 1
        if not self._running:
            self._whole.observe(now - self._start)


class _EngineCollector(Collector):
    """Reads the engine's statistics at each scrape."""

    def __init__(self, engine: EngineThread, model_name: str):
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield self._gauge("num_requests_running", "Requests that hold a slot", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV cache, 0 to 1", stats.kv_cache_usage)
        yield self._counter("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens_total)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.cached_tokens_total)
        yield self._counter("generation_tokens", "Generated tokens", stats.output_tokens_total)
        yield self._counter("num_preemptions", "Requests that gave their pages up", stats.preemptions_total)
        yield self._counter("engine_steps", "Steps of the engine", stats.steps_total)
        yield self._counter("engine_step_seconds", "Time spent in steps", stats.step_seconds_total)
        yield self._counter(
            "compiles_after_ready", "Programs compiled in service: always 0", stats.compiles_after_ready
        )
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished requests by reason", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.requests_total.items():
            finished.add_metric([self._model_name, str(reason)], count)
        yield finished
        info = {"block_size": stats.page_size, "num_gpu_blocks": stats.num_pages, "max_num_seqs": stats.slots}
        cache = GaugeMetricFamily("vllm:cache_config_info", "Layout of the KV cache", labels=["model_name", *info])
        cache.add_metric([self._model_name, *map(str, info.values())], 1)
        yield cache

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class MetricsServer:
    """Serves /health (200, or 503 with the reason) and /metrics over HTTP."""

    def __init__(self, host: str, port: int, metrics: ServerMetrics, unavailable_because: Callable[[], str | None]):
        """Raises OSError when the address cannot be had."""
        self._server = _HttpServer((host, port), _Handler)
        self._server.metrics, self._server.unavailable_because = metrics, unavailable_because
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _HttpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    metrics: ServerMetrics
    unavailable_because: Callable[[], str | None]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._reply(200, prometheus_client.CONTENT_TYPE_LATEST, self.server.metrics.render())
        elif self.path == "/health":
            reason = self.server.unavailable_because()
            self._reply(200 if reason is None else 503, "text/plain", (reason or "ready").encode() + b"\n")
        else:
            self._reply(404, "text/plain", b"only /health and /metrics are here\n")

    def _reply(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: no line for each."""
