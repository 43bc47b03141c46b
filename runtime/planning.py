"""From a model's config and the engine's settings to a plan on disk; no weights are needed, nor the chip."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from absl import logging

from precast.kernels_pallas.native import library as native_library
from precast.kernels_pallas.targets import Target
from precast.models import cache as kv_cache
from precast.models import layout
from precast.models.config import ModelConfig
from precast.models.placement import Placement
from precast.runtime import compiling, files, manifest, plan
from precast.runtime.config import ConfigError, EngineConfig, Shapes, derive_shapes
from precast.runtime.machine import Machine, host_memory, processor
from precast.runtime.memory import MemoryPlan
from precast.runtime.programs import ADMIT, Program, backbone_name, enumerate_programs, head_name, score_name
from precast.sharding.mesh import MeshSpec

_DEFAULT_KV_CACHE_MEMORY = 1 << 29
_LIBRARIES = pathlib.Path("~/.cache/precast/libraries")


@dataclasses.dataclass(frozen=True)
class Deployment:
    """One model with one set of settings on one machine, not compiled yet.

    Attributes:
      settings: as resolved; what is still open is settled by the memory.
      own: the machine is this process's, so that what is compiled runs here.
      library: of ``kernels_pallas.native``, on CPU; None for XLA's own operations.
    """

    model: ModelConfig
    settings: EngineConfig
    machine: Machine
    xla_flags: str
    own: bool
    library: bytes | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a mesh that the model or the machine does not have."""
        try:
            self.placement.check(self.model)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self.placement.mesh.num_devices > self.machine.num_devices:
            raise ConfigError(
                f"mesh is {self.settings.mesh!r}: it takes {self.placement.mesh.num_devices} devices, {self.machine} "
                f"has {self.machine.num_devices}"
            )

    @property
    def placement(self) -> Placement:
        mesh, kernels = MeshSpec.parse(self.settings.mesh), self.settings.kernels
        return place(self.machine, mesh, kernels, is_native=self.library is not None)

    def facts(self) -> dict[str, Any]:
        """What a plan of it must say."""
        settings = manifest.settings_of(self.settings)
        return manifest.facts(self.model, settings, self.machine, self.xla_flags, self.library)

    def cache_spec(self, num_pages: int) -> kv_cache.CacheSpec:
        dtype, page_size = self.settings.dtype, self.settings.page_size
        return kv_cache.CacheSpec.of(
            self.model, num_pages=num_pages, page_size=page_size, dtype=dtype, placement=self.placement
        )


def place(machine: Machine, mesh: MeshSpec, kernels: str, *, is_native: bool) -> Placement:
    """Where the model runs, with which kernels."""
    return Placement(Target("reference") if kernels == "reference" else machine.target, mesh, is_native)


