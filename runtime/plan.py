"""Compiled programs, loaded from a plan's folder without tracing or compiling.

Beside its manifest the folder holds:

  exported/NAME.bin     a program's StableHLO
  executables/NAME.bin  the serialised executable
  native.so             the library of ``kernels_pallas.native``, on CPU
  trees.pickle          how the programs' arguments and results are nested
  local/                executables that this kind of host compiled for itself; the manifest does not list them
  seen.json             kinds of hosts that executables were seen to load on; nor this
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from precast.kernels_pallas.native import library as native_library
from precast.runtime import compiling, files, manifest, trial
from precast.runtime.compiling import EXECUTABLES, EXPORTED, TREES
from precast.runtime.manifest import PlanError, Sealed

_LOCAL, _SEEN = "local", "seen.json"
_BACKGROUND_NICENESS = 15


class Executable:
    """A compiled program, called with its arguments.

    It is deserialised when it is first called or when its turn comes in the background, whichever is first: nothing
    waits for a program that it does not use.
    """

    def __init__(self, load: Callable[[], Callable[..., Any]]) -> None:
        self._load: Callable[[], Callable[..., Any]] | None = load
        self._lock = threading.Lock()
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._compiled or self.ready())(*arguments)

    def ready(self) -> Callable[..., Any]:
        """Deserialises unless that was done."""
        with self._lock:
            if self._load is not None:
                # Dropped with the serialised bytes that it holds.
                self._compiled, self._load = self._load(), None
            assert self._compiled is not None
            return self._compiled


@dataclasses.dataclass(frozen=True)
class Plan:
    """All programs of an engine, ready to call, and the manifest that lists them."""

    programs: dict[str, Executable]
    manifest: dict[str, Any]


class CompileCounter:
    """Counts traces and compilations in this process from its creation on."""

    _TRACE = "/jax/core/compile/jaxpr_trace_duration"
    _COMPILE = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.traces = self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == self._COMPILE
        self.traces += event == self._TRACE


def load(
    sealed: Sealed,
    *,
    first: Sequence[str],
    mesh: Callable[[], Mesh | None],
    pinned: bool = False,
    progress: bool = False,
) -> Plan:
    """The plan's programs on this host.

    They are deserialised in the background while the caller goes on, the ``first`` ones first and the others with
    little priority.

    Args:
      sealed: the plan's folder, checked.
      first: names of what the first request needs.
      mesh: makes the mesh to run on, None for the default device; called once no other process needs the devices.
      pinned: believe nothing but what the manifest lists.
      progress: show a bar where programs have to be compiled.
    """
    _register_library(sealed)
    trees = pickle.loads(sealed.contents[TREES])
    source = _loadable(sealed, pinned)
    devices = mesh()
    if source is None:
        source = _compile_here(sealed, trees, devices, pinned, progress)

    def program(name: str) -> Executable:
        content, one = source.contents[f"{EXECUTABLES}/{name}.bin"], trees[name]
        return Executable(lambda: compiling.deserialise(content, one, devices))

    programs = {name: program(name) for name in trees}

    def deserialise() -> None:
        order = [*first, *programs]
        for name in sorted(programs, key=order.index):
            if name not in first:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
            # The interpreter waits for this thread at its end.
            if not threading.main_thread().is_alive():
                return
            programs[name].ready()

    threading.Thread(target=deserialise, name="plan").start()
    return Plan(programs, sealed.manifest)


def record_loads(folder: pathlib.Path, sha256: str) -> None:
    """Notes that the executables under the manifest with this digest load on this kind of host."""
    seen = _seen(folder)
    seen.setdefault(sha256, []).append(manifest.host_kind())
    try:
        with files.replacing(folder / _SEEN) as file:
            file.write(json.dumps(seen, indent=1).encode())
    except OSError as error:
        logging.warning("plan %s: the next start will try its executables again: %s", folder, error)


def _register_library(sealed: Sealed) -> None:
    """Makes the kernels that a CPU plan carries known to XLA, in this process.

    Raises PlanError where the library does not load, or this process has another one.
    """
    content = sealed.contents.get(native_library.FILE)
    try:
        if content is not None:
            native_library.register(content)
    except native_library.LibraryError as error:
        raise PlanError(f"plan {sealed.path}: {error}") from None


def _seen(folder: pathlib.Path) -> dict[str, list[str]]:
    try:
        seen = json.loads((folder / _SEEN).read_bytes())
        return {sha256: list(hosts) for sha256, hosts in seen.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _loadable(sealed: Sealed, pinned: bool) -> Sealed | None:
    """The folder whose executables load here, tried in another process unless they were seen to; None for none."""
    source = sealed
    if not pinned and (sealed.path / _LOCAL).exists():
        try:
            local = manifest.read_sealed(sealed.path / _LOCAL)
            source = local if local.manifest.get("plan") == sealed.sha256 else sealed
        except PlanError as error:
            logging.warning("%s; it is made again where it is needed", error)
    if manifest.host_kind() in _seen(sealed.path).get(source.sha256, ()):
        return source
    fault = trial.run(sealed, source)
    if fault is None:
        record_loads(sealed.path, source.sha256)
        return source
    logging.warning("plan %s: executables do not load here: %s; compiling from StableHLO", source.path, fault)
    return None


def _compile_here(sealed: Sealed, trees: dict[str, Any], mesh: Mesh | None, pinned: bool, progress: bool) -> Sealed:
    """Compiles the StableHLO, and keeps the executables for the next start unless the plan is pinned."""
    sources = [compiling.Source(name, sealed.contents[f"{EXPORTED}/{name}.bin"], one) for name, one in trees.items()]

    def compile_to(folder: pathlib.Path) -> Sealed:
        with files.replacing_folder(folder) as made:
            compiling.compile_sources(sources, len(sources), made, mesh, progress=progress)
            manifest.seal(made, {"plan": sealed.sha256})
        return manifest.read_sealed(folder)

    if not pinned:
        try:
            local = compile_to(sealed.path / _LOCAL)
            record_loads(sealed.path, local.sha256)
            return local
        except OSError as error:
            logging.warning("plan %s: what is compiled here cannot be kept: %s", sealed.path, error)
    with tempfile.TemporaryDirectory() as temporary:
        return compile_to(pathlib.Path(temporary) / _LOCAL)
