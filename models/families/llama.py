"""Llama 2 and 3, and the many models with its shape: SmolLM2, Yi, Mistral, SmolLM3."""

from __future__ import annotations

from precast.models.config import ModelConfig
from precast.models.families.base import Family, GgufNames, sizes
from precast.models.families.keys import ConfigKeys
from precast.models.families.rope import read_rope


def read_llama(keys: ConfigKeys) -> ModelConfig:
    traits = sizes(keys, eps=1e-6)
    bias = keys.boolean("attention_bias", False)
    return ModelConfig(
        **traits,
        rope=read_rope(keys, traits["head_dim"], theta=10000.0),
        activation=keys.activation(),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.boolean("mlp_bias", False),
    )


LLAMA = Family(
    name="Llama",
    examples="Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, Yi",
    model_types=("llama",),
    read_config=read_llama,
    gguf=GgufNames({"llama": "llama"}, permuted=True),
)
