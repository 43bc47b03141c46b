"""Pure functions of a transformer, and what loads their weights.

``load`` is the way in for research; it comes on first use, so that ``import precast.models`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precast.models.research import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'precast.models' has no attribute {name!r}")
    return getattr(importlib.import_module("precast.models.research"), name)
