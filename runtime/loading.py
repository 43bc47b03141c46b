"""From a checkpoint and a configuration to an engine that is ready to serve."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh
from tokenizers import Tokenizer
from tqdm import tqdm

from precast.kernels_pallas.native import library as native_library
from precast.models import layout, transformer
from precast.models.checkpoint import Checkpoint
from precast.models.config import ModelConfig
from precast.models.placement import Placement
from precast.runtime import files, manifest, planning, weight_cache
from precast.runtime import plan as plans
from precast.runtime.config import ConfigError, EngineConfig, Shapes
from precast.runtime.detokenize import Detokenizer
from precast.runtime.engine import Engine
from precast.runtime.machine import Machine
from precast.runtime.programs import MAX_BANNED_IDS, needed_first
from precast.runtime.request import MAX_STOP_TOKEN_IDS
from precast.sharding.mesh import MeshSpec

_SHOWN = 4


def load_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    tokenizer: Tokenizer | None,
    progress: bool = False,
    xla_flags: str = "",
) -> Engine:
    """Loads a plan's programs and the weights; a plan that nobody gave is compiled first, and kept.

    Args:
      checkpoint: the model.
      config: as asked for.
      tokenizer: for text and stop strings; None serves token ids only.
      progress: show bars while loading and compiling.
      xla_flags: XLA_FLAGS of the process, part of what an executable depends on.

    Raises:
      ConfigError: a setting does not fit the model or the memory.
      CheckpointError: the weights cannot be read.
    """
    model = checkpoint.config
    eos_token_ids = checkpoint.text.eos_token_ids if checkpoint.text else ()
    if len(eos_token_ids) + MAX_STOP_TOKEN_IDS > MAX_BANNED_IDS:
        raise ConfigError(
            f"the model has {len(eos_token_ids)} end tokens: the limit is {MAX_BANNED_IDS - MAX_STOP_TOKEN_IDS}"
        )
    root = pathlib.Path(config.plan_dir or default_plan_dir(checkpoint.path))
    checkpoint.check()
    with contextlib.ExitStack() as until_loaded:
        if config.plan:
            sealed = _given_plan(model, config, xla_flags)
        else:
            sealed = _kept_plan(root, model, config, xla_flags, progress, until_loaded)
        shapes, machine, spec = planning.shapes_of(sealed), manifest.machine_of(sealed), manifest.mesh_of(sealed)
        mesh: Mesh | None = None

        def take_devices() -> Mesh | None:
            nonlocal mesh
            try:
                mesh = machine.mesh(spec)
            except ValueError as error:
                raise manifest.PlanError(f"plan {sealed.path}: {error}") from None
            return mesh

        plan = plans.load(
            sealed,
            first=needed_first(shapes),
            mesh=take_devices,
            pinned=config.plan_sha256 is not None,
            progress=progress,
        )
    config = dataclasses.replace(config, **planning.settings_of(sealed))
    placement = planning.place(machine, spec, config.kernels, is_native=native_library.FILE in sealed.contents)
    weights = _load_weights(checkpoint, root, config.dtype, shapes, placement, mesh, progress)
    logging.info("plan %s, manifest %s", sealed.path, sealed.sha256)
    return Engine(
        model=model,
        config=config,
        shapes=shapes,
        plan=plan,
        weights=weights,
        eos_token_ids=eos_token_ids,
        detokenizer=Detokenizer(tokenizer) if tokenizer is not None else None,
    )


def configure(given: Mapping[str, Any]) -> EngineConfig:
    """The configuration with these fields, the rest taken from the plan where one is given.

    Raises ConfigError for a field that is not the plan's.
    """
    config = EngineConfig(**given)
    if config.plan is None:
        return config
    planned = planning.settings_of(manifest.read(config.plan, pinned=config.plan_sha256))
    asked = {name: value for name, value in given.items() if name in planned and value not in (None, "auto", "")}
    if "mesh" in asked:
        asked["mesh"] = planning.mesh_text(MeshSpec.parse(asked["mesh"]))
    if lines := manifest.differences({name: planned[name] for name in asked}, asked):
        raise manifest.PlanError(f"plan {config.plan}: {'; '.join(lines)}")
    return dataclasses.replace(config, **planned)


def _given_plan(model: ModelConfig, config: EngineConfig, xla_flags: str) -> manifest.Sealed:
    """Raises PlanError where the plan is of another model, of other versions or of another kind of host."""
    assert config.plan is not None
    sealed = manifest.read(config.plan, pinned=config.plan_sha256)
    planned = sealed.manifest["facts"]
    library = sealed.contents.get(native_library.FILE)
    here = manifest.facts(model, planned["settings"], manifest.machine_of(sealed), xla_flags, library)
    if lines := manifest.differences(planned, here):
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise manifest.PlanError(f"plan {sealed.path}: {'; '.join(lines[:_SHOWN])}{more}; compile it again")
    return sealed


def _kept_plan(
    root: pathlib.Path,
    model: ModelConfig,
    config: EngineConfig,
    xla_flags: str,
    progress: bool,
    until_loaded: contextlib.ExitStack,
) -> manifest.Sealed:
    """The plan of an earlier start; compiled, and kept where that is possible, if it is not there or is damaged.

    One that cannot be kept is in a folder that ``until_loaded`` removes.
    """
    try:
        machine = Machine.here(MeshSpec.parse(config.mesh).num_devices)
        deployment = planning.resolve(model, config, machine, own=True, xla_flags=xla_flags)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    facts = deployment.facts()
    folder = root / manifest.digest(facts)
    if folder.exists():
        try:
            sealed = manifest.read(folder)
            if sealed.manifest["facts"] == facts:
                return sealed
            logging.warning("plan %s is of another deployment and is written anew", folder)
        except manifest.PlanError as error:
            logging.warning("%s; it is made again", error)
    try:
        planning.make(folder, deployment, progress=progress)
        return manifest.read(folder)
    except OSError as error:
        logging.warning("plan %s cannot be kept for the next start: %s", folder, error)
    folder = pathlib.Path(until_loaded.enter_context(tempfile.TemporaryDirectory())) / "plan"
    planning.make(folder, deployment, progress=progress)
    return manifest.read(folder)


def default_plan_dir(path: str) -> pathlib.Path:
    """Beside the model where that can be written, else in the user's cache."""
    model = pathlib.Path(path)
    beside = model / ".precast" if model.is_dir() else model.with_name(model.name + ".precast")
    return beside if files.is_writable(beside) else pathlib.Path.home() / ".cache" / "precast" / "plans"


