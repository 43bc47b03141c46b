"""Phi-3 and Phi-4: Llama's shape with fused tensors and longrope."""

from __future__ import annotations

from precast.models.config import ModelConfig
from precast.models.families.base import FUSED_GATE_UP, Family, Stored, rope_and_sizes, sliding_layers
from precast.models.families.keys import ConfigKeys

_QKV = tuple(f"layers.{{i}}.attn.{side}.weight" for side in "qkv")


def read_phi3(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-5)
    keys.require("attention_bias", False, False)
    keys.require("mlp_bias", False, False)
    window = keys.integer("sliding_window", None)
    return ModelConfig(
        **traits, **sliding_layers(keys, traits["num_layers"], lambda _: True, window), activation=keys.activation()
    )


PHI3 = Family(
    name="Phi-3",
    examples="Phi-3 mini and medium, Phi-4, Phi-4 mini",
    model_types=("phi3",),
    read_config=read_phi3,
    tensors={
        **{part: Stored("model.layers.{i}.self_attn.qkv_proj.weight", fused=_QKV) for part in _QKV},
        **FUSED_GATE_UP,
    },
)
