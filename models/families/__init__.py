"""The families of models that can be served: one short declarative file each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from precast.models.config import ModelConfig
from precast.models.errors import CheckpointError
from precast.models.families.base import Family
from precast.models.families.cohere import COHERE, COHERE2
from precast.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from precast.models.families.gemma import GEMMA2, GEMMA3
from precast.models.families.glm import GLM, GLM4
from precast.models.families.gpt_oss import GPT_OSS
from precast.models.families.granite import GRANITE
from precast.models.families.keys import ConfigKeys, flatten_text_config
from precast.models.families.llama import LLAMA, MISTRAL, SMOLLM3
from precast.models.families.mixtral import MIXTRAL
from precast.models.families.olmo import OLMO2, OLMOE
from precast.models.families.phi import PHI3
from precast.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    SMOLLM3,
    QWEN2,
    QWEN3,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO2,
    GRANITE,
    GLM,
    GLM4,
    COHERE,
    COHERE2,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
)


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
