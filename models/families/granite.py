"""Granite 3: Llama's shape with multipliers."""

from __future__ import annotations

import dataclasses

from precast.models.config import ModelConfig
from precast.models.families.base import Family
from precast.models.families.keys import ConfigKeys
from precast.models.families.llama import read_llama


def read_granite(keys: ConfigKeys) -> ModelConfig:
    return dataclasses.replace(
        read_llama(keys),
        attention_scale=keys.number("attention_multiplier", 1.0),
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        residual_multiplier=keys.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / keys.number("logits_scaling", 1.0),
    )


GRANITE = Family(
    name="Granite 3",
    examples="Granite 3.0 to 3.3, 2B and 8B",
    model_types=("granite",),
    read_config=read_granite,
)
