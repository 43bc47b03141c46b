"""The engine: sequences in, tokens out, one step at a time.

``step`` is the whole loop.  Step N+1 is launched before step N's tokens are read: what a decode row reads was left
on the device by the step before, keyed by slot.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ids

import jax
import numpy as np

from precast.models import transformer
from precast.models.cache import Cache
from precast.models.config import ModelConfig
from precast.runtime import batch, programs
from precast.runtime.config import EngineConfig, Shapes
from precast.runtime.detokenize import Detokenizer
from precast.runtime.plan import CompileCounter, Plan
from precast.runtime.request import (
    FinishReason,
    OutputDelta,
    RequestError,
    SamplingParams,
    TokenLogprobs,
    check_token_id,
)
from precast.runtime.sample import Sampled, SlotState
from precast.runtime.scheduler import Scheduler, StepPlan
from precast.runtime.sequence import Request, Sequence

_BODY, _HEAD = 0, 1


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot for metrics: gauges as they stand, ``_total`` counters since the start."""

    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int
    slots: int
    num_pages: int
    num_free_pages: int
    page_size: int
    kv_cache_usage: float
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    preemptions_total: int
    requests_total: dict[FinishReason, int]
    steps_total: int
    step_seconds_total: float
    compiles_after_ready: int


@dataclasses.dataclass(frozen=True)
class _Launched:
    """A step in flight: what it was, and the device arrays it will leave."""

    plan: StepPlan
    sampled: Sampled | None
    scores: tuple[jax.Array, jax.Array, jax.Array] | None


