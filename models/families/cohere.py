"""Cohere's Command R: attention and MLP side by side, layer norms, interleaved RoPE."""

from __future__ import annotations

from typing import Any

from precast.models.config import ModelConfig
from precast.models.families.base import Family, attention_biases, sizes, sliding_layers
from precast.models.families.keys import ConfigKeys
from precast.models.families.rope import read_rope


def _common(keys: ConfigKeys) -> dict[str, Any]:
    traits = sizes(keys, eps=1e-5, eps_key="layer_norm_eps", tied=True)
    return {
        **traits,
        "rope": read_rope(keys, traits["head_dim"], theta=10000.0, interleaved=True),
        "activation": keys.activation(),
        "norm_kind": "layer",
        "norm_placement": "parallel",
        **attention_biases(keys),
        "logits_multiplier": keys.number("logit_scale", 0.0625),
    }


def read_cohere(keys: ConfigKeys) -> ModelConfig:
    normed = keys.boolean("use_qk_norm", False)
    return ModelConfig(**_common(keys), qk_norm="per_head" if normed else "none")


def read_cohere2(keys: ConfigKeys) -> ModelConfig:
    traits = _common(keys)
    pattern = keys.integer("sliding_window_pattern", keys.integer("_sliding_window_pattern", 4))
    window = keys.integer("sliding_window", 4096)
    kinds = sliding_layers(keys, traits["num_layers"], lambda layer: (layer + 1) % pattern != 0, window)
    turning = tuple(kind == "sliding" for kind in kinds.get("layer_kinds", ("full",) * traits["num_layers"]))
    return ModelConfig(**traits, **kinds, rope_layers=turning)


COHERE = Family(name="Command R", examples="Command R, Command R+", model_types=("cohere",), read_config=read_cohere)
COHERE2 = Family(
    name="Command R7B",
    examples="Command R7B, Command A",
    model_types=("cohere2",),
    read_config=read_cohere2,
)
