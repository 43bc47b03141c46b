"""Granite 3: Llama's shape with multipliers."""

from __future__ import annotations

from precast.models.config import ModelConfig
from precast.models.families.base import Family, rope_and_sizes
from precast.models.families.keys import ConfigKeys


def read_granite(keys: ConfigKeys) -> ModelConfig:
    bias = keys.boolean("attention_bias", False)
    return ModelConfig(
        **rope_and_sizes(keys, eps=1e-6),
        activation=keys.activation(),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.boolean("mlp_bias", False),
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
