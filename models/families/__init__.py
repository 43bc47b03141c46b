"""The families of models that can be served: one short declarative file each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from precast.models.config import ModelConfig
from precast.models.errors import CheckpointError
from precast.models.families.base import Family
from precast.models.families.keys import ConfigKeys, flatten_text_config
from precast.models.families.llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA,)


def family_of(model_type: str, where: str) -> Family:
    """The family that serves ``model_type``; CheckpointError names those that exist."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise CheckpointError(
        f"{where}: model_type is {model_type!r}: this architecture is not implemented; implemented: {known}"
    )


def read_config(raw: Mapping, where: str) -> tuple[Family, ModelConfig]:
    """Reads a parsed ``config.json``.

    Raises:
      CheckpointError: an unknown architecture, a bad value, or a trait that is not implemented.
    """
    model_type = flatten_text_config(raw, where).get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{where}: model_type is missing: this does not look like the config of a language model")
    keys = ConfigKeys(raw, where)
    family = family_of(model_type, where)
    try:
        config = family.read_config(keys)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
    keys.finish()
    reach = 0
    if config.rope.kind in ("yarn", "dynamic"):
        reach = int(config.rope.original_max_position_embeddings * config.rope.factor)
    return family, dataclasses.replace(config, max_position_embeddings=max(config.max_position_embeddings, reach))
