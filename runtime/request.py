"""What a caller asks for and what it gets back.

``SamplingParams`` carries the options of one request under the names that users know from vLLM;
``validate`` is the single place where a bad value is turned into an error that names the field,
the value and the limit.  ``OutputDelta`` is one increment of one output sequence.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 32
MAX_LOGIT_BIAS = 512
MAX_N = 64
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
_INTEGERS = (int, np.integer)


class RequestError(ValueError):
    """A request that is refused at the door: the message names field, value and limit."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Options of one request.  NumPy scalars and arrays become Python's.

    Attributes:
      n: output sequences; sequence i is sampled with ``seed + i``.
      temperature: 0 is greedy (lowest id on ties); at most 1e9.
      top_k: keep the k most likely tokens; 0, -1 and anything from the vocabulary size up are off.
      top_p: keep the smallest set of most likely tokens whose probability reaches top_p, (0, 1].
      min_p: drop tokens less likely than min_p times the likeliest, [0, 1].
      repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt
        or output (CTRL, arXiv:1909.05858), [0.001, 1000].
      presence_penalty, frequency_penalty: subtracted once, or once an occurrence, from the logits
        of tokens seen in the output, [-2, 2].
      logit_bias: token id -> bias added to its logit, [-100, 100].
      seed: None draws one from the operating system.
      max_tokens: None is the rest of the context; a value beyond that is capped to it.
        0 is legal only with prompt_logprobs (scoring).
      min_tokens: no end token, stop token or stop string ends the output before this many tokens.
      ignore_eos: drops the model's own end tokens and keeps the stop ids and strings given here.
      stop, stop_token_ids: end the output; the text is cut before a stop string unless
        include_stop_str_in_output.
      logprobs: alternatives reported a token (0 to MAX_LOGPROBS), None for no log-probabilities.
        They are of the model's own distribution, before any processor.
      prompt_logprobs: the same for the prompt's tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic | np.ndarray):
                object.__setattr__(self, field.name, value.tolist())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def validate(self, vocab_size: int) -> None:
        """Raises RequestError for the first field that is out of its range."""
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 1e9)
        _integer("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, SEED_MIN, SEED_MAX)
        self._validate_lengths()
        self._validate_stops(vocab_size)
        self._validate_logit_bias(vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _instance(name, getattr(self, name), bool, "True or False")

    def _validate_lengths(self) -> None:
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is None:
            return
        _integer("max_tokens", self.max_tokens, 0, None)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens is 0: it must be at least 1 unless prompt_logprobs is set")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {shown(self.min_tokens)}: it must be at most max_tokens, {shown(self.max_tokens)}"
            )

    def _validate_stops(self, vocab_size: int) -> None:
        _instance("stop", "" if self.stop is None else self.stop, str | list | tuple, "a string or a list of strings")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(stops)} strings: the limit is {MAX_STOP_STRINGS}")
        for text in stops:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop contains {shown(text)}: each must be a string that is not empty")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        _instance("stop_token_ids", ids, list | tuple, "a list of token ids")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids has {len(ids)} ids: the limit is {MAX_STOP_TOKEN_IDS}")
        for token_id in ids:
            check_token_id("stop_token_ids", token_id, vocab_size)

    def _validate_logit_bias(self, vocab_size: int) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        _instance("logit_bias", bias, Mapping, "a dictionary of token ids and numbers")
        if len(bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias has {len(bias)} entries: the limit is {MAX_LOGIT_BIAS}")
        for token_id, value in bias.items():
            check_token_id("logit_bias", token_id, vocab_size)
            _number(f"logit_bias[{token_id}]", value, -100.0, 100.0)


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural log, of the raw distribution) at one position.

    ``logprob`` belongs to the token at that position; ``top`` are (token id, log-probability)
    pairs of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class OutputDelta:
    """One increment of one output sequence, and the final word when finish_reason is set.

    token_ids and text are new since the last delta; the number counts are totals so far.
    ``index`` says which of the ``n`` sequences it belongs to.  prompt_logprobs comes once, with
    the first delta of index 0; its first entry is None (nothing predicts the first token).
    num_output_tokens counts the end token too.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


def check_token_id(field: str, token_id: Any, vocab_size: int) -> None:
    """Raises RequestError unless token_id is an integer in [0, vocab_size)."""
    if not _is_integer(token_id) or not 0 <= token_id < vocab_size:
        raise RequestError(f"{field} contains {shown(token_id)}: ids must be integers from 0 to {vocab_size - 1}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, _INTEGERS) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value for an error message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 64 else text[:61] + "..."


def _integer(field: str, value: Any, low: int, high: int | None) -> None:
    if not _is_integer(value) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{field} is {shown(value)}: it must be an integer {limit}")


def _instance(field: str, value: Any, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind):
        raise RequestError(f"{field} is {shown(value)}: it must be {wanted}")


def _number(field: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    good = isinstance(value, (*_INTEGERS, float, np.floating)) and not isinstance(value, bool)
    if not good or not low <= value <= high or (low_open and value == low):  # no comparison with NaN holds
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise RequestError(f"{field} is {shown(value)}: it must be a number in {interval}")
