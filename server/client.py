"""``runtime-client``: asks a running server and prints the answer as it comes."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence

import grpc
from absl import flags
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from precast.runtime.detokenize import Detokenizer
from precast.server import command
from precast.server.bundle import TokenizerBundle
from precast.server.chat_template import ChatError
from precast.server.text import TextEncoder

_COMMAND = "runtime-client"
_SUMMARY = """
Usage: runtime-client [flags] "What is the capital of France?"

Sends one user message to a running runtime-serve over gRPC and prints the answer as it is made.
The tokenizer and the chat template come from the server.
"""

_FLAGS = flags.FlagValues()
_SERVER = flags.DEFINE_string("server", "127.0.0.1:50051", "The server's host:port.", flag_values=_FLAGS)
_SYSTEM = flags.DEFINE_string("system", None, "A system message to go before.", flag_values=_FLAGS)
_RAW = flags.DEFINE_bool("raw", False, "Continue the text itself, without the chat template.", flag_values=_FLAGS)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 512, "Most tokens of the answer.", 1, 2**32 - 1, flag_values=_FLAGS)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token.", 0.0, flag_values=_FLAGS)
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the likeliest tokens up to this share.", 1e-9, 1.0, flag_values=_FLAGS)
_SEED = flags.DEFINE_integer(
    "seed", None, "Makes a sampled answer repeatable.", -(2**31), 2**31 - 1, flag_values=_FLAGS
)
_SAVE_TOKENIZER = flags.DEFINE_string(
    "save_tokenizer", None, "Write the server's tokenizer files into this folder instead of asking.", flag_values=_FLAGS
)
_TIMEOUT = flags.DEFINE_float("timeout", None, "Seconds until the request is given up.", 0.0, flag_values=_FLAGS)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command and exits; ``argv`` without the program's name, None for the process's own."""
    texts = command.parse(_COMMAND, _SUMMARY, _FLAGS, argv)
    if len(texts) != (0 if _SAVE_TOKENIZER.value else 1):
        command.fail(_COMMAND, f"{len(texts)} messages are given where one is asked for: use quotes", status=2)
    try:
        with grpc.insecure_channel(_SERVER.value, options=[("grpc.max_receive_message_length", -1)]) as channel:
            if _SAVE_TOKENIZER.value:
                _save_tokenizer(channel, _SAVE_TOKENIZER.value)
                return
            for text in answer(channel, texts[0]):
                print(text, end="", flush=True)
            print()
    except ChatError as error:
        command.fail(_COMMAND, str(error))
    except grpc.RpcError as error:
        command.fail(_COMMAND, f"{_SERVER.value} answers {error.code().name}: {error.details()}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever reads the answer has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def answer(channel: grpc.Channel, text: str) -> Iterator[str]:
    """Pieces of the answer to ``text``, by the flags.

    Raises ChatError when the model has no chat template, grpc.RpcError for the server's errors.
    """
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    encoder = TextEncoder(fetch_bundle(stub))
    prompt = encoder.encode_prompt(text) if _RAW.value else encoder.encode_chat(_messages(text))
    params = pb.SamplingParams(
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        max_tokens=_MAX_TOKENS.value,
        seed=_SEED.value,
        skip_special_tokens=True,
    )
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=params, stream=True
    )  # an empty request_id: the server makes one
    pieces = Detokenizer(encoder.tokenizer).stream(prompt, skip_special_tokens=True)
    for response in stub.Generate(request, timeout=_TIMEOUT.value):
        for token_id in response.chunk.token_ids:
            yield pieces.push(token_id)
    yield pieces.flush()


def fetch_bundle(stub: vllm_engine_pb2_grpc.VllmEngineStub) -> TokenizerBundle:
    """The server's tokenizer, checked against the digest that comes with it."""
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    if hashlib.sha256(data).hexdigest() != chunks[-1].sha256:
        raise ChatError("the tokenizer arrived damaged: try again")
    return TokenizerBundle.unzip(data)


def _save_tokenizer(channel: grpc.Channel, folder: str) -> None:
    bundle = fetch_bundle(vllm_engine_pb2_grpc.VllmEngineStub(channel))
    try:
        bundle.save(folder)
    except OSError as error:
        command.fail(_COMMAND, f"--save_tokenizer is {folder!r}: it cannot be written ({error.strerror})")


def _messages(text: str) -> list[dict[str, str]]:
    system = [] if _SYSTEM.value is None else [{"role": "system", "content": _SYSTEM.value}]
    return [*system, {"role": "user", "content": text}]