class Engine:
    """Owns the device's cache and slot state, and drives the compiled programs.

    Not thread-safe: one thread calls ``add``, ``abort`` and ``step``.  ``prepare`` and the attributes below may be
    used from any.

    Attributes:
      config: as resolved; max_model_len is the one enforced.
      model: the model's config.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        config: EngineConfig,
        shapes: Shapes,
        plan: Plan,
        weights: transformer.Weights,
        eos_token_ids: tuple[int, ...],
        detokenizer: Detokenizer | None,
    ) -> None:
        self.model = model
        self.config = config
        self.shapes = shapes
        self.plan = plan
        self._weights = transformer.body_weights(weights), transformer.head_weights(weights)
        self._cache: Cache
        self._state: SlotState
        self._cache, self._state = plan.programs[programs.CREATE]()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._detokenizer = detokenizer
        self._scheduler = Scheduler(shapes, prefix_caching=config.prefix_caching)
        self._requests: dict[str, list[Sequence]] = {}
        self._in_flight: _Launched | None = None
        self._arrivals = itertools.count()
        self._counts: Counter[str] = Counter()
        self._finished: Counter[FinishReason] = Counter()
        self._step_seconds = 0.0
        self._compiles = CompileCounter()

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or self._in_flight is not None

    def prepare(
        self,
        request_id: str,
        prompt_token_ids: Ids[int],
        params: SamplingParams,
        sink: Callable[[OutputDelta], None],
        *,
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
    ) -> Request:
        """Checks a request; raises RequestError that names field, value and limit."""
        if not len(prompt_token_ids):
            raise RequestError("prompt is empty: it must have at least 1 token")
        limit = self.shapes.max_model_len - 1
        if len(prompt_token_ids) > limit:
            raise RequestError(
                f"prompt has {len(prompt_token_ids)} tokens: the limit is {limit}, "
                f"max_model_len {self.shapes.max_model_len} less one for the output"
            )
        for token_id in prompt_token_ids:
            check_token_id("prompt", token_id, self.model.vocab_size)
        params.validate(self.model.vocab_size)
        if params.stop_strings and self._detokenizer is None:
            raise RequestError("stop is set: this engine has no tokenizer to match strings with")
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        token_ids = np.asarray(prompt_token_ids, np.int32)
        return Request(request_id, token_ids, params, sink, priority, next(self._arrivals), salt, tenant)

    def add(self, request: Request) -> None:
        """Queues a prepared request; raises RequestError if its id is in use."""
        if request.request_id in self._requests:
            raise RequestError(f"request_id is {request.request_id!r}: a request with this id is running")
        params = request.params
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        sequences = [
            Sequence(
                request,
                index,
                seed=(params.seed or 0) + index,
                stop_ids=stop_ids,
                max_model_len=self.shapes.max_model_len,
                table_width=self.shapes.table_width,
                detokenizer=self._detokenizer,
            )
            for index in range(params.n)
        ]
        self._requests[request.request_id] = sequences
        self._counts["prompt_tokens"] += len(request.prompt_token_ids)
        for sequence in sequences:
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends what is left of a request with ABORT; nothing happens for an id that is not running."""
        for sequence in list(self._requests.get(request_id, ())):
            self._end(sequence, sequence.end(FinishReason.ABORT))

    def flush_cache(self) -> None:
        """Forgets every cached prefix; what runs goes on."""
        self._scheduler.pool.forget()

    def fail(self, error: str) -> None:
        """Ends every request with ERROR, after a step that raised."""
        self._in_flight = None
        for sequences in list(self._requests.values()):
            for sequence in list(sequences):
                self._end(sequence, sequence.end(FinishReason.ERROR, error))

    def step(self) -> None:
        """Launches the next step, then reads the one before it and gives out its tokens."""
        began = time.monotonic()
        plan = self._scheduler.plan()
        launched = self._launch(plan) if plan else None
        landed, self._in_flight = self._in_flight, launched
        if landed:
            self._collect(landed)
        self._step_seconds += time.monotonic() - began

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page and slot is accounted for."""
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._scheduler.pool
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            waiting_prompt_tokens=sum(sequence.num_prompt_tokens for sequence in list(scheduler.waiting)),
            slots=self.shapes.slots,
            num_pages=pool.num_usable,
            num_free_pages=pool.num_available,
            page_size=self.shapes.page_size,
            kv_cache_usage=1 - pool.num_available / pool.num_usable,
            prompt_tokens_total=self._counts["prompt_tokens"],
            cached_tokens_total=self._counts["cached_tokens"],
            output_tokens_total=self._counts["output_tokens"],
            preemptions_total=scheduler.num_preemptions,
            requests_total=dict(self._finished),
            steps_total=self._counts["steps"],
            step_seconds_total=self._step_seconds,
            compiles_after_ready=self._compiles.count,
        )

    def _launch(self, plan: StepPlan) -> _Launched:
        for sequence in plan.admitted:
            self._admit(sequence)
        run = self.plan.programs
        backbone = run[programs.backbone_name(plan.decode_rows, plan.prefill_tokens)]
        inputs = batch.pack(plan, self.shapes)
        self._cache, hidden, prefilled = backbone(self._weights[_BODY], self._cache, self._state.last_tokens, inputs)
        sampled = scores = None
        if plan.sampling:
            rows = batch.pack_rows(plan, self.shapes)
            head = run[programs.head_name(len(rows.slots))]
            self._state, sampled = head(self._weights[_HEAD], self._state, hidden, rows)
        if any(chunk.sequence.is_scoring for chunk in plan.chunks):
            targets = batch.pack_targets(plan, self.shapes)
            scores = run[programs.score_name(plan.prefill_tokens)](self._weights[_HEAD], prefilled, targets)
        self._counts["steps"] += 1
        return _Launched(plan, sampled, scores)

    def _admit(self, sequence: Sequence) -> None:
        """Tells the device whose options the slot has from now on."""
        if not sequence.output_ids:
            self._counts["cached_tokens"] += sequence.num_cached_tokens or 0
        self._state = self.plan.programs[programs.ADMIT](
            self._state,
            np.int32(sequence.held_slot),
            batch.slot_options(sequence),
            batch.admitted_tokens(sequence, self.shapes),
            np.int32(sequence.num_prompt_tokens),
            np.int32(sequence.num_known_tokens),
        )

    def _collect(self, launched: _Launched) -> None:
        if launched.scores is not None:
            self._collect_scores(launched)
        for chunk in launched.plan.chunks:
            sequence = chunk.sequence
            done = chunk.start + chunk.length >= sequence.num_prompt_tokens
            if done and not sequence.max_output and sequence.finish_reason is None:
                self._end(sequence, sequence.end(FinishReason.LENGTH))
        if launched.sampled is None:
            return
        token_ids = np.asarray(launched.sampled.token_ids)
        logprobs = None
        if any(one.sequence.request.params.logprobs is not None for one in launched.plan.sampling):
            logprobs = _Logprobs(launched.sampled.logprobs, launched.sampled.top_ids, launched.sampled.top_logprobs)
        for row, one in enumerate(launched.plan.sampling):
            if one.sequence.finish_reason is None:
                self._take_token(one.sequence, int(token_ids[row]), logprobs, row)

    def _take_token(self, sequence: Sequence, token_id: int, logprobs: _Logprobs | None, row: int) -> None:
        if token_id < 0:
            self._end(sequence, sequence.end(FinishReason.ERROR, "the model gave logits that are not finite numbers"))
            return
        wanted = sequence.request.params.logprobs
        found = logprobs.at(row, token_id, wanted) if logprobs and wanted is not None else None
        delta = sequence.accept(token_id, found)
        self._counts["output_tokens"] += 1
        if sequence.finish_reason is None:
            self._scheduler.remember_pages(sequence)
            sequence.request.sink(delta)
        else:
            self._end(sequence, delta)

    def _collect_scores(self, launched: _Launched) -> None:
        assert launched.scores is not None
        logprobs = _Logprobs(*launched.scores)
        for chunk, offset in zip(launched.plan.chunks, batch.chunk_offsets(launched.plan, self.shapes), strict=True):
            sequence = chunk.sequence
            if not sequence.is_scoring:
                continue
            # Position p's scores are of the token at p + 1; the prompt's first token has none.
            stop = min(chunk.start + chunk.length, sequence.num_prompt_tokens - 1)
            targets = sequence.token_ids(chunk.start + 1, stop + 1)
            wanted = sequence.request.params.prompt_logprobs or 0
            scores = [logprobs.at(offset + i, int(token_id), wanted) for i, token_id in enumerate(targets)]
            sequence.score(chunk.start + 1, scores)

    def _end(self, sequence: Sequence, delta: OutputDelta) -> None:
        """Frees what the sequence holds and gives out its last delta."""
        assert sequence.finish_reason is not None
        self._scheduler.remove(sequence)
        self._finished[sequence.finish_reason] += 1
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]
        sequence.request.sink(delta)


class _Logprobs:
    """A step's log-probabilities, read from the device once."""

    def __init__(self, chosen: jax.Array, top_ids: jax.Array, top: jax.Array) -> None:
        self._chosen, self._top_ids, self._top = np.asarray(chosen), np.asarray(top_ids), np.asarray(top)

    def at(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        pairs = zip(self._top_ids[row, :num_top].tolist(), self._top[row, :num_top].tolist(), strict=True)
        return TokenLogprobs(token_id, float(self._chosen[row]), tuple(pairs))