def _load_weights(
    checkpoint: Checkpoint,
    root: pathlib.Path,
    dtype: str,
    shapes: Shapes,
    placement: Placement,
    mesh: Mesh | None,
    progress: bool,
) -> transformer.Weights:
    """Maps the weights kept beside the plans, or lays them out from the checkpoint."""
    began = time.monotonic()
    keeps = mesh is None and checkpoint.path.endswith(".gguf")
    key: dict[str, Any] = {"weights": checkpoint.fingerprint, "dtype": dtype, "num_positions": shapes.max_model_len}
    key["is_native"] = placement.is_native
    folder = root / f"weights-{manifest.digest(key | {'source': manifest.source_digest()})}"
    weights = weight_cache.load(folder, checkpoint.fingerprint) if keeps else None
    if weights is None:
        with tqdm(total=checkpoint.config.num_layers, desc="loading", unit="layer", disable=not progress) as bar:
            weights = layout.build(
                checkpoint.config, checkpoint.read, dtype=dtype, num_positions=shapes.max_model_len,
                placement=placement, mesh=mesh, on_layer=bar.update,
            )  # fmt: skip
        if keeps:
            weight_cache.store(folder, checkpoint.fingerprint, weights)
    jax.block_until_ready(weights)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    logging.info("%.0f MB of weights loaded in %.1f s", size / 1e6, time.monotonic() - began)
    return weights
