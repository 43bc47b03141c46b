"""Llama 2 and 3 and the models with its shape: SmolLM2, Yi, Mistral, SmolLM3."""

from __future__ import annotations

from precast.models.config import ModelConfig
from precast.models.families.base import Family, GgufNames, attention_biases, rope_and_sizes, sliding_layers
from precast.models.families.keys import ConfigKeys


def read_llama(keys: ConfigKeys) -> ModelConfig:
    return ModelConfig(
        **rope_and_sizes(keys, eps=1e-6),
        activation=keys.activation(),
        **attention_biases(keys),
        mlp_bias=keys.boolean("mlp_bias", False),
    )


def read_mistral(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-6)
    window = keys.integer("sliding_window", None)
    return ModelConfig(
        **traits, **sliding_layers(keys, traits["num_layers"], lambda _: True, window), activation=keys.activation()
    )


def read_smollm3(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-6, theta=2000000.0, tied=True)
    num_layers = traits["num_layers"]
    interval = keys.integer("no_rope_layer_interval", 4)
    # Despite its name, 1 marks a layer with RoPE.
    turning = keys.sequence("no_rope_layers", num_layers) or [(layer + 1) % interval for layer in range(num_layers)]
    window = keys.integer("sliding_window", None) if keys.boolean("use_sliding_window", False) else None
    return ModelConfig(
        **traits,
        **sliding_layers(keys, num_layers, lambda layer: not turning[layer], window),
        rope_layers=tuple(bool(flag) for flag in turning),
        activation=keys.activation(),
        **attention_biases(keys),
        mlp_bias=keys.boolean("mlp_bias", False),
    )


LLAMA = Family(
    name="Llama",
    examples="Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; Yi",
    model_types=("llama",),
    read_config=read_llama,
    gguf=GgufNames({"llama": "llama"}, permuted=True),
)
MISTRAL = Family(
    name="Mistral",
    examples="Mistral 7B, Mistral Nemo",
    model_types=("mistral",),
    read_config=read_mistral,
)
SMOLLM3 = Family(
    name="SmolLM3",
    examples="SmolLM3 3B",
    model_types=("smollm3",),
    read_config=read_smollm3,
)
