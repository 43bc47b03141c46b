"""``runtime-compile``: a plan for a machine that need not be here, from a model's config alone."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import time
from collections.abc import Sequence

from absl import flags

from precast.models.errors import CheckpointError
from precast.runtime.config import ConfigError, EngineConfig
from precast.server import command, demo, engine_flags, environment

_COMMAND = "runtime-compile"
_SUMMARY = """
Usage: runtime-compile --model=MODEL --target=TARGET --out=DIRECTORY [flags]

Compiles all programs of a deployment on this host, which needs no accelerator, proves that they fit
the target's memory, and writes the plan that runtime-serve --plan=DIRECTORY starts from.  The exit
status is 0 only if every program compiled and fits.
"""
_FLAGS = flags.FlagValues()
_MODEL = flags.DEFINE_string(
    "model", "demo", "As for runtime-serve, or a directory with only a config.json: weights are not needed.",
    flag_values=_FLAGS,
)  # fmt: skip
_TARGET = flags.DEFINE_string(
    "target", "cpu", "Machine: cpu, cpu:8, tpu:v6e:2x4 (chips along each axis of the slice), cuda:h100, cuda:h200x8.",
    flag_values=_FLAGS,
)  # fmt: skip
_OUT = flags.DEFINE_string("out", None, "Folder for the plan; a plan that is there is replaced.", flag_values=_FLAGS)
engine_flags.define(_FLAGS)


def run(argv: Sequence[str] | None = None) -> None:
    """Console entry point; ends the program with one line when the plan cannot be made."""
    unexpected = command.parse(_COMMAND, _SUMMARY, _FLAGS, argv)
    if unexpected:
        command.fail(_COMMAND, f"unexpected argument {unexpected[0]!r} (--help lists the flags)", status=2)
    if _OUT.value is None:
        command.fail(_COMMAND, "--out is missing: the folder for the plan", status=2)
    environment.prepare_compiling()
    try:
        _compile(pathlib.Path(_OUT.value), EngineConfig(**engine_flags.given(_FLAGS)))
    except (ConfigError, CheckpointError, demo.DemoError) as error:
        command.fail(_COMMAND, str(error))
    except OSError as error:
        command.fail(_COMMAND, f"{_OUT.value} cannot be written: {error.strerror or error}")


def _compile(out: pathlib.Path, config: EngineConfig) -> None:
    # Imported here: JAX reads the environment when it is loaded.
    from precast.runtime import manifest, planning
    from precast.runtime.machine import Machine
    from precast.server import plan_report

    if out.exists() and not (out / manifest.MANIFEST).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out is {out}: something that is not a plan is there; name another folder")
    began = time.monotonic()
    try:
        machine = Machine.parse(_TARGET.value)
        own = machine.is_host
        deployment = planning.resolve(_read_model(), config, machine, own=own, xla_flags=environment.xla_flags())
        planning.make(out, deployment, progress=True)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    sealed = manifest.read(out)
    print(plan_report.programs_table(sealed))
    print(plan_report.memory_table(sealed))
    # Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    size = sum(len(content) for content in sealed.contents.values())
    print(f"{out}: {len(sealed.manifest['programs'])} programs, {size / 1e6:.0f} MB, for {machine} in "
          f"{time.monotonic() - began:.0f} s; at most {peak:.1f} GiB of this host's memory")  # fmt: skip
    print(f"manifest sha256 {sealed.sha256}")


def _read_model():
    """The traits of a checkpoint, or of a config.json alone."""
    from precast.models.checkpoint import open_checkpoint
    from precast.models.families import read_config

    path = pathlib.Path(_MODEL.value)
    config = path / "config.json"
    if path.is_dir() and config.is_file() and not any(path.glob("*.safetensors*")):
        try:
            raw = json.loads(config.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{config} cannot be read: {error}") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{config} holds a {type(raw).__name__} where a JSON object is needed")
        model = read_config(raw, str(config))[1]
        # What the weights' files would say.
        text = raw.get("text_config", raw)
        dtype = text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype")
        return model if dtype is None else dataclasses.replace(model, dtype=dtype)
    is_demo = _MODEL.value == "demo"
    return open_checkpoint(str(demo.fetch(environment.cache_dir())) if is_demo else _MODEL.value).config
