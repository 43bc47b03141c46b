"""From functions to executables by way of StableHLO.

A program is lowered once, through ``jax.export``; what is compiled is that StableHLO: on the build host, and once
more on a host that serves where the build host's executable does not load.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import itertools
import os
import pathlib
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from tqdm import tqdm

from precast.kernels_pallas.native import library as native_library
from precast.kernels_pallas.targets import Target
from precast.runtime import hlo
from precast.runtime.config import ConfigError
from precast.runtime.machine import host_memory
from precast.runtime.programs import Program

EXECUTABLES, EXPORTED, TREES = "executables", "exported", "trees.pickle"
# Host memory set aside for each program that is being compiled.
_COMPILE_BYTES = 3 << 30
_PLATFORMS = {"cpu": "cpu", "tpu": "tpu", "gpu": "cuda"}
# Without a GPU to try tiles on, XLA's Triton products take splits that write and read partial sums; cuBLAS chooses on
# the GPU itself.
_OPTIONS: dict[str, dict[str, bool | str]] = {"cuda": {"xla_gpu_enable_triton_gemm": False}}
# Kernels whose serialised form JAX does not promise to read later: only the versions that wrote a plan read it.
_KERNEL_CALLS = ("mosaic_gpu_v2", *native_library.TARGETS)


@dataclasses.dataclass(frozen=True)
class Trees:
    """How a program's flat arguments and results are nested; donated: flat arguments whose buffers results reuse."""

    arguments: Any
    results: Any
    donated: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """A program as it is compiled: ``exported`` is what ``jax.export.deserialize`` reads, of flat arguments."""

    name: str
    exported: bytes
    trees: Trees


def compile_programs(
    programs: Sequence[Program], folder: pathlib.Path, target: Target, *, progress: bool
) -> dict[str, dict[str, Any]]:
    """Writes each program's StableHLO and executable to the folder; returns what the manifest says of it, by name."""
    trees: dict[str, Trees] = {}

    def sources() -> Iterable[Source]:
        for program in programs:
            source = _export(program, _PLATFORMS[target.backend])
            _write(folder / EXPORTED / f"{program.name}.bin", source.exported)
            trees[program.name] = source.trees
            yield source

    entries = compile_sources(sources(), len(programs), folder, programs[0].mesh, progress=progress)
    _write(folder / TREES, pickle.dumps(trees))
    return {program.name: entries[program.name] for program in programs}


def compile_sources(
    sources: Iterable[Source], number: int, folder: pathlib.Path, mesh: Mesh | None, *, progress: bool
) -> dict[str, dict[str, Any]]:
    """Compiles in parallel and writes the executables to the folder; returns what the manifest says of each, by name.

    Lowering holds Python's lock, so ``sources`` is drawn from here while a pool compiles.  It is drawn from only when
    a thread of the pool is free, and nothing compiled is kept: that bounds memory.
    """
    threads = max(1, min(os.cpu_count() or 1, number, host_memory() // _COMPILE_BYTES))
    free = threading.Semaphore(threads)
    entries: dict[str, dict[str, Any]] = {}
    with (
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
        tqdm(total=number, desc="compiling", unit="program", disable=not progress) as bar,
    ):

        def finish(source: Source) -> None:
            try:
                content, entries[source.name] = _compile(source, mesh)
                _write(folder / EXECUTABLES / f"{source.name}.bin", content)
                bar.update()
            finally:
                free.release()

        futures = []
        for source in sources:
            free.acquire()
            futures.append(pool.submit(finish, source))
            for future in futures:
                # The first failure ends it, not the last.
                if future.done():
                    future.result()
        for future in futures:
            future.result()
    return entries


def deserialise(content: bytes, trees: Trees, mesh: Mesh | None) -> Callable[..., Any]:
    """The program of an executable's file, for arguments nested as they were before the export."""
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    _find_runtime(devices[0].platform)
    return serialize_executable.deserialize_and_load(content, trees.arguments, trees.results, execution_devices=devices)


def _find_runtime(platform: str) -> None:
    """Imports what says where the runtime of NVIDIA kernels lies; where kernels are traced that has been done."""
    if platform in ("gpu", "cuda"):
        importlib.import_module("jax.experimental.mosaic.gpu")


def _export(program: Program, platform: str) -> Source:
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in _KERNEL_CALLS]
    try:
        exported = export.export(program.jitted(), platforms=[platform], disabled_checks=checks)(*program.arguments)
    except NotImplementedError as error:
        raise ConfigError(f"{program.name}: {error}; kernels=reference takes plain XLA operations instead") from None
    sizes = [len(jax.tree.leaves(argument)) for argument in program.arguments]
    ends = list(itertools.accumulate(sizes))
    donated = tuple(i for k in program.donated for i in range(ends[k] - sizes[k], ends[k]))
    # Without names of our own types in it, which whoever reads it would have to know.
    flat = dataclasses.replace(
        exported,
        in_tree=jax.tree.structure((tuple(range(sum(sizes))), {})),
        out_tree=jax.tree.structure(tuple(range(exported.out_tree.num_leaves))),
    )
    return Source(program.name, bytes(flat.serialize()), Trees(exported.in_tree, exported.out_tree, donated))


def _compile(source: Source, mesh: Mesh | None) -> tuple[bytes, dict[str, Any]]:
    """The serialised executable, and what the manifest says of it."""
    exported = export.deserialize(bytearray(source.exported))
    _find_runtime(exported.platforms[0])
    shardings = None if mesh is None else exported.in_shardings_jax(mesh)
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings or [None] * len(exported.in_avals), strict=True)
    ]
    outputs = None if mesh is None else exported.out_shardings_jax(mesh)
    began = time.monotonic()
    lowered = jax.jit(exported.call, donate_argnums=source.trees.donated, out_shardings=outputs).lower(*arguments)
    compiled = lowered.compile(compiler_options=_OPTIONS.get(exported.platforms[0]))
    seconds = time.monotonic() - began
    content, _, _ = serialize_executable.serialize(compiled)
    return content, {"compile_seconds": round(seconds, 3), **_describe(compiled, len(content))}


def _describe(compiled: jax.stages.Compiled, file_bytes: int) -> dict[str, Any]:
    """Sizes are of one device."""
    memory, work = compiled.memory_analysis(), hlo.account(compiled.as_text() or "")
    assert memory is not None
    return {
        "bytes_accessed": work.bytes,
        "flops": work.flops,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        # Only TPU's compiler tells the code apart.
        "code_bytes": memory.generated_code_size_in_bytes or file_bytes,
        "collectives": work.collectives,
        "custom_calls": work.custom_calls,
    }


def _write(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
