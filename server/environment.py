"""The only place that reads environment variables, for the two front doors: ``main`` and ``llm``."""

from __future__ import annotations

import os
import pathlib


def cache_dir() -> pathlib.Path:
    """Where downloaded models are kept."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "precast")


def xla_flags() -> str:
    """The compiler's flags, which executables depend on."""
    return os.environ.get("XLA_FLAGS", "")
