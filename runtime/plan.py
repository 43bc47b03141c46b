"""Compiled programs: built before the server is ready, kept in a folder, loaded at the next start.

A plan is one folder a key (model, shapes, target, versions): ``manifest.json`` with the key and each file's
SHA-256, and ``executables/`` with one serialised program a file.  A file whose digest is not the manifest's is
compiled again and replaced; nothing is unpickled before its digest has matched.  Files are written under another
name and moved into place.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pickle
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from jax.experimental import serialize_executable
from tqdm import tqdm

from precast.runtime import files
from precast.runtime.programs import Program

_MANIFEST = "manifest.json"
_EXECUTABLES = "executables"
_BACKGROUND_NICENESS = 15


@dataclasses.dataclass(frozen=True)
class Built:
    """How one program came to be: compile seconds (0 when loaded), bytes of its file and of its temporaries."""

    name: str
    seconds: float
    file_bytes: int
    temp_bytes: int
    loaded: bool


class Executable:
    """A compiled program, called with its arguments.

    One from a plan's folder is deserialised when it is first called or when its turn comes in the background,
    whichever is first: nothing waits for a program that it does not use.
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
    """All programs of an engine, ready to call."""

    programs: dict[str, Executable]
    built: tuple[Built, ...]

    def table(self) -> str:
        """The programs with their compile times and bytes, for people."""
        lines = [f"{'program':<24}{'compile s':>10}{'file kB':>10}{'temp kB':>10}"]
        for one in self.built:
            seconds = "loaded" if one.loaded else f"{one.seconds:.1f}"
            lines.append(f"{one.name:<24}{seconds:>10}{one.file_bytes / 1e3:>10.0f}{one.temp_bytes / 1e3:>10.0f}")
        return "\n".join(lines)


class CompileCounter:
    """Counts compilations in this process from its creation on."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == self._EVENT


def make_key(**facts: Any) -> dict[str, Any]:
    """What an executable depends on: the caller's facts, versions, the processor and precast's own source."""
    return {
        **facts,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "source": _source_digest(),
    }


def key_digest(key: dict[str, Any]) -> str:
    """A folder's name for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


class PlanFolder:
    """The folder of one plan on disk; a folder that cannot be read or written only costs compile time."""

    def __init__(self, root: str | os.PathLike[str], key: dict[str, Any]) -> None:
        self._key = json.loads(json.dumps(key))
        self.path = pathlib.Path(root) / key_digest(self._key)
        self._lock = threading.Lock()
        self._manifest = self._read_manifest()

    def names(self) -> list[str]:
        """The programs that the manifest lists."""
        return list(self._manifest["programs"])

    def load(self, name: str) -> tuple[Executable, Built] | None:
        """The program, or None where there is none or its file is damaged."""
        entry = self._manifest["programs"].get(name)
        content = entry and self.read(f"{_EXECUTABLES}/{name}.bin", entry["sha256"])
        if content is None:
            return None
        executable = Executable(lambda: serialize_executable.deserialize_and_load(*pickle.loads(content)))
        return executable, Built(name, 0.0, len(content), entry["temp_bytes"], loaded=True)

    def read(self, file: str, sha256: str) -> bytes | None:
        """A file's content, or None, with a warning, unless it is there and has this digest."""
        try:
            content = (self.path / file).read_bytes()
        except OSError as error:
            logging.warning("plan: %s cannot be read and is made again: %s", file, error)
            return None
        if hashlib.sha256(content).hexdigest() != sha256:
            logging.warning("plan: %s does not match its digest and is made again", file)
            return None
        return content

    def store(self, name: str, compiled: Any, seconds: float) -> Built:
        """Writes a freshly compiled program and lists it in the manifest."""
        content = pickle.dumps(serialize_executable.serialize(compiled))
        analysis = compiled.memory_analysis()
        built = Built(name, seconds, len(content), analysis.temp_size_in_bytes if analysis else 0, loaded=False)
        entry = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": built.file_bytes,
            "temp_bytes": built.temp_bytes,
            "compile_seconds": round(seconds, 3),
        }
        try:
            with files.replacing(self.path / _EXECUTABLES / f"{name}.bin") as file:
                file.write(content)
            with self._lock, files.replacing(self.path / _MANIFEST) as file:
                self._manifest["programs"][name] = entry
                file.write(json.dumps(self._manifest, indent=1).encode())
        except OSError as error:
            logging.warning("plan: %s cannot be kept for the next start: %s", name, error)
        return built

    def _read_manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads((self.path / _MANIFEST).read_bytes())
            if manifest["key"] == self._key and isinstance(manifest["programs"], dict):
                return manifest
            logging.warning("plan: %s is of another deployment and is written anew", self.path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            logging.warning("plan: %s cannot be read and is written anew: %s", self.path / _MANIFEST, error)
        return {"key": self._key, "programs": {}}


def load(folder: PlanFolder, *, first: Sequence[str]) -> dict[str, tuple[Executable, Built]]:
    """The folder's programs, checked; what is missing or damaged is left out.

    They are deserialised in the background while the caller goes on, the ``first`` ones first and the others with
    little priority.
    """
    order = [*first, *folder.names()]
    found = ((name, folder.load(name)) for name in sorted(folder.names(), key=order.index))
    programs = {name: one for name, one in found if one is not None}

    def deserialise() -> None:
        for name, (executable, _) in programs.items():
            if name not in first:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
            # The interpreter waits for this thread at its end.
            if not threading.main_thread().is_alive():
                return
            executable.ready()

    threading.Thread(target=deserialise, name="plan").start()
    return programs


def build(
    programs: Sequence[Program], folder: PlanFolder, have: dict[str, tuple[Executable, Built]], *, progress: bool
) -> Plan:
    """Compiles the programs that ``have`` lacks, in parallel, and keeps them in the folder.

    Lowering holds Python's lock, so it runs here while the pool compiles what was lowered before.
    """
    missing = [program for program in programs if program.name not in have]
    done = dict(have)
    with (
        concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        tqdm(total=len(missing), desc="compiling", unit="program", disable=not progress or not missing) as bar,
    ):

        def finish(name: str, lowered: jax.stages.Lowered) -> None:
            began = time.monotonic()
            compiled = lowered.compile()
            built = folder.store(name, compiled, time.monotonic() - began)
            done[name] = (Executable(lambda: compiled), built)
            bar.update()

        for future in [pool.submit(finish, program.name, program.lower()) for program in missing]:
            future.result()
    ordered = [done[program.name] for program in programs]
    return Plan({built.name: executable for executable, built in ordered}, tuple(built for _, built in ordered))


def _processor() -> str:
    """The machine's kind and instruction set: a CPU executable runs nowhere else."""
    flags = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:16]}"


def _source_digest() -> str:
    """Of the source that device programs are made from."""
    package = pathlib.Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("runtime", "models", "kernels_pallas", "sharding"):
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
