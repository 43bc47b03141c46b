"""A GGUF file, or the first of several that a model was split into."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from typing import final

import numpy as np

from precast.models.checkpoint import gguf_config
from precast.models.checkpoint.base import Checkpoint, Header, account, fail_if, fingerprint
from precast.models.checkpoint.gguf_file import DTYPES, GgufFile
from precast.models.checkpoint.gguf_text import read_text
from precast.models.checkpoint.slices import Index, assemble, resolve
from precast.models.config import ModelConfig, RopeConfig
from precast.models.errors import CheckpointError
from precast.models.families import names, read_config
from precast.models.families.base import GgufNames, Source
from precast.models.params import param_specs
from precast.models.rope import halves_first

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SPLIT_NAME = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")
# The divisors of llama3's frequencies; only in files of models that have them.
_ROPE_DIVISORS = "rope_freqs.weight"


@final
class GgufCheckpoint(Checkpoint):
    """See ``Checkpoint``; quantised weights are read as float32, query and key rows in halves' order."""

    def __init__(self, path: str):
        self.path = path
        self.name = os.path.basename(path).removesuffix(".gguf")
        self._files = _open_all(path)
        self._file_of = {name: file for file in self._files for name in file.headers}
        self._headers: dict[str, Header] = {name: file.headers[name] for name, file in self._file_of.items()}
        metadata = self._files[0].metadata
        family, gguf, architecture = gguf_config.family_of(metadata, path)
        raw = gguf_config.as_config(metadata, self._headers, gguf, architecture, path)
        _, config = read_config(raw, path)
        self.config = dataclasses.replace(config, dtype=self._dtype(), rope=self._rope(config))
        self._specs = param_specs(self.config)
        self._sources = names.sources(self.config, {**names.GGUF, **gguf.tensors})
        self._skipped = (*family.skipped, re.escape(_ROPE_DIVISORS))
        self.fingerprint = fingerprint(self.config, self._headers, [file.path for file in self._files])
        self.check()
        self._sources = {name: self._restored(name, source, gguf) for name, source in self._sources.items()}
        self.text = read_text(metadata, raw, path)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        return assemble(self._sources[name], name, resolve(index, self._specs[name].shape, name), self._fetch)

    def check(self) -> None:
        account(self.path, self._headers, self._sources, DTYPES, self._skipped)

    def _fetch(self, name: str, index: Index) -> np.ndarray:
        return self._file_of[name].fetch(name, index)

    def _dtype(self) -> str:
        """The type of most of the weights; bfloat16 stands in for quantised ones."""
        weight = Counter[str]()
        for header in self._headers.values():
            weight[header.dtype] += header.num_bytes
        return _FLOATS.get(weight.most_common(1)[0][0], "bfloat16")

    def _rope(self, config: ModelConfig) -> RopeConfig:
        if _ROPE_DIVISORS not in self._headers:
            return config.rope
        header, needed = self._headers[_ROPE_DIVISORS], (config.rotary_dim(config.rope) // 2,)
        if header.shape != needed or header.dtype != "F32":
            raise CheckpointError(
                f"{self.path}: {_ROPE_DIVISORS} is {header.dtype} {list(header.shape)}: it must be F32 {list(needed)}"
            )
        divisors = tuple(float(value) for value in self._fetch(_ROPE_DIVISORS, resolve(None, needed, _ROPE_DIVISORS)))
        if not all(np.isfinite(divisor) and divisor > 0 for divisor in divisors):
            raise CheckpointError(f"{self.path}: {_ROPE_DIVISORS} has values that are not above 0")
        return dataclasses.replace(config.rope, divisors=divisors)

    def _restored(self, name: str, source: Source, gguf: GgufNames) -> Source:
        """``source`` with the converter's reordering of query and key rows undone."""
        match = re.search(r"\.attn\.([qk])\.(weight|bias)$", name)
        if match is None or not gguf.permuted:
            return source
        heads = self.config.num_heads if match.group(1) == "q" else self.config.num_kv_heads
        turning = self.config.rotary_dim(self.config.rope)
        order = halves_first(np.arange(source.shape[0]), heads, 0, turning)
        return dataclasses.replace(source, order=order)


def _open_all(path: str) -> list[GgufFile]:
    """The file, with the others of its split in order."""
    first = GgufFile(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return [first]
    match = _SPLIT_NAME.fullmatch(os.path.basename(path))
    if match is None or int(match.group(3)) != count:
        raise CheckpointError(f"{path} is part of {count} files: it must be named like model-00001-of-{count:05}.gguf")
    if first.metadata.get("split.no") != 0:
        raise CheckpointError(
            f"{path} is not the first of its {count} files: open {match.group(1)}00001-of-{count:05}.gguf"
        )
    folder = os.path.dirname(path)
    rest = [os.path.join(folder, f"{match.group(1)}{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    fail_if(path, "in files that are absent", [os.path.basename(file) for file in rest if not os.path.exists(file)])
    files = [first, *(GgufFile(file) for file in rest)]
    seen = Counter(name for file in files for name in file.headers)
    fail_if(path, "in two files", [name for name, times in seen.items() if times > 1])
    total = first.metadata.get("split.tensors.count", len(seen))
    if total != len(seen):
        raise CheckpointError(
            f"{path}: {abs(total - len(seen))} tensors are missing: its {count} files hold {len(seen)} of {total}"
        )
    return files
