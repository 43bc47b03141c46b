"""The kernels' library: made by the host's C++ compiler, kept, and made known to XLA.

A process has one such library.  A plan that was compiled with it carries it, so that a host without a compiler can
serve the plan.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading

import jax
import jaxlib.version
import numpy as np
from absl import logging

FILE = "native.so"
# Custom calls in a program, as ``jax.ffi`` knows them.
DENSE, ROWS, ATTENTION, WRITE = "precast_dense", "precast_rows", "precast_cpu_attention", "precast_cpu_write"
NORM = "precast_norm_f32"
TARGETS = (*(f"{kernel}_{kind}" for kernel in (DENSE, ROWS, ATTENTION, WRITE) for kind in ("f32", "bf16")), NORM)
_PACKERS = ("precast_pack_f32", "precast_pack_bf16")
_COMPILERS = ("c++", "g++", "clang++")
# Without warnings: GCC 12 has false ones in its own headers of intrinsics.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
_SECONDS = 300
_DIGEST = 32
_lock = threading.Lock()
_loaded: tuple[bytes, ctypes.CDLL] | None = None


class LibraryError(RuntimeError):
    """A library that does not load, or another than the one that this process has."""


def build(folder: pathlib.Path, processor: str) -> bytes | None:
    """The library for this host, from ``folder`` if it was made before; None where there is no C++ compiler.

    Args:
      folder: where libraries are kept; one that cannot be written only costs time.
      processor: what the code depends on besides its source: it is compiled for the processor at hand.
    """
    source = "\0".join(file.read_text() for file in sources())
    facts = "\0".join([source, processor, jaxlib.version.__version__, *_FLAGS])
    kept = folder / f"native-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    content = _kept(kept) or _compile()
    if content is not None and not kept.exists():
        _keep(kept, content)
    return content


def register(content: bytes) -> None:
    """Loads the library into this process and makes its kernels known to XLA; once is enough.

    Raises LibraryError where it does not load, or the process has another one.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            if _loaded[0] != content:
                raise LibraryError(f"{FILE} is another than the one that this process has loaded: start a new process")
            return
        library = _open(content)
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
        _loaded = content, library


def registered() -> bytes | None:
    """The library that this process has."""
    return None if _loaded is None else _loaded[0]


def target(kernel: str, operand: jax.Array) -> str:
    """The custom call of a kernel for weights or pages like ``operand``: float32, or the bits of bfloat16."""
    return f"{kernel}_{'f32' if operand.dtype == np.float32 else 'bf16'}"


def function(name: str) -> ctypes._NamedFuncPointer:
    """One of the library's packers: (matrix address, packed address, outputs, inputs)."""
    assert _loaded is not None and name in _PACKERS
    found = getattr(_loaded[1], name)
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), None
    return found


def sources() -> list[pathlib.Path]:
    """The C++ files, headers last."""
    here = pathlib.Path(__file__).parent
    return [*sorted(here.glob("*.cc")), *sorted(here.glob("*.h"))]


def _compile() -> bytes | None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        logging.warning("no C++ compiler (%s): XLA's own operations serve, which are slower", ", ".join(_COMPILERS))
        return None
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder) / FILE
        files = [str(file) for file in sources() if file.suffix == ".cc"]
        command = [compiler, *_FLAGS, "-isystem", jax.ffi.include_dir(), *files, "-o", str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
            return made.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            words = (getattr(error, "stderr", None) or str(error)).strip()
            logging.warning("%s cannot compile the CPU kernels, XLA's own operations serve: %s", compiler, words[-500:])
            return None


def _kept(path: pathlib.Path) -> bytes | None:
    """What ``_keep`` wrote; a damaged file is removed, since a process that loads one may end by it."""
    try:
        content, digest = (whole := path.read_bytes())[:-_DIGEST], whole[-_DIGEST:]
        if hashlib.sha256(content).digest() == digest:
            return content
        logging.warning("%s is damaged and is made again", path)
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        logging.warning("%s cannot be read and is made again: %s", path, error)
    return None


def _keep(path: pathlib.Path, content: bytes) -> None:
    """Writes the library and its SHA-256."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content + hashlib.sha256(content).digest())
        os.replace(file.name, path)
    except OSError as error:
        logging.warning("%s cannot be kept for the next start: %s", path, error)


def _open(content: bytes) -> ctypes.CDLL:
    """Loads just these bytes, whatever has become of the file that they were read from."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        try:
            return ctypes.CDLL(file.name)
        except OSError as error:
            raise LibraryError(f"{FILE} does not load: {error}") from None
