"""Between the wire's messages (``vllm.grpc.engine``) and the runtime's: pure functions.

Proto3 cannot tell an unset number from 0, so 0 means "not given" for ``top_p``,
``repetition_penalty`` and ``n``; for the other fields 0 is their neutral value anyway.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from precast.runtime.request import OutputDelta, RequestError, SamplingParams, TokenLogprobs, shown

TENANT_KEY = "precast-tenant"
PRIORITY_KEY = "precast-priority"
CACHE_SALT_KEY = "precast-cache-salt"
MAX_METADATA_CHARS = 128
PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1

_UNSUPPORTED_REQUEST_FIELDS = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
    "data_parallel_rank",
)
_STRUCTURED_OUTPUT_FIELDS = ("json_schema", "regex", "grammar", "structural_tag", "json_object", "choice")
_LEAVE_UNSET = "leave it unset"
_NO_STRUCTURE = "ask without structured output, response_format and a required tool_choice among it"


def sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    """The request's options, not validated yet.

    Raises RequestError naming the first field that this server does not support.
    """
    params = request.sampling_params
    _refuse(request, _UNSUPPORTED_REQUEST_FIELDS, _LEAVE_UNSET)
    _refuse(params, ("truncate_prompt_tokens",), _LEAVE_UNSET)
    _refuse(params, _STRUCTURED_OUTPUT_FIELDS, _NO_STRUCTURE)
    return SamplingParams(
        n=params.n or 1,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias) or None,
        seed=params.seed if params.HasField("seed") else None,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop=list(params.stop) or None,
        stop_token_ids=list(params.stop_token_ids) or None,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


@dataclasses.dataclass(frozen=True)
class RequestMetadata:
    """What a request says beside the contract's fields, in gRPC metadata.

    Attributes:
      tenant: on whose behalf; "" for nobody in particular.
      priority: lower runs first.
      cache_salt: only requests of one salt share cached prefixes.
    """

    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str | bytes]]) -> RequestMetadata:
        """Raises RequestError for a key that is given twice or has a bad value; unknown keys are nobody's business."""
        found: dict[str, str | bytes] = {}
        for key, value in metadata:
            if key in (TENANT_KEY, PRIORITY_KEY, CACHE_SALT_KEY):
                if key in found:
                    raise RequestError(f"metadata {key} is given more than once: it must be given once")
                found[key] = value
        for key in (TENANT_KEY, CACHE_SALT_KEY):
            if not 0 < len(found.get(key, "-")) <= MAX_METADATA_CHARS:
                raise RequestError(
                    f"metadata {key} has {len(found[key])} characters: it must have from 1 to {MAX_METADATA_CHARS}"
                )
        priority = str(found.get(PRIORITY_KEY, "0"))
        if not re.fullmatch(r"-?[0-9]{1,10}", priority) or not PRIORITY_MIN <= int(priority) <= PRIORITY_MAX:
            raise RequestError(
                f"metadata {PRIORITY_KEY} is {shown(priority)}: "
                f"it must be an integer from {PRIORITY_MIN} to {PRIORITY_MAX}, where lower runs first"
            )
        return cls(str(found.get(TENANT_KEY, "")), int(priority), str(found.get(CACHE_SALT_KEY, "")))


def _refuse(message: Message, names: Iterable[str], way_out: str) -> None:
    given = {field.name for field, _ in message.ListFields()}
    for name in names:
        if name in given:
            raise RequestError(f"{name} is not supported by this server: {way_out}")


@dataclasses.dataclass
class OutputSequence:
    """What one of a request's ``n`` sequences has put out so far."""

    keep_logprobs: bool
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def add(self, delta: OutputDelta) -> None:
        self.token_ids += delta.token_ids
        if self.keep_logprobs:
            self.logprobs += delta.logprobs or ()
            self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs


def chunk(delta: OutputDelta, prompt_token_ids: Sequence[int]) -> pb.GenerateResponse:
    """One increment of a stream; completion_tokens is the increment's own number of tokens."""
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=delta.num_prompt_tokens,
            completion_tokens=len(delta.token_ids),
            cached_tokens=delta.num_cached_tokens,
            output_logprobs=_output_logprobs(delta.logprobs),
            input_logprobs=_input_logprobs(delta.prompt_logprobs, prompt_token_ids),
            index=delta.index,
        )
    )


def complete(delta: OutputDelta, sequence: OutputSequence, prompt_token_ids: Sequence[int]) -> pb.GenerateResponse:
    """The last message of a sequence, of which ``delta`` is the last increment.

    It holds all of the sequence's ids, and the log-probabilities that ``sequence`` has kept.
    """
    message = pb.GenerateComplete(
        output_ids=sequence.token_ids,
        finish_reason=str(delta.finish_reason),
        prompt_tokens=delta.num_prompt_tokens,
        completion_tokens=delta.num_output_tokens,
        cached_tokens=delta.num_cached_tokens,
        output_logprobs=_output_logprobs(sequence.logprobs),
        input_logprobs=_input_logprobs(sequence.prompt_logprobs, prompt_token_ids),
        index=delta.index,
    )
    if isinstance(delta.matched_stop, str):
        message.matched_stop_str = delta.matched_stop
    elif delta.matched_stop is not None:
        message.matched_token_id = delta.matched_stop
    return pb.GenerateResponse(complete=message)


def _output_logprobs(entries: Sequence[TokenLogprobs] | None) -> pb.OutputLogProbs | None:
    if not entries:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry) for entry in entries] if any(entry.top for entry in entries) else None,
    )


def _input_logprobs(
    entries: Sequence[TokenLogprobs | None] | None, prompt_token_ids: Sequence[int]
) -> pb.InputLogProbs | None:
    if not entries:
        return None
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=None if entry is None else entry.logprob) for entry in entries],
        token_ids=prompt_token_ids,
        top_logprobs=[_top(entry) for entry in entries] if any(entry and entry.top for entry in entries) else None,
    )


def _top(entry: TokenLogprobs | None) -> pb.TopLogProbs:
    top = () if entry is None else entry.top
    return pb.TopLogProbs(values=[value for _, value in top], token_ids=[token_id for token_id, _ in top])