def resolve(model: ModelConfig, config: EngineConfig, machine: Machine, *, own: bool, xla_flags: str) -> Deployment:
    """Settles dtype and length, and on CPU the memory for pages.

    Raises ConfigError for what cannot be.
    """
    dtype = config.dtype
    if dtype == "auto":
        dtype = model.dtype if model.dtype in ("float32", "bfloat16") else "bfloat16"
    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {longest}: the model is made for at most {model.max_position_embeddings} positions"
        )
    memory = config.kv_cache_memory
    if memory is None and machine.is_host:
        memory = min(_DEFAULT_KV_CACHE_MEMORY, host_memory() // 4)
    config = dataclasses.replace(config, dtype=dtype, max_model_len=longest, kv_cache_memory=memory)
    library = own_library() if machine.is_host and config.kernels == "auto" else None
    deployment = Deployment(model, config, machine, xla_flags, own, library)
    if memory is not None:
        config = _fitted(deployment, memory // deployment.cache_spec(0).page_bytes)
    return dataclasses.replace(deployment, settings=config)


def own_library() -> bytes | None:
    """The library of this host's kernels, known to XLA from here on; None where it cannot be had."""
    content = native_library.registered() or native_library.build(_LIBRARIES.expanduser(), json.dumps(processor()))
    try:
        if content is not None:
            native_library.register(content)
        return content
    except native_library.LibraryError as error:
        logging.warning("%s; XLA's own operations serve", error)
        return None


def make(path: pathlib.Path, deployment: Deployment, *, progress: bool) -> MemoryPlan:
    """Compiles a deployment's programs and writes its plan in place of what was there.

    Raises ConfigError where it does not fit the machine.
    """
    settings = deployment.settings
    if settings.kv_cache_memory is None:
        settings = _settled_by_memory(deployment, progress)
    shapes = _shapes(deployment, settings)
    programs, weights = _programs(deployment, settings, shapes)
    with files.replacing_folder(path) as folder:
        entries = compiling.compile_programs(programs, folder, deployment.machine.target, progress=progress)
        memory = _memory(deployment, programs, entries, weights, shapes.num_pages)
        memory.check(manifest.settings_of(settings))
        about = {"facts": deployment.facts(), "shapes": dataclasses.asdict(shapes)}
        about |= {"memory": dataclasses.asdict(memory), "programs": entries}
        if deployment.library is not None:
            (folder / native_library.FILE).write_bytes(deployment.library)
        manifest.seal(folder, about)
        if deployment.own:
            plan.record_loads(folder, manifest.read(folder).sha256)
    return memory


def shapes_of(sealed: manifest.Sealed) -> Shapes:
    """What a plan's programs are compiled for."""
    listed = sealed.manifest["shapes"]
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in listed.items()
    }
    return Shapes(**fields)


def settings_of(sealed: manifest.Sealed) -> dict[str, Any]:
    """A plan's settings as an engine has them, by the names of ``EngineConfig``'s fields."""
    settings, memory = sealed.manifest["facts"]["settings"], sealed.manifest["memory"]
    return settings | {
        "mesh": mesh_text(MeshSpec(**settings["mesh"])),
        "max_model_len": shapes_of(sealed).max_model_len,
        "kv_cache_memory": settings["kv_cache_memory"] or memory["page_bytes"] * memory["num_pages"],
    }


def mesh_text(spec: MeshSpec) -> str:
    """A mesh as ``MeshSpec.parse`` reads it, in one way of writing; empty for one device."""
    return ",".join(f"{axis}={degree}" for axis, degree in spec.degrees().items() if degree > 1)


def _programs(deployment: Deployment, config: EngineConfig, shapes: Shapes) -> tuple[list[Program], Any]:
    """The programs, and all the weights that they take as shapes."""
    placement = deployment.placement
    try:
        mesh = deployment.machine.mesh(placement.mesh, described=not deployment.own)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    weights = layout.shapes(
        deployment.model, dtype=config.dtype, num_positions=shapes.max_model_len, placement=placement, mesh=mesh
    )
    spec = deployment.cache_spec(shapes.num_pages)
    return enumerate_programs(deployment.model, shapes, weights, spec, mesh), weights


def _shapes(deployment: Deployment, config: EngineConfig) -> Shapes:
    """With as many pages as the memory holds and the slots can use, and the scratch page."""
    assert config.max_model_len is not None and config.kv_cache_memory is not None
    useful = -(-config.max_model_len // config.page_size) * config.slots
    num_pages = min(config.kv_cache_memory // deployment.cache_spec(0).page_bytes, useful) + 1
    whole_pages = not deployment.placement.is_cpu
    return derive_shapes(config, max_model_len=config.max_model_len, num_pages=num_pages, whole_pages=whole_pages)


def _fitted(deployment: Deployment, num_pages: int) -> EngineConfig:
    """The settings with max_model_len no more than the pages hold."""
    config, memory = deployment.settings, deployment.settings.kv_cache_memory
    assert config.max_model_len is not None
    if num_pages < 1:
        raise ConfigError(
            f"kv_cache_memory is {memory} bytes: one page of {config.page_size} tokens takes "
            f"{deployment.cache_spec(0).page_bytes}; raise kv_cache_memory or lower page_size"
        )
    longest = min(config.max_model_len, num_pages * config.page_size)
    if longest < config.max_model_len:
        logging.warning(
            "max_model_len is lowered from %d to %d, what %d bytes of KV pages hold; raise kv_cache_memory for more",
            *(config.max_model_len, longest, memory),
        )
    if longest < 2:
        raise ConfigError(f"max_model_len is {longest}: it must be at least 2; raise kv_cache_memory")
    return dataclasses.replace(config, max_model_len=longest)


def _settled_by_memory(deployment: Deployment, progress: bool) -> EngineConfig:
    """The settings with the memory for pages that the largest programs leave.

    They are compiled with hardly a page: temporaries do not depend on how many there are.
    """
    config = deployment.settings
    page_bytes = deployment.cache_spec(0).page_bytes
    shapes = _shapes(deployment, dataclasses.replace(config, kv_cache_memory=page_bytes))
    programs, weights = _programs(deployment, config, shapes)
    _memory(deployment, programs, {}, weights, shapes.num_pages).check(manifest.settings_of(config))
    names = {
        backbone_name(shapes.decode_rows[-1], shapes.mixed_tokens[-1]),
        backbone_name(0, shapes.prefill_tokens[-1]),
        head_name(shapes.decode_rows[-1]),
        score_name(max(shapes.prefill_tokens[-1], shapes.mixed_tokens[-1])),
    }
    with tempfile.TemporaryDirectory() as folder:
        largest = [program for program in programs if program.name in names]
        entries = compiling.compile_programs(
            largest, pathlib.Path(folder), deployment.machine.target, progress=progress
        )
    memory = _memory(deployment, programs, entries, weights, shapes.num_pages)
    memory.check(manifest.settings_of(config))
    config = dataclasses.replace(config, kv_cache_memory=(memory.most_pages - 1) * page_bytes)
    return _fitted(dataclasses.replace(deployment, settings=config), memory.most_pages - 1)


def _memory(
    deployment: Deployment, programs: list[Program], entries: Mapping[str, Any], weights: Any, num_pages: int
) -> MemoryPlan:
    (admit,) = (program for program in programs if program.name == ADMIT)
    page_bytes = deployment.cache_spec(0).page_bytes
    return MemoryPlan.of(
        deployment.machine, programs, entries, weights=weights, state=admit.arguments[0], page_bytes=page_bytes,
        num_pages=num_pages,
    )  # fmt: skip
