"""A plan on disk, as far as it can be looked at without running anything of it.

``manifest.json`` says what the plan is for and what is in it, with the SHA-256 of each file; ``manifest.sha256`` has
the manifest's own.  ``read`` checks all of it, so that damage of any kind is found before anything is unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
from typing import Any

import jax

from precast.models.config import ModelConfig
from precast.runtime.config import ConfigError, EngineConfig
from precast.runtime.machine import Machine, accelerator_driver, processor
from precast.sharding.mesh import MeshSpec

FORMAT = 1
MANIFEST = "manifest.json"
_DIGEST = "manifest.sha256"
# Settings that programs are compiled for.
SETTINGS = ("slots", "max_model_len", "page_size", "token_budget", "kv_cache_memory", "dtype", "kernels", "mesh")
_PLUGINS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")}


class PlanError(ConfigError):
    """A plan that cannot be used: the message names the folder, what differs or is damaged, and the way out."""


@dataclasses.dataclass(frozen=True)
class Sealed:
    """A folder that was found whole: its manifest, the manifest's SHA-256 and each file's content by its path."""

    path: pathlib.Path
    manifest: dict[str, Any]
    sha256: str
    contents: dict[str, bytes]


def seal(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest of a folder whose files are all there."""
    files = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _sha256(file.read_bytes())}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    content = json.dumps({"format": FORMAT, **manifest, "files": files}, indent=1).encode()
    (folder / MANIFEST).write_bytes(content)
    (folder / _DIGEST).write_text(f"{_sha256(content)}  {MANIFEST}\n")


def read(path: str | os.PathLike[str], *, pinned: str | None = None) -> Sealed:
    """``read_sealed`` for a plan, whose manifest must also have all of a plan's parts."""
    sealed = read_sealed(path, pinned=pinned)
    try:
        settings, target = sealed.manifest["facts"]["settings"], sealed.manifest["facts"]["target"]
        parts = [settings[name] for name in SETTINGS] + [sealed.manifest[name] for name in ("shapes", "memory")]
        files = [file for name in sealed.manifest["programs"] for file in program_files(name)]
        assert len(parts) and Machine.parse(target) and MeshSpec(**settings["mesh"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"plan {sealed.path}: {MANIFEST} is not a plan's: {error!r}; compile it again") from None
    if missing := [file for file in files if file not in sealed.contents]:
        raise PlanError(f"plan {sealed.path}: {MANIFEST} lists no {missing[0]}; compile it again")
    return sealed


def program_files(name: str) -> tuple[str, str]:
    """Where a plan keeps a program's StableHLO and its executable."""
    return f"exported/{name}.bin", f"executables/{name}.bin"


def read_sealed(path: str | os.PathLike[str], *, pinned: str | None = None) -> Sealed:
    """Reads a folder that ``seal`` has closed and checks every byte of it; unpickles nothing.

    Args:
      path: the folder.
      pinned: the SHA-256 that the manifest must have, in hexadecimal.

    Raises:
      PlanError: it is not there, damaged, of another format, or not the one that is pinned.
    """
    folder = pathlib.Path(path)
    if pinned is not None and not re.fullmatch("[0-9a-fA-F]{64}", pinned):
        raise PlanError(f"plan {folder}: plan_sha256 is {pinned!r}: it must be 64 hexadecimal digits")
    content = _content(folder, MANIFEST)
    digest = _sha256(content)
    if pinned is not None and digest != pinned.lower():
        raise PlanError(f"plan {folder}: plan_sha256 is {pinned}: the digest of its {MANIFEST} is {digest}")
    recorded = _content(folder, _DIGEST)[: len(digest)].decode(errors="replace")
    if digest != recorded:
        raise PlanError(f"plan {folder}: {MANIFEST} is damaged: its digest is {digest}, {_DIGEST} says {recorded!r}")
    try:
        manifest = json.loads(content)
        found = manifest["format"]
        files = {file: entry["sha256"] for file, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"plan {folder}: {MANIFEST} is not a plan's: {error}") from error
    if found != FORMAT:
        raise PlanError(f"plan {folder}: format is {found!r}: this version reads {FORMAT}; compile it again")
    contents = {}
    for file, expected in files.items():
        contents[file] = _content(folder, file)
        if (found := _sha256(contents[file])) != expected:
            raise PlanError(f"plan {folder}: {file} is damaged: its digest is {found}, the manifest says {expected}")
    return Sealed(folder, manifest, digest, contents)


def facts(
    model: ModelConfig, settings: dict[str, Any], machine: Machine, xla_flags: str, library: bytes | None
) -> dict[str, Any]:
    """All that must be equal where a plan is compiled and where it is served, as JSON has it.

    Args:
      model: the model's traits.
      settings: the engine's, by the names in SETTINGS.
      machine: what the programs run on.
      xla_flags: XLA_FLAGS of the process.
      library: of ``kernels_pallas.native`` on CPU, or None.
    """
    traits = dataclasses.asdict(model)
    described = {
        "model_fingerprint": _sha256(json.dumps(traits, sort_keys=True).encode()),
        "model": traits,
        "settings": settings,
        "target": str(machine),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "plugins": _versions(_PLUGINS.get(machine.target.backend, ())),
        "xla_flags": xla_flags,
        "cpu": processor() if machine.is_host else None,
        "native_library": None if library is None else _sha256(library),
        "source": source_digest(),
    }
    return json.loads(json.dumps(described))


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """The settings that a plan depends on."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    return settings | {"mesh": MeshSpec.parse(config.mesh).degrees()}


def machine_of(sealed: Sealed) -> Machine:
    """What a plan is for."""
    return Machine.parse(sealed.manifest["facts"]["target"])


def mesh_of(sealed: Sealed) -> MeshSpec:
    """How a plan divides the model."""
    return MeshSpec(**sealed.manifest["facts"]["settings"]["mesh"])


def digest(described: dict[str, Any]) -> str:
    """A folder's name for facts."""
    return _sha256(json.dumps(described, sort_keys=True).encode())[:16]


def differences(plan: Any, host: Any, field: str = "") -> list[str]:
    """One line for each field in which a plan's facts and a host's differ, with both values."""
    if isinstance(plan, dict) and isinstance(host, dict):
        prefix = f"{field}." if field else ""
        names = sorted(plan.keys() | host.keys())
        return [line for name in names for line in differences(plan.get(name), host.get(name), prefix + name)]
    if plan == host:
        return []
    if isinstance(plan, list) and isinstance(host, list):
        # Of hundreds of processor features only those that matter.
        plan, host = [x for x in plan if x not in host] or plan, [x for x in host if x not in plan] or host
    return [f"{field}: the plan has {plan!r}, here it is {host!r}"]


def host_kind() -> str:
    """Which kind of host this is to an executable: its processor and its accelerator's driver."""
    return _sha256(json.dumps([processor(), accelerator_driver()]).encode())


def source_digest() -> str:
    """Of the source that device programs are made from."""
    package = pathlib.Path(__file__).resolve().parent.parent
    content = hashlib.sha256()
    for folder in ("runtime", "models", "kernels_pallas", "sharding"):
        for file in sorted((package / folder).rglob("*")):
            if file.suffix in (".py", ".cc", ".h"):
                content.update(file.read_bytes())
    return content.hexdigest()[:16]


def _content(folder: pathlib.Path, file: str) -> bytes:
    try:
        return (folder / file).read_bytes()
    except OSError as error:
        raise PlanError(f"plan {folder}: {file} cannot be read: {error.strerror or error}") from error


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    installed = {}
    for name in names:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
