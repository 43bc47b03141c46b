"""A Hugging Face directory: config.json, safetensors, tokenizer."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections import Counter
from typing import Any, final

import numpy as np

from precast.models.checkpoint import mxfp4
from precast.models.checkpoint.base import Checkpoint, account, fingerprint, load_json
from precast.models.checkpoint.huggingface_text import read_text
from precast.models.checkpoint.shards import Shards
from precast.models.checkpoint.slices import Index, assemble, resolve
from precast.models.config import ModelConfig
from precast.models.errors import CheckpointError
from precast.models.families import FAMILIES, names, read_config
from precast.models.families.base import Template
from precast.models.families.keys import flatten_text_config
from precast.models.params import param_specs

_log = logging.getLogger(__name__)

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TEXT_PREFIX = "language_model."
_COMPARED_ROWS = 4096


@final
class HuggingFaceCheckpoint(Checkpoint):
    """See ``Checkpoint``; the constructor reads config and headers, no weights."""

    def __init__(self, path: str):
        self.path = path
        self.name = os.path.basename(os.path.normpath(path))
        self._where = os.path.join(path, "config.json")
        raw = load_json(self._where)
        _refuse_remote_code(raw, self._where)
        family, config = read_config(raw, self._where)
        self._shards = Shards(path)
        self._headers = mxfp4.unpacked_headers(self._shards.headers, path)
        self._skipped = family.skipped
        templates = self._prefixed({**names.HUGGING_FACE, **family.tensors})
        head, embedding = (names.tensor_name(templates[name]) for name in ("head.weight", "embed.weight"))
        tied = self._is_tied(config, head, embedding, "tie_word_embeddings" in flatten_text_config(raw, self._where))
        self.config = dataclasses.replace(config, dtype=self._dtype(), tie_embeddings=tied)
        self._specs = param_specs(self.config)
        self._sources = names.sources(self.config, templates)
        if tied:
            self._skipped = (*self._skipped, re.escape(head))
        self.fingerprint = fingerprint(self.config, self._headers, self._shards.files)
        self.check()
        self.text = read_text(path, raw, config.vocab_size)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        return assemble(self._sources[name], name, resolve(index, self._specs[name].shape, name), self._fetch)

    def check(self) -> None:
        account(self.path, self._headers, self._sources, DTYPES, self._skipped)

    def _fetch(self, name: str, index: Index) -> np.ndarray:
        if name in self._shards.headers:
            return self._shards.fetch(name, index)
        return mxfp4.unpack(name, index, self._shards.fetch)

    def _prefixed(self, templates: dict[str, Template]) -> dict[str, Template]:
        """The templates with the prefix that the text part of a composite model has."""
        embedding = names.tensor_name(templates["embed.weight"])
        if embedding in self._headers or _TEXT_PREFIX + embedding not in self._headers:
            return templates
        return {name: names.prefixed(template, _TEXT_PREFIX) for name, template in templates.items()}

    def _dtype(self) -> str:
        """The floating-point type of most of the weights."""
        weight = Counter[str]()
        for header in self._headers.values():
            weight[header.dtype] += header.num_bytes
        return next((DTYPES[dtype] for dtype, _ in weight.most_common() if dtype in DTYPES), "float32")

    def _is_tied(self, config: ModelConfig, head: str, embedding: str, stated: bool) -> bool:
        """Decides from the flag and the file together whether the head is the embedding table."""
        headers = self._headers
        if head not in headers:
            if not config.tie_embeddings and stated:
                raise CheckpointError(f"{self.path}: 1 tensor is missing: {head} (tie_word_embeddings is false)")
            if not config.tie_embeddings:
                _log.warning(
                    "%s: no %s, and tie_word_embeddings is not set: using the embedding table", self.path, head
                )
            return True
        if config.tie_embeddings and embedding in headers and not self._equal(head, embedding):
            _log.warning("%s: tie_word_embeddings is true but %s differs from %s: using it", self.path, head, embedding)
            return False
        return config.tie_embeddings

    def _equal(self, first: str, second: str) -> bool:
        one, other = self._headers[first], self._headers[second]
        if one != other:
            return False
        windows = [
            resolve((slice(start, min(start + _COMPARED_ROWS, one.shape[0])), slice(None)), one.shape, first)
            for start in range(0, one.shape[0], _COMPARED_ROWS)
        ]
        return all(np.array_equal(self._shards.fetch(first, at), self._shards.fetch(second, at)) for at in windows)


def _refuse_remote_code(raw: dict[str, Any], where: str) -> None:
    """A model whose forward pass is Python in the checkpoint cannot be served, whatever it calls itself."""
    code = raw.get("auto_map")
    known = {model_type for family in FAMILIES for model_type in family.model_types}
    if code and flatten_text_config(raw, where).get("model_type") not in known:
        raise CheckpointError(
            f"{where}: auto_map names Python code in the checkpoint (trust_remote_code): it is never run; "
            "only the implemented architectures can be served"
        )
