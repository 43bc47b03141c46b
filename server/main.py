"""``runtime-serve``: flags, checks in the order of their cost, then load and serve.

This is the only place that reads the environment.  JAX and gRPC are imported once the flags have
been looked at, so that ``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags, logging

from precast.models.errors import CheckpointError
from precast.runtime.config import ConfigError
from precast.server import command, demo, engine_flags, environment
from precast.server.address import Address, StartError

_COMMAND = "runtime-serve"
_SUMMARY = """
Usage: runtime-serve [--model=MODEL] [flags]

Serves a language model over gRPC (vllm.grpc.engine.VllmEngine, grpc.health.v1, reflection), with
/health and /metrics over HTTP.  Every program is compiled, or loaded from an earlier start, before
the line "ready" is printed.  SIGTERM or Ctrl-C drains: running requests finish, new ones are
refused; a second one ends at once.
"""
_FLAGS = flags.FlagValues()
_MODEL = flags.DEFINE_string(
    "model",
    "demo",
    "A Hugging Face directory, a GGUF file, a directory of runtime-convert, a hub id (owner/name), or "
    "'demo' for SmolLM2-135M-Instruct, which is downloaded once.",
    flag_values=_FLAGS,
)
_SERVED_NAME = flags.DEFINE_string(
    "served_model_name", None, "The model's name for clients; its file's or hub name unless given.", flag_values=_FLAGS
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 for all.", flag_values=_FLAGS)
_PORT = flags.DEFINE_integer("port", 50051, "gRPC port; 0 takes a free one.", 0, 65535, flag_values=_FLAGS)
_METRICS_PORT = flags.DEFINE_integer(
    "metrics_port", 8081, "HTTP port of /health and /metrics; 0 takes a free one.", 0, 65535, flag_values=_FLAGS
)
engine_flags.define(_FLAGS)
_PLAN = flags.DEFINE_string(
    "plan", None, "Folder that runtime-compile wrote; settings come from it and need not be given.", flag_values=_FLAGS
)
_PLAN_SHA256 = flags.DEFINE_string(
    "plan_sha256", None, "SHA-256 that the manifest of --plan must have; nothing else is believed.", flag_values=_FLAGS
)
_PLAN_DIR = flags.DEFINE_string(
    "plan_dir", None, "Folder for plans that are compiled here; beside the model unless given.", flag_values=_FLAGS
)
_DRAIN_TIMEOUT = flags.DEFINE_float(
    "drain_timeout", 60.0, "Seconds that requests get to finish after SIGTERM or Ctrl-C.", 0.0, flag_values=_FLAGS
)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command and exits; ``argv`` without the program's name, None for the process's own."""
    started = time.monotonic()
    unexpected = command.parse(_COMMAND, _SUMMARY, _FLAGS, argv)
    if unexpected:
        command.fail(_COMMAND, f"unexpected argument {unexpected[0]!r}: the model is given as --model", status=2)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_while_loading)
    environment.prepare_serving()
    try:
        address = Address(_HOST.value, _PORT.value, _METRICS_PORT.value)
        address.check()
        settings = engine_flags.given(_FLAGS)
        settings |= {"plan": _PLAN.value, "plan_sha256": _PLAN_SHA256.value, "plan_dir": _PLAN_DIR.value}
        status = _load_and_serve(address, settings, started)
    except (StartError, ConfigError, CheckpointError, demo.DemoError) as error:
        command.fail(_COMMAND, str(error))
    sys.exit(status)


def _load_and_serve(address: Address, settings: dict[str, Any], started: float) -> int:
    # Imported here, after the checks that need no more than the standard library.
    from precast.models.checkpoint import open_checkpoint
    from precast.runtime.engine_thread import EngineThread
    from precast.runtime.loading import configure, load_engine
    from precast.server import serving
    from precast.server.bundle import TokenizerBundle
    from precast.server.service import ModelInfo
    from precast.server.text import TextEncoder

    is_demo = _MODEL.value == "demo"
    checkpoint = open_checkpoint(str(demo.fetch(environment.cache_dir())) if is_demo else _MODEL.value)
    text = None if checkpoint.text is None else TextEncoder(TokenizerBundle.of(checkpoint.text))
    tokenizer = None if text is None else text.tokenizer
    if tokenizer is not None and tokenizer.get_vocab_size() > checkpoint.config.vocab_size:
        logging.warning(
            "the tokenizer has %d tokens and the model %d: is it another model's? Text that needs the rest is refused",
            *(tokenizer.get_vocab_size(), checkpoint.config.vocab_size),
        )
    engine = EngineThread(
        load_engine(
            checkpoint, configure(settings), tokenizer=tokenizer, progress=True, xla_flags=environment.xla_flags()
        )
    )
    engine.start()
    name = _SERVED_NAME.value or (demo.SERVED_NAME if is_demo else checkpoint.name)
    model = ModelInfo.of(checkpoint, name, engine.config.dtype)

    def on_ready(bound: Address) -> None:
        print(
            f"ready: {name} on grpc://{bound.host}:{bound.port}, metrics on "
            f"http://{bound.host}:{bound.metrics_port}/metrics; {engine.config.slots} slots, up to "
            f"{engine.config.max_model_len} tokens, {engine.config.dtype}; {time.monotonic() - started:.1f} s to start",
            flush=True,
        )

    status = asyncio.run(
        serving.serve(engine, model, text, address, drain_timeout=_DRAIN_TIMEOUT.value, on_ready=on_ready)
    )
    if engine.failure is not None:
        print(f"{_COMMAND}: the engine has failed: {engine.failure}", file=sys.stderr)
    return status


def _stop_while_loading(number: int, frame: Any) -> None:
    """Nothing is being served yet, and compiler threads would hold an orderly exit up."""
    print(f"{_COMMAND}: stopped before it was ready", file=sys.stderr, flush=True)
    os._exit(0)
