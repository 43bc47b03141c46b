"""Qwen2, Qwen2.5, Qwen3 and their mixtures."""

from __future__ import annotations

from typing import Any

from precast.models.config import ModelConfig, MoeConfig
from precast.models.families.base import Family, GgufNames, attention_biases, rope_and_sizes, sliding_layers
from precast.models.families.keys import ConfigKeys

_MLP = "model.layers.{i}.mlp."


def _window(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
    window, first = keys.take("sliding_window", None), keys.integer("max_window_layers", num_layers, low=0)
    if not keys.boolean("use_sliding_window", False):
        window = None
    return sliding_layers(keys, num_layers, lambda layer: layer >= first, window)


def read_qwen2(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-6)
    keys.require("attention_bias", True, True)
    return ModelConfig(**traits, **_window(keys, traits["num_layers"]), activation=keys.activation(), qkv_bias=True)


def read_qwen3(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-6, head_dim=128)
    return ModelConfig(
        **traits,
        **_window(keys, traits["num_layers"]),
        activation=keys.activation(),
        qk_norm="head",
        **attention_biases(keys),
    )


def _mixture(keys: ConfigKeys, num_layers: int, **shared: Any) -> MoeConfig:
    keys.ignore("num_local_experts")
    dense, step = keys.take("mlp_only_layers", []), keys.integer("decoder_sparse_step", 1)
    return MoeConfig(
        num_experts=keys.integer("num_experts", None) or keys.integer("num_local_experts"),
        experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=keys.integer("moe_intermediate_size"),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        normalize=keys.boolean("norm_topk_prob", False),
        **shared,
    )


def read_qwen2_moe(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-6)
    # Sliding layers here follow a rule of their own; no published checkpoint switches them on.
    keys.require("use_sliding_window", False, False)
    keys.ignore("sliding_window", "max_window_layers", "layer_types")
    shared = keys.integer("shared_expert_intermediate_size")
    return ModelConfig(
        **traits,
        activation=keys.activation(),
        qkv_bias=keys.boolean("qkv_bias", True),
        moe=_mixture(keys, traits["num_layers"], shared_intermediate_size=shared, shared_gate=True),
    )


def read_qwen3_moe(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-6)
    window = keys.take("sliding_window", None) if keys.boolean("use_sliding_window", False) else None
    keys.ignore("max_window_layers")
    return ModelConfig(
        **traits,
        **sliding_layers(keys, traits["num_layers"], lambda _: True, window),
        activation=keys.activation(),
        qk_norm="head",
        **attention_biases(keys),
        moe=_mixture(keys, traits["num_layers"]),
    )


QWEN2 = Family(
    name="Qwen2",
    examples="Qwen2, Qwen2.5",
    model_types=("qwen2",),
    read_config=read_qwen2,
    gguf=GgufNames({"qwen2": "qwen2"}),
)
QWEN3 = Family(
    name="Qwen3",
    examples="Qwen3 0.6B to 32B",
    model_types=("qwen3",),
    read_config=read_qwen3,
    gguf=GgufNames({"qwen3": "qwen3"}),
)
QWEN2_MOE = Family(
    name="Qwen2-MoE",
    examples="Qwen1.5-MoE, Qwen2-57B-A14B",
    model_types=("qwen2_moe",),
    read_config=read_qwen2_moe,
    tensors={
        **{
            f"layers.{{i}}.moe.shared.{part}.weight": f"{_MLP}shared_expert.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
        "layers.{i}.moe.shared_gate.weight": f"{_MLP}shared_expert_gate.weight",
    },
)
QWEN3_MOE = Family(
    name="Qwen3-MoE",
    examples="Qwen3-30B-A3B, Qwen3-235B-A22B",
    model_types=("qwen3_moe",),
    read_config=read_qwen3_moe,
    gguf=GgufNames({"qwen3moe": "qwen3_moe"}, constants={"norm_topk_prob": True}),
)
