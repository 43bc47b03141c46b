"""GLM-4: partial RoPE over interleaved pairs, and in the newer models norms on both sides."""

from __future__ import annotations

from precast.models.config import ModelConfig
from precast.models.families.base import FUSED_GATE_UP, Family, sizes
from precast.models.families.keys import ConfigKeys
from precast.models.families.rope import read_rope

_LAYER = "model.layers.{i}."


def _read(keys: ConfigKeys, norm_placement) -> ModelConfig:
    traits = sizes(keys, eps=1.5625e-7, head_dim=128)
    return ModelConfig(
        **traits,
        rope=read_rope(keys, traits["head_dim"], theta=10000.0, partial=0.5, interleaved=True),
        activation=keys.activation(),
        norm_placement=norm_placement,
        qkv_bias=keys.boolean("attention_bias", True),
    )


def read_glm(keys: ConfigKeys) -> ModelConfig:
    return _read(keys, "pre")


def read_glm4(keys: ConfigKeys) -> ModelConfig:
    return _read(keys, "both")


GLM = Family(
    name="GLM-4 (2024)",
    examples="glm-4-9b-hf, glm-edge",
    model_types=("glm",),
    read_config=read_glm,
    tensors=FUSED_GATE_UP,
)
GLM4 = Family(
    name="GLM-4 (2025)",
    examples="GLM-4-9B-0414, GLM-4-32B-0414",
    model_types=("glm4",),
    read_config=read_glm4,
    tensors={
        **FUSED_GATE_UP,
        "layers.{i}.attn_post_norm.weight": f"{_LAYER}post_self_attn_layernorm.weight",
        "layers.{i}.mlp_post_norm.weight": f"{_LAYER}post_mlp_layernorm.weight",
    },
)
