"""What every checkpoint offers, and the accounting that they share."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from precast.models.checkpoint.slices import Index
from precast.models.config import ModelConfig
from precast.models.errors import CheckpointError
from precast.models.families.base import Source
from precast.models.params import param_specs

_log = logging.getLogger(__name__)

# Tensors that old exporters wrote although they can be computed.
_HARMLESS = (r".*rotary_emb\.inv_freq", r".*\.masked_bias")
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class TextAssets:
    """How a model reads and writes text.

    Attributes:
      tokenizer_json: content of a ``tokenizer.json``.
      tokenizer_config, config_json: content of the files of those names (made up from GGUF metadata).
      chat_template: Jinja source, or None.
      bos_token_id, pad_token_id: None where the model has none.
      eos_token_ids: every id that ends an answer, ascending.
      add_bos: a raw completion gets a BOS in front.
    """

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    add_bos: bool
    config_json: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Header:
    """A tensor as the file declares it; ``dtype`` under the name that the format gives it."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class Checkpoint(abc.ABC):
    """A model on disk, opened but not read.

    Attributes:
      path: where it lies.
      name: for people: the last part of the path.
      config: the model's traits.
      fingerprint: SHA-256 over config, tensors' names, shapes and types, and the files' sizes and times.
      text: tokenizer and template, or None where the checkpoint has none.
    """

    path: str
    name: str
    config: ModelConfig
    fingerprint: str
    text: TextAssets | None

    def names(self) -> tuple[str, ...]:
        """Canonical names of all parameters, see ``models.params``."""
        return tuple(param_specs(self.config))

    @abc.abstractmethod
    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One parameter in canonical orientation, read when asked for, in the dtype that the file holds.

        Args:
          name: canonical name.
          index: one slice a dimension, without steps, of the canonical array; only that part is read.
            A run may be empty; None is all of the array.

        Raises:
          CheckpointError: the file has changed or cannot be read.
          ValueError: an index that is not of this form.
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Accounts for every parameter and every tensor.

        Raises:
          CheckpointError: with names and counts, for missing, extra, duplicated or misshapen tensors
            and for types that are not implemented.
        """


def account(
    where: str,
    headers: Mapping[str, Header],
    sources: Mapping[str, Source],
    dtypes: Iterable[str],
    skipped: Sequence[str],
) -> None:
    """Compares what a model needs with what a checkpoint declares; see ``Checkpoint.check``."""
    needed = {name: source.shape for source in sources.values() for name in source.names}
    fail_if(where, "missing", [name for name in needed if name not in headers])
    wrong = [
        f"{name} ({list(headers[name].shape)} where {list(shape)} is needed)"
        for name, shape in needed.items()
        if headers[name].shape != shape
    ]
    fail_if(where, "of the wrong shape", wrong)
    allowed = frozenset(dtypes)
    wrong = [f"{name} ({headers[name].dtype})" for name in needed if headers[name].dtype not in allowed]
    fail_if(where, f"of a type that is not implemented ({', '.join(sorted(allowed))} are)", wrong)
    extra = [name for name in headers if name not in needed]
    harmless = [name for name in extra if any(re.fullmatch(pattern, name) for pattern in (*_HARMLESS, *skipped))]
    if harmless:
        _log.info("%s: %d tensors are not used: %s", where, len(harmless), ", ".join(harmless))
    fail_if(where, "unknown", sorted(set(extra) - set(harmless)))


def fail_if(where: str, what: str, names: Sequence[str]) -> None:
    """Raises CheckpointError when there are any such tensors."""
    if names:
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
        raise CheckpointError(f"{where}: {count} {what}: {shown}")


def fingerprint(config: ModelConfig, headers: Mapping[str, Header], files: Iterable[str]) -> str:
    """See ``Checkpoint.fingerprint``."""
    stats = [(os.path.basename(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in sorted(files)]
    content = [
        dataclasses.asdict(config),
        sorted((name, header.shape, header.dtype) for name, header in headers.items()),
        stats,
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_text(path: str) -> str:
    """A small text file's content; CheckpointError says why it cannot be had."""
    try:
        with open(path, encoding="utf-8") as file:
            content = file.read()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if content.startswith("version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull`, or download it again"
        )
    return content


def load_json(path: str) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError says what is wrong with it."""
    content = load_text(path)
    if not content.strip():
        raise CheckpointError(f"{path} is empty")
    if content.startswith("\ufeff"):
        raise CheckpointError(f"{path} begins with a byte order mark: save it as UTF-8 without one")
    try:
        value = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where a JSON object is needed")
    return value
