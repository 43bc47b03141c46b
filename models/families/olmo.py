"""OLMo 2 and OLMoE."""

from __future__ import annotations

from precast.models.config import ModelConfig, MoeConfig
from precast.models.families.base import Family, attention_biases, rope_and_sizes
from precast.models.families.keys import ConfigKeys

_LAYER = "model.layers.{i}."


def read_olmo2(keys: ConfigKeys) -> ModelConfig:
    return ModelConfig(
        **rope_and_sizes(keys, eps=1e-5),
        activation=keys.activation(),
        norm_placement="post",
        qk_norm="all",
        **attention_biases(keys),
    )


def read_olmoe(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-5)
    keys.require("clip_qkv", None, None)
    moe = MoeConfig(
        num_experts=keys.integer("num_experts"),
        experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=traits["intermediate_size"],
        layers=(True,) * traits["num_layers"],
        normalize=keys.boolean("norm_topk_prob", False),
    )
    return ModelConfig(**traits, activation=keys.activation(), qk_norm="all", **attention_biases(keys), moe=moe)


OLMO2 = Family(
    name="OLMo 2",
    examples="OLMo 2 1B to 32B",
    model_types=("olmo2",),
    read_config=read_olmo2,
    tensors={
        "layers.{i}.attn_post_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
        "layers.{i}.mlp_post_norm.weight": f"{_LAYER}post_feedforward_layernorm.weight",
    },
)
OLMOE = Family(name="OLMoE", examples="OLMoE 1B-7B", model_types=("olmoe",), read_config=read_olmoe)
