"""precast: large language models served from programs that were compiled before the server started.

The public names load on first use, so that ``import precast`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precast.runtime.request import SamplingParams
    from precast.server.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "precast.server.llm", "SamplingParams": "precast.runtime.request"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'precast' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
