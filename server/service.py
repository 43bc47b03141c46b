"""The gRPC service ``vllm.grpc.engine.VllmEngine``: a thin adapter over the engine's thread.

An RPC carries its request: when it ends in any other way than with the last token, be it by its
client's cancel, disconnect or deadline, the request is aborted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import datetime
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

import grpc
from absl import logging
from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

import precast
from precast.models.checkpoint.base import Checkpoint
from precast.runtime.engine_thread import EngineThread, EngineUnavailable
from precast.runtime.request import FinishReason, OutputDelta, RequestError, SamplingParams
from precast.server import wire
from precast.server.chat_template import ChatError
from precast.server.metrics import ServerMetrics
from precast.server.stream import DeltaQueue
from precast.server.text import TextEncoder

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
_TOKENIZER_CHUNK_BYTES = 64 * 1024
_TOKENIZING_THREADS = 2
_MAX_ERROR_CHARS = 1000


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What GetModelInfo and GetServerInfo say of the model."""

    path: str
    served_name: str
    model_type: str
    vocab_size: int
    dtype: str
    architectures: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, served_name: str, dtype: str) -> ModelInfo:
        """What a checkpoint says of itself; ``dtype`` is what it is served in."""
        text, config = checkpoint.text, checkpoint.config
        info = cls(checkpoint.path, served_name, config.model_type, config.vocab_size, dtype)
        if text is None:
            return info
        return dataclasses.replace(
            info,
            architectures=tuple(text.config_json.get("architectures") or ()),
            eos_token_ids=text.eos_token_ids,
            bos_token_id=text.bos_token_id,
            pad_token_id=text.pad_token_id,
        )


@dataclasses.dataclass(frozen=True)
class StreamLimits:
    """How far a client may fall behind before its stream is ended.

    Attributes:
      max_queued_deltas: increments of output that wait to be sent.
      stall_seconds: how long one message may wait until the client reads.
    """

    max_queued_deltas: int = 4096
    stall_seconds: float = 60.0


class EngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers the contract's RPCs; those that it leaves out answer UNIMPLEMENTED."""

    def __init__(
        self,
        engine: EngineThread,
        model: ModelInfo,
        metrics: ServerMetrics,
        text: TextEncoder | None,
        limits: StreamLimits | None = None,
    ):
        """``text`` is None for a model without a tokenizer, which is served by token ids alone."""
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._text = text
        self._tokenizer_zip = None if text is None else text.bundle.zip()
        self._limits = limits or StreamLimits()
        self._draining = False
        self._active: set[str] = set()
        self._aborted_by_rpc: set[str] = set()
        self._started = time.monotonic()
        self._last_request_time = 0.0
        self._throughput = _Throughput()
        self._tokenizing = concurrent.futures.ThreadPoolExecutor(_TOKENIZING_THREADS, "tokenize")

    def begin_drain(self) -> None:
        """From now on HealthCheck says no and new work gets UNAVAILABLE; what runs goes on."""
        self._draining = True

    def unavailable_because(self) -> str | None:
        """Why this server takes no work, or None when it does."""
        if self._engine.failure is not None:
            return "the engine has failed"
        return "the server is shutting down" if self._draining else None

    async def wait_until_idle(self, timeout: float) -> None:
        """Waits until every RPC has sent its last message, for ``timeout`` seconds at the most."""
        give_up = time.monotonic() + timeout
        while self._active and time.monotonic() < give_up:
            await asyncio.sleep(0.01)

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        self._last_request_time = time.time()
        try:
            await self._generate(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except _RpcError as error:
            await context.abort(error.code, str(error)[:_MAX_ERROR_CHARS])
        except EngineUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error)[:_MAX_ERROR_CHARS])
        except (RequestError, ChatError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:_MAX_ERROR_CHARS])
        except Exception:
            tenant = dict(context.invocation_metadata() or ()).get(wire.TENANT_KEY)
            logging.exception("Generate failed: request %r, tenant %r", request.request_id[:64], tenant)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error: the server's log has the details")

    async def _generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        reason = self.unavailable_because()
        if reason is not None:
            raise EngineUnavailable(f"{reason}: try another server")
        request_id = request.request_id or uuid.uuid4().hex
        params = wire.sampling_params(request)
        metadata = wire.RequestMetadata.of(context.invocation_metadata() or ())
        prompt_token_ids = await self._prompt_token_ids(request)
        # The engine frees an id with the last token; here it is taken until the client has that token.
        if request_id in self._active:
            raise RequestError(f"request_id is {request_id[:64]!r}: a request with this id is running")
        queue = DeltaQueue(self._limits.max_queued_deltas, lambda: self._engine.abort(request_id))
        self._engine.submit(
            *(request_id, prompt_token_ids, params, queue.put),
            priority=metadata.priority,
            salt=metadata.cache_salt,
            tenant=metadata.tenant,
        )
        self._active.add(request_id)
        try:
            async for message in self._messages(request_id, request.stream, queue, prompt_token_ids, params):
                await self._send(message, context)
        except BaseException:
            self._engine.abort(request_id)
            raise
        finally:
            self._active.discard(request_id)
            self._aborted_by_rpc.discard(request_id)

    async def _prompt_token_ids(self, request: pb.GenerateRequest) -> Sequence[int]:
        kind = request.WhichOneof("input")
        if kind == "tokenized":
            return list(request.tokenized.input_ids)
        if kind is None:
            raise RequestError("input is not set: it must be tokenized or text")
        if self._text is None:
            raise RequestError("text cannot be used: this model has no tokenizer, send tokenized ids")
        loop = asyncio.get_running_loop()
        limit = self._engine.config.max_model_len
        return await loop.run_in_executor(self._tokenizing, self._text.encode_prompt, request.text, limit)

    async def _messages(
        self,
        request_id: str,
        stream: bool,
        queue: DeltaQueue,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> AsyncIterator[pb.GenerateResponse]:
        latency = self._metrics.request(params.n)
        sequences = [wire.OutputSequence(keep_logprobs=not stream) for _ in range(params.n)]
        running = params.n
        while running:
            delta = await queue.get()
            if delta is None:
                raise _RpcError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"the client is more than {self._limits.max_queued_deltas} messages behind: read faster",
                )
            self._check(request_id, delta)
            latency.observe(delta)
            sequences[delta.index].add(delta)
            if stream and (delta.token_ids or delta.prompt_logprobs):
                yield wire.chunk(delta, prompt_token_ids)
            if delta.finish_reason is not None:
                running -= 1
                yield wire.complete(delta, sequences[delta.index], prompt_token_ids)

    def _check(self, request_id: str, delta: OutputDelta) -> None:
        """Raises for an end that is no answer: a fault, or an abort that no client asked for."""
        if delta.finish_reason is FinishReason.ERROR:
            raise _RpcError(grpc.StatusCode.INTERNAL, delta.error or "the engine has failed")
        if delta.finish_reason is FinishReason.ABORT and request_id not in self._aborted_by_rpc:
            raise EngineUnavailable("the server shut down before the request was complete")

    async def _send(self, message: pb.GenerateResponse, context: grpc.aio.ServicerContext) -> None:
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                await context.write(message)
        except TimeoutError:
            raise _RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the client has read nothing for {self._limits.stall_seconds:g} seconds",
            ) from None

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        for request_id in self._active.intersection(request.request_ids):
            self._aborted_by_rpc.add(request_id)
            self._engine.abort(request_id)
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        reason = self.unavailable_because()
        return pb.HealthCheckResponse(healthy=reason is None, message=reason or "ready")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        model = self._model
        max_model_len = self._engine.config.max_model_len or 0  # the engine has resolved it
        return pb.GetModelInfoResponse(
            model_path=model.path,
            tokenizer_path=model.path,
            served_model_name=model.served_name,
            is_generation=True,
            model_type=model.model_type,
            architectures=model.architectures,
            vocab_size=model.vocab_size,
            max_context_length=max_model_len,
            max_req_input_len=max_model_len - 1,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id or 0,
            pad_token_id=model.pad_token_id or 0,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        stats = self._engine.stats()
        return pb.GetServerInfoResponse(
            active_requests=stats.num_running + stats.num_waiting,
            is_paused=self.unavailable_because() is not None,
            last_receive_timestamp=self._last_request_time,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=stats.page_size,
            model_dtype=self._model.dtype,
            max_num_seqs=stats.slots,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        stats = self._engine.stats()
        load = pb.SchedulerLoad(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=(stats.num_pages - stats.num_free_pages) * stats.page_size,
            max_total_num_tokens=stats.num_pages * stats.page_size,
            token_usage=stats.kv_cache_usage,
            gen_throughput=self._throughput.sample(stats.output_tokens_total),
            cache_hit_rate=stats.cached_tokens_total / max(1, stats.prompt_tokens_total),
            utilization=stats.num_running / stats.slots,
            max_running_requests=stats.slots,
            num_waiting_uncached_tokens=stats.waiting_prompt_tokens,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=precast.__version__,
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        data = self._tokenizer_zip
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this model has no tokenizer")
            return
        for start in range(0, len(data), _TOKENIZER_CHUNK_BYTES):
            last = start + _TOKENIZER_CHUNK_BYTES >= len(data)
            yield common_pb2.GetTokenizerChunk(
                data=data[start : start + _TOKENIZER_CHUNK_BYTES],
                sha256=hashlib.sha256(data).hexdigest() if last else "",
            )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        """Does not wait for the engine to be idle, whatever the request says: what runs keeps its pages."""
        self._engine.flush_cache()
        return common_pb2.FlushCacheResponse(success=True, message="cached prefixes are forgotten")

    async def _not_offered(self, request: Message, context: grpc.aio.ServicerContext) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not offer this call")

    Embed = StartProfile = StopProfile = SubscribeKvEvents = _not_offered


class _RpcError(Exception):
    """Ends an RPC with a status of its own."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


class _Throughput:
    """Generated tokens a second since the sample before, taken a second or more apart."""

    def __init__(self):
        self._time, self._tokens, self._rate = time.monotonic(), 0, 0.0

    def sample(self, tokens: int) -> float:
        now = time.monotonic()
        if now - self._time >= 1.0:
            self._rate = (tokens - self._tokens) / (now - self._time)
            self._time, self._tokens = now, tokens
        return self._rate
