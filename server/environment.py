"""The only place that reads and sets environment variables, for the front doors: the commands and ``llm``."""

from __future__ import annotations

import os
import pathlib


def cache_dir() -> pathlib.Path:
    """Where downloaded models are kept."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "precast")


def xla_flags() -> str:
    """The compiler's flags, which executables depend on."""
    return os.environ.get("XLA_FLAGS", "")


def prepare_serving() -> None:
    """Sets what gRPC and JAX read when they are loaded, unless it is set."""
    # Its notes about connections that close are no news to anybody.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # What a plan counts on: all of a GPU's memory but its margin (``runtime.memory``).
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")


def prepare_compiling() -> None:
    """For a process that compiles for chips which this host does not have."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Do not ask the cloud which TPU this host is; let other processes use the compiler too.
    os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # The compiler's notes on the cloud that it is not in.
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
