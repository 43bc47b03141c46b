"""One output sequence on its way through the engine (a request with n > 1 has n of them)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from precast.runtime.detokenize import Detokenizer, StopMatcher
from precast.runtime.request import FinishReason, OutputDelta, SamplingParams, TokenLogprobs


@dataclasses.dataclass(frozen=True)
class Request:
    """What was submitted.

    prompt_token_ids: ``[tokens]`` int32.  priority: lower runs first.  arrival: order of submission.
    salt: only requests of one salt share cached prefixes.  tenant: on whose behalf, "" for nobody in particular.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    sink: Callable[[OutputDelta], None]
    priority: int
    arrival: int
    salt: str = ""
    tenant: str = ""


class Sequence:
    """State of one output sequence.

    Positions count tokens of prompt and output together.  Counters that say ``launched`` or ``sampled`` include
    the step in flight, whose tokens the host has not read yet.

    Attributes:
      output_ids: tokens read so far.
      max_output: tokens after which the output ends with LENGTH.
      slot: row of the device's slot state while running, else None.
      page_ids: pages held, in order.
      page_table: ``[table_width]`` int32, the same for the device, padded with the scratch page.
      page_keys: prefix keys of the leading full pages, as far as worked out.
      num_remembered: leading pages held that others can find.
      prefill_end: tokens known at admission, which prefill must cover before decoding starts.
      num_launched: tokens whose keys and values are in the cache or being computed.
      num_sampled: output tokens sampled.
      num_cached_tokens: prompt tokens that the first admission found in the prefix cache.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_model_len: int,
        table_width: int,
        detokenizer: Detokenizer | None,
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.seed = seed
        self.stop_ids = stop_ids
        room = max_model_len - len(request.prompt_token_ids)
        self.max_output = room if params.max_tokens is None else min(params.max_tokens, room)
        self.output_ids: list[int] = []
        self.slot: int | None = None
        self.page_ids: list[int] = []
        self.page_table = np.zeros(table_width, np.int32)
        self.page_keys: list[bytes] = []
        self.num_remembered = 0
        self.prefill_end = 0
        self.num_launched = 0
        self.num_sampled = 0
        self.num_cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_scored = 0
        if params.prompt_logprobs is not None and index == 0:
            self._prompt_logprobs = [None for _ in request.prompt_token_ids]
        self._text = detokenizer and detokenizer.stream(
            request.prompt_token_ids[-64:].tolist(), skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopMatcher(params.stop_strings, include_stop=params.include_stop_str_in_output)

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: by priority, then arrival."""
        return (self.request.priority, self.request.arrival, self.index)

    @property
    def held_slot(self) -> int:
        """The slot of a running sequence."""
        assert self.slot is not None
        return self.slot

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether prefill is done (or in flight) and another token is wanted."""
        return self.slot is not None and self.num_launched >= self.prefill_end and self.num_sampled < self.max_output

    @property
    def num_unprefilled(self) -> int:
        return self.prefill_end - self.num_launched

    @property
    def is_scoring(self) -> bool:
        """Whether prompt log-probabilities are still wanted: then every prompt token must be computed."""
        return self._prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Known tokens ``[start, stop)`` of prompt and output, int32."""
        prompt = self.request.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        output = np.asarray(self.output_ids[max(start - len(prompt), 0) : stop - len(prompt)], np.int32)
        return np.concatenate([prompt[start:], output])

    def hold(self, page_ids: list[int]) -> None:
        """Appends pages to those held."""
        first = len(self.page_ids)
        self.page_ids.extend(page_ids)
        self.page_table[first : len(self.page_ids)] = page_ids

    def let_go(self) -> list[int]:
        """Gives up all pages, returned last first, and everything computed in them."""
        page_ids, self.page_ids = self.page_ids[::-1], []
        self.page_table = np.zeros_like(self.page_table)
        self.num_launched = self.num_remembered = 0
        return page_ids

    def score(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Takes log-probabilities of the prompt tokens from position ``start`` on."""
        if self._prompt_logprobs is not None and self.is_scoring:
            self._prompt_logprobs[start : start + len(logprobs)] = logprobs
            self.num_scored = start + len(logprobs)

    def accept(self, token_id: int, logprobs: TokenLogprobs | None) -> OutputDelta:
        """Takes the next sampled token and says what goes out; sets finish_reason when the output ends here."""
        self.output_ids.append(token_id)
        text, matched = "", None
        if token_id in self.stop_ids:
            self.finish_reason, matched = FinishReason.STOP, token_id
        else:
            if self._text is not None:
                armed = len(self.output_ids) >= self.request.params.min_tokens
                text, matched = self._stops.push(self._text.push(token_id), armed=armed)
            if matched is not None:
                self.finish_reason = FinishReason.STOP
            elif len(self.output_ids) >= self.max_output:
                self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None and not isinstance(matched, str):
            text, matched = self._flush(text, matched)
        return self.delta(token_ids=(token_id,), text=text, logprobs=logprobs and (logprobs,), matched_stop=matched)

    def end(self, reason: FinishReason, error: str | None = None) -> OutputDelta:
        """Ends the output without another token."""
        self.finish_reason = reason
        text, _ = self._flush("", None)
        return self.delta(text=text, error=error)

    def delta(self, **fields) -> OutputDelta:
        """An OutputDelta with this sequence's counts; prompt log-probabilities ride on the first one."""
        prompt_logprobs = None
        if self._prompt_logprobs is not None and not self.is_scoring:
            prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), None
        return OutputDelta(
            request_id=self.request.request_id,
            index=self.index,
            prompt_logprobs=prompt_logprobs,
            finish_reason=self.finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=len(self.output_ids),
            num_cached_tokens=self.num_cached_tokens or 0,
            **fields,
        )

    def _flush(self, text: str, matched: int | str | None) -> tuple[str, int | str | None]:
        """What the text stream still holds, through the stop matcher: the tail may complete a stop string."""
        if self._text is None:
            return text, matched
        armed = len(self.output_ids) >= self.request.params.min_tokens
        tail, found = self._stops.push(self._text.flush(), armed=armed)
        if found is not None:
            return text + tail, found if matched is None else matched
        return text + tail + self._stops.flush(), matched
