"""Mixtral: Mistral with a mixture in every layer."""

from __future__ import annotations

from precast.models.config import ModelConfig, MoeConfig
from precast.models.families.base import Family, rope_and_sizes, sliding_layers
from precast.models.families.keys import ConfigKeys

_MOE = "model.layers.{i}.block_sparse_moe."


def read_mixtral(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-5, theta=1000000.0)
    window = keys.integer("sliding_window", None)
    moe = MoeConfig(
        num_experts=keys.integer("num_local_experts", 8),
        experts_per_token=keys.integer("num_experts_per_tok", 2),
        intermediate_size=traits["intermediate_size"],
        layers=(True,) * traits["num_layers"],
        normalize=True,
    )
    return ModelConfig(
        **traits,
        **sliding_layers(keys, traits["num_layers"], lambda _: True, window),
        activation=keys.activation(),
        moe=moe,
    )


MIXTRAL = Family(
    name="Mixtral",
    examples="Mixtral 8x7B, 8x22B",
    model_types=("mixtral",),
    read_config=read_mixtral,
    tensors={
        "layers.{i}.moe.router.weight": f"{_MOE}gate.weight",
        "layers.{i}.moe.gate.weight": f"{_MOE}experts.{{e}}.w1.weight",
        "layers.{i}.moe.down.weight": f"{_MOE}experts.{{e}}.w2.weight",
        "layers.{i}.moe.up.weight": f"{_MOE}experts.{{e}}.w3.weight",
    },
)
