"""The project's own checkpoints: orbax arrays in canonical form, one orbax item a layer.

Parts of arrays are read through tensorstore, which orbax stores them with; whole shardings through orbax.

A directory holds ``precast.json`` (config, text, shapes, and the list of all other files with their sizes)
and ``weights/<group>`` for each group of parameters.  ``precast.json`` is written last: a save that was cut
short has none and is no checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from precast.models.checkpoint.base import Checkpoint, Header, TextAssets, fail_if, fingerprint, load_json
from precast.models.checkpoint.slices import Index, resolve
from precast.models.config import ModelConfig, from_values
from precast.models.errors import CheckpointError
from precast.models.params import param_specs

MANIFEST = "precast.json"
_FORMAT = 1
_WEIGHTS = "weights"
# What is read and unpacked at a time: small beside a device's part of a large array.
_CHUNK_BYTES = 4 << 20
# What is kept unpacked, so that reading an array a few rows at a time unpacks each chunk once.
_CACHE_BYTES = 64 << 20


def save(checkpoint: Checkpoint, directory: str, on_array: Callable[[], Any] = lambda: None) -> None:
    """Writes ``checkpoint`` to a new directory, a layer at a time, reading one while another is written.

    Raises:
      CheckpointError: the directory exists and is not empty, or the source cannot be read.
    """
    directory = os.path.abspath(directory)
    if os.path.exists(directory) and os.listdir(directory):
        raise CheckpointError(f"{directory} exists and is not empty: choose a new directory")
    os.makedirs(os.path.join(directory, _WEIGHTS), exist_ok=True)
    headers: dict[str, Any] = {}
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as writer:
        for group, names in _groups(checkpoint.config).items():
            arrays = {}
            for name in names:
                # orbax needs the array as it is until the write is done, so views of a file are copied.
                arrays[name] = np.array(checkpoint.read(name))
                headers[name] = {"shape": arrays[name].shape, "dtype": str(arrays[name].dtype)}
                on_array()
            chunks = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
            writer.save(os.path.join(directory, _WEIGHTS, group), args=ocp.args.PyTreeSave(arrays, chunks))
    content = {
        "format": _FORMAT,
        "name": checkpoint.name,
        "config": dataclasses.asdict(checkpoint.config),
        "text": None if checkpoint.text is None else dataclasses.asdict(checkpoint.text),
        "arrays": headers,
        "files": _files(directory),
    }
    unfinished = os.path.join(directory, MANIFEST + ".part")
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False)
    os.replace(unfinished, os.path.join(directory, MANIFEST))


@final
class NativeCheckpoint(Checkpoint):
    """See ``Checkpoint``; ``restore`` reads straight to devices."""

    def __init__(self, path: str):
        self.path = os.path.abspath(path)
        manifest = os.path.join(self.path, MANIFEST)
        content = load_json(manifest)
        if content.get("format") != _FORMAT:
            raise CheckpointError(
                f"{manifest}: format is {content.get('format')!r}: this version reads {_FORMAT}; convert again"
            )
        try:
            self.name = content["name"]
            self.config = from_values(content["config"])
            text = content["text"]
            self.text = None if text is None else TextAssets(**{**text, "eos_token_ids": tuple(text["eos_token_ids"])})
            self._headers = {
                name: Header(tuple(entry["shape"]), entry["dtype"], 0) for name, entry in content["arrays"].items()
            }
            self._listed = dict(content["files"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{manifest} is damaged ({error!r}): convert again") from None
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._group_of = {name: group for group, names in _groups(self.config).items() for name in names}
        self._reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        self.fingerprint = fingerprint(self.config, self._headers, [manifest])
        self.check()

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        index = resolve(index, self._headers[name].shape, name)
        group = os.path.join(self.path, _WEIGHTS, self._group_of[name])
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": f"file://{group}/", "path": f"{name}/"},
            "fill_missing_data_reads": False,
        }
        try:
            return tensorstore.open(spec, read=True, context=self._context).result()[index].read().result()
        except (ValueError, OSError) as error:
            raise self._unreadable(name, error) from None

    def restore(self, shardings: Mapping[str, jax.sharding.Sharding]) -> dict[str, jax.Array]:
        """Reads the named parameters, each device only what it holds under the given sharding."""
        restored: dict[str, jax.Array] = {}
        for group, names in _groups(self.config).items():
            arguments = {name: ocp.ArrayRestoreArgs(sharding=shardings[name]) for name in names if name in shardings}
            if arguments:
                restored |= self._restore(group, arguments)
        return restored

    def check(self) -> None:
        found = _files(self.path)
        wrong = [name for name, size in self._listed.items() if found.get(name) != size]
        if wrong:
            raise CheckpointError(f"{self.path}: {len(wrong)} files are missing or cut short: {', '.join(wrong[:4])}")
        specs = param_specs(self.config)
        fail_if(self.path, "missing", [name for name in specs if name not in self._headers])
        fail_if(self.path, "unknown", [name for name in self._headers if name not in specs])
        shapes = [name for name, spec in specs.items() if self._headers[name].shape != spec.shape]
        fail_if(self.path, "of the wrong shape", shapes)

    def _restore(self, group: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._reader.restore(
                os.path.join(self.path, _WEIGHTS, group),
                args=ocp.args.PyTreeRestore(
                    item=dict.fromkeys(arguments, 0), restore_args=arguments, partial_restore=True
                ),
            )
        except (ValueError, OSError, KeyError) as error:
            raise self._unreadable(group, error) from None

    def _unreadable(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} cannot be read: {str(error).splitlines()[0]}: convert again")


def _groups(config: ModelConfig) -> dict[str, list[str]]:
    """The parameters that are saved together: those of one layer, and those outside the layers."""
    groups: dict[str, list[str]] = {}
    for name in param_specs(config):
        group = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]
        groups.setdefault(group, []).append(name)
    return groups


def _files(directory: str) -> dict[str, int]:
    """Size of every file of the weights, by its path below ``directory``."""
    sizes = {}
    for folder, _, names in os.walk(os.path.join(directory, _WEIGHTS)):
        for name in names:
            path = os.path.join(folder, name)
            sizes[os.path.relpath(path, directory)] = os.path.getsize(path)
    return dict(sorted(sizes.items()))
