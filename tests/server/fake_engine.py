"""Stands in for EngineThread where a test needs an engine that misbehaves or waits on command.

Every request gets the ids 1, 2, 3, … until its max_tokens.
"""

import dataclasses
import threading
import types

from precast.runtime.engine_thread import EngineUnavailable
from precast.runtime.request import FinishReason, OutputDelta, RequestError, TokenLogprobs


@dataclasses.dataclass
class _Running:
    sink: object
    params: object
    num_prompt: int
    sent: int = 0


class FakeEngine:
    def __init__(self, max_model_len=1_000_000, step_seconds=0.0):
        self.config = types.SimpleNamespace(max_model_len=max_model_len, slots=4)
        self.failure = None
        self.requests = {}
        self.submitted = []
        self.metadata = []
        self.aborted = []
        self.gate = threading.Event()  # steps run while it is set
        self.gate.set()
        self._step_seconds = step_seconds
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._draining = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request_id, prompt_token_ids, params, sink, *, priority=0, salt="", tenant=""):
        if self._draining or self.failure:
            raise EngineUnavailable("draining")
        if not prompt_token_ids:
            raise RequestError("prompt is empty: it must have at least 1 token")
        params.validate(320)
        with self._lock:
            self.submitted.append((request_id, list(prompt_token_ids), params))
            self.metadata.append((priority, salt, tenant))
            self.requests[request_id] = _Running(sink, params, len(prompt_token_ids))

    def abort(self, request_id):
        with self._lock:
            request = self.requests.pop(request_id, None)
            self.aborted.append(request_id)
        if request:
            self._finish(request_id, request, FinishReason.ABORT)

    def fail(self, message):
        self.failure = message
        with self._lock:
            requests, self.requests = self.requests, {}
        for request_id, request in requests.items():
            self._finish(request_id, request, FinishReason.ERROR, message)

    def drain(self, timeout):
        self._draining = True
        for _ in range(int(timeout * 100)):
            if not self.requests:
                return True
            self._stopped.wait(0.01)
        for request_id in list(self.requests):
            self.abort(request_id)
        return False

    def stop(self):
        self._stopped.set()
        self.gate.set()
        self._thread.join()

    def stats(self):
        return types.SimpleNamespace(
            num_running=len(self.requests),
            num_waiting=0,
            kv_cache_usage=0.25,
            num_pages=8,
            num_free_pages=6,
            page_size=4,
            slots=4,
            prompt_tokens_total=10,
            cached_tokens_total=5,
            output_tokens_total=7,
            preemptions_total=0,
            requests_total={FinishReason.STOP: 2, FinishReason.LENGTH: 1},
            waiting_prompt_tokens=0,
            step_seconds_total=1.5,
            steps_total=3,
            compiles_after_ready=0,
        )

    def _run(self):
        while not self._stopped.is_set():
            self.gate.wait()
            with self._lock:
                requests = list(self.requests.items())
            for request_id, request in requests:
                self._step(request_id, request)
            self._stopped.wait(self._step_seconds if requests else 0.001)

    def _step(self, request_id, request):
        request.sent += 1
        token_id = request.sent
        params = request.params
        last = request.sent == min(params.max_tokens or 16, self.config.max_model_len - request.num_prompt)
        logprobs = None
        if params.logprobs is not None:
            top = tuple((token, -1.0 - token) for token in range(params.logprobs))
            logprobs = (TokenLogprobs(token_id, -0.5, top),)
        if last:
            with self._lock:
                self.requests.pop(request_id, None)
        for index in range(params.n):
            prompt_logprobs = None
            if params.prompt_logprobs is not None and request.sent == 1 and index == 0:
                prompt_logprobs = (None, *[TokenLogprobs(9, -2.0, ((9, -2.0),))] * (request.num_prompt - 1))
            request.sink(
                OutputDelta(
                    request_id,
                    index,
                    token_ids=(token_id,),
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    finish_reason=FinishReason.LENGTH if last else None,
                    num_prompt_tokens=request.num_prompt,
                    num_output_tokens=request.sent,
                )
            )

    def _finish(self, request_id, request, reason, error=None):
        for index in range(request.params.n):
            request.sink(OutputDelta(request_id, index, finish_reason=reason, error=error))
