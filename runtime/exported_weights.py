"""Weights as safetensors beside exported functions, and which tensors each of a function's arguments is made of."""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors.flax

from precast.models.runs import runs
from precast.runtime.exporting import Exporter

# Bytes of tensors that are gathered before a file of them is written.
_FILE_BYTES = 1 << 30


class WeightWriter:
    """Writes each tensor once, whichever platforms want it; one that a platform lays out differently gets its name.

    folder: where the files go; None writes nothing.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder = folder
        self._digests: dict[str, str] = {}
        self._pending: dict[str, jax.Array] = {}
        self._num_files = 0

    def add(self, exporter: Exporter, weights: Any) -> list[dict[str, Any]]:
        """Takes one platform's weights: arrays, or shapes where nothing is written.

        Returns for each argument, in order: the tensors it is made of, whether they are stacked, its shape and dtype.
        """
        arguments = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]:
            names, is_stacked = _tensor_names(path, exporter)
            if self._folder is not None:
                parts = zip(names, leaf if is_stacked else [leaf], strict=True)
                names = [self._store(name, part, exporter.platform) for name, part in parts]
            arguments.append({"tensors": names, "stacked": is_stacked, "shape": leaf.shape, "dtype": leaf.dtype.name})
        return arguments

    def flush(self) -> None:
        """Writes what is still held."""
        if self._folder is not None and self._pending:
            self._folder.mkdir(exist_ok=True)
            safetensors.flax.save_file(self._pending, self._folder / f"{self._num_files:05}.safetensors")
            self._num_files += 1
            self._pending = {}

    def _store(self, name: str, array: jax.Array, platform: str) -> str:
        """The name under which the tensor is kept."""
        content: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digest = hashlib.sha256(content).hexdigest() + f" {array.shape} {array.dtype.name}"
        if self._digests.get(name, digest) != digest:
            name = f"{name}@{platform}"
        if name not in self._digests:
            self._digests[name] = digest
            self._pending[name] = array
            if sum(one.nbytes for one in self._pending.values()) > _FILE_BYTES:
                self.flush()
        return name


def _tensor_names(path: tuple[Any, ...], exporter: Exporter) -> tuple[list[str], bool]:
    """What a leaf's tensors are called, one a layer for stacked layers, and whether it is such a stack."""
    words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    if words[0] != "layers":
        return [".".join(words)], False
    positions = [one for run in runs(exporter.config, exporter.placement.is_stacked) for one in run.positions]
    position = positions[int(words[1])]
    return [".".join(["layers", str(layer), *words[2:]]) for layer in position.layers], position.is_stacked
