"""Gemma 2 and the text part of Gemma 3."""

from __future__ import annotations

from typing import Any

from precast.models.config import ModelConfig
from precast.models.families.base import Family, attention_biases, sizes, sliding_layers
from precast.models.families.keys import ConfigKeys
from precast.models.families.rope import read_rope

_LAYER = "model.layers.{i}."
_TENSORS = {
    "layers.{i}.attn_post_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
    "layers.{i}.mlp_norm.weight": f"{_LAYER}pre_feedforward_layernorm.weight",
    "layers.{i}.mlp_post_norm.weight": f"{_LAYER}post_feedforward_layernorm.weight",
}


def _common(keys: ConfigKeys, traits: dict[str, Any]) -> dict[str, Any]:
    # Some configs name the activation twice; the second is the one that counts.
    keys.ignore("hidden_act")
    keys.require("use_bidirectional_attention", False, False)
    return {
        **traits,
        "activation": keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        "norm_offset": True,
        "norm_placement": "both",
        "attention_scale": keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "embedding_multiplier": traits["hidden_size"] ** 0.5,
        "rounds_embedding_multiplier": True,
        **attention_biases(keys),
    }


def read_gemma2(keys: ConfigKeys) -> ModelConfig:
    traits = sizes(keys, eps=1e-6, head_dim=256, tied=True)
    window = keys.integer("sliding_window", 4096)
    return ModelConfig(
        **_common(keys, traits),
        **sliding_layers(keys, traits["num_layers"], lambda layer: layer % 2 == 0, window),
        rope=read_rope(keys, traits["head_dim"], theta=10000.0),
        attention_soft_cap=keys.number("attn_logit_softcapping", 50.0),
        logits_soft_cap=keys.number("final_logit_softcapping", 30.0),
    )


# The published configs of Gemma 3 leave out what equals the defaults of its first size.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def read_gemma3(keys: ConfigKeys) -> ModelConfig:
    traits = sizes(keys, eps=1e-6, head_dim=256, tied=True, defaults=_GEMMA3_DEFAULTS)
    pattern = keys.integer("sliding_window_pattern", keys.integer("_sliding_window_pattern", 6))
    window = keys.integer("sliding_window", 4096)
    head_dim = traits["head_dim"]
    return ModelConfig(
        **_common(keys, traits),
        **sliding_layers(keys, traits["num_layers"], lambda layer: (layer + 1) % pattern != 0, window),
        rope=read_rope(keys, head_dim, theta=1000000.0, layer_type="full_attention"),
        rope_sliding=read_rope(
            keys,
            head_dim,
            theta=10000.0,
            layer_type="sliding_attention",
            theta_key="rope_local_base_freq",
            scaled=False,
        ),
        qk_norm="head",
        attention_soft_cap=keys.number("attn_logit_softcapping", None),
        logits_soft_cap=keys.number("final_logit_softcapping", None),
    )


GEMMA2 = Family(
    name="Gemma 2",
    examples="Gemma 2 2B, 9B, 27B",
    model_types=("gemma2",),
    read_config=read_gemma2,
    tensors=_TENSORS,
)
GEMMA3 = Family(
    name="Gemma 3",
    examples="Gemma 3 270M, 1B; the text part of 4B, 12B, 27B",
    model_types=("gemma3_text", "gemma3"),
    read_config=read_gemma3,
    tensors=_TENSORS,
    skipped=(r"vision_tower\..*", r"multi_modal_projector\..*"),
)
