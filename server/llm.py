"""Offline batches: ``LLM(model=…).generate(prompts, params)``, in the shape that users know from vLLM."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from precast.models.checkpoint import open_checkpoint
from precast.runtime.loading import configure, load_engine
from precast.runtime.request import OutputDelta, RequestError, SamplingParams, TokenLogprobs, shown
from precast.server import demo, environment
from precast.server.bundle import TokenizerBundle
from precast.server.text import TextEncoder

Prompt = str | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
TokenAlternatives = dict[int, "Logprob"]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """A token's log-probability (natural log, raw distribution); rank counts from 1, None beyond those reported."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclasses.dataclass
class CompletionOutput:
    """One output sequence; stop_reason is the stop string or id that ended it, or what went wrong if "error" did."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenAlternatives] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass
class RequestOutput:
    """A request's results; prompt is None where token ids were given.  prompt_logprobs starts with None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenAlternatives | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False


class LLM:
    """A model, loaded and compiled, that answers batches in this thread.

    Args:
      model: a Hugging Face directory, a GGUF file, a directory that ``runtime-convert`` wrote, a hub id, or "demo".
      progress: show bars while loading, compiling and generating.
      settings: fields of ``EngineConfig``: dtype, slots, max_model_len, page_size, token_budget, kv_cache_memory, …

    Raises:
      CheckpointError, ConfigError: one line that says what does not fit.
    """

    def __init__(self, model: str, *, progress: bool = True, **settings: Any) -> None:
        path = str(demo.fetch(environment.cache_dir())) if model == "demo" else model
        checkpoint = open_checkpoint(path)
        self._progress = progress
        self._text = TextEncoder(TokenizerBundle.of(checkpoint.text)) if checkpoint.text else None
        self._engine = load_engine(
            checkpoint,
            configure(settings),
            tokenizer=self._text.tokenizer if self._text else None,
            progress=progress,
            xla_flags=environment.xla_flags(),
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
          prompts: one or several; a string, or ``{"prompt_token_ids": [...]}`` (integers, NumPy's too), or
            ``{"prompt": "..."}``.
          sampling_params: one for all, or one a prompt; None takes the defaults.

        Returns:
          One result a prompt, in order.

        Raises:
          RequestError: a prompt or an option is of a wrong type or out of its limits; nothing has run then.
        """
        several = [prompts] if isinstance(prompts, str | Mapping) else prompts
        if not isinstance(several, Iterable):
            raise RequestError(f"prompts is {shown(prompts)}: it must be a prompt or a list of prompts")
        return self._run([self._encode(prompt) for prompt in several], sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several; template_options go to the chat template (tools, documents, …)."""
        text = self._require_text()
        is_several = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
        several: Any = messages if is_several else [messages]
        template_options = {"add_generation_prompt": True, **template_options}
        encoded = []
        for conversation in several:
            rendered = text.render_chat(conversation, **template_options)
            text.check_length(rendered, self._engine.shapes.max_model_len)
            encoded.append((rendered, text.encode_chat(conversation, **template_options)))
        return self._run(encoded, sampling_params)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        fields = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
        if isinstance(token_ids, Sequence | np.ndarray) and not isinstance(token_ids, str):
            return text, [one.item() if isinstance(one, np.integer) else one for one in token_ids]
        if token_ids is not None or not isinstance(text, str):
            raise RequestError(
                f"prompt is {shown(prompt)}: it must be a string, "
                '{"prompt": a string} or {"prompt_token_ids": a list of integers}'
            )
        return text, self._require_text().encode_prompt(text, self._engine.shapes.max_model_len)

    def _require_text(self) -> TextEncoder:
        if self._text is None:
            raise ValueError("this checkpoint has no tokenizer: give prompts as prompt_token_ids")
        return self._text

    def _run(
        self,
        encoded: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(encoded)
        else:
            each = params
        if not isinstance(each, Sequence) or not all(isinstance(one, SamplingParams) for one in each):
            raise RequestError(f"sampling_params is {shown(params)}: it must be SamplingParams, or a list of them")
        if len(each) != len(encoded):
            raise RequestError(f"sampling_params has {len(each)} entries: there are {len(encoded)} prompts")
        requests, results = [], []
        for (prompt, token_ids), one in zip(encoded, each, strict=True):
            result = RequestOutput(str(next(self._ids)), prompt, token_ids, [])
            requests.append(
                self._engine.prepare(result.request_id, token_ids, one, lambda delta, r=result: self._take(r, delta))
            )
            result.outputs.extend(CompletionOutput(index) for index in range(one.n))
            results.append(result)
        for request in requests:
            self._engine.add(request)
        total = sum(len(result.outputs) for result in results)
        try:
            with tqdm(total=total, desc="generating", unit="output", disable=not self._progress) as bar:
                while self._engine.has_work:
                    self._engine.step()
                    bar.update(sum(o.finish_reason is not None for r in results for o in r.outputs) - bar.n)
        except BaseException:
            # An interrupted batch leaves nothing behind for the next one.
            for request in requests:
                self._engine.abort(request.request_id)
            raise
        return results

    def _take(self, result: RequestOutput, delta: OutputDelta) -> None:
        output = result.outputs[delta.index]
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            output.logprobs = (output.logprobs or []) + [self._alternatives(one) for one in delta.logprobs]
        if delta.prompt_logprobs is not None:
            result.prompt_logprobs = [one and self._alternatives(one) for one in delta.prompt_logprobs]
        if delta.index == 0:
            result.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is not None:
            output.finish_reason = delta.finish_reason.value
            output.stop_reason = delta.error or delta.matched_stop
            result.finished = all(one.finish_reason is not None for one in result.outputs)

    def _alternatives(self, found: TokenLogprobs) -> TokenAlternatives:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(found.top, 1)}
        values = {found.token_id: found.logprob, **dict(found.top)}
        return {
            token_id: Logprob(value, ranks.get(token_id), self._decode(token_id)) for token_id, value in values.items()
        }

    def _decode(self, token_id: int) -> str:
        return self._text.tokenizer.decode([token_id], skip_special_tokens=False) if self._text else ""
