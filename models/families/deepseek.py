"""DeepSeek-V2 and V3: latent attention, shared and routed experts, group-limited routing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from precast.models.config import MlaConfig, ModelConfig, MoeConfig
from precast.models.families.base import Family, sizes
from precast.models.families.keys import ConfigKeys
from precast.models.families.rope import read_rope

_ATTENTION = "model.layers.{i}.self_attn."
_MLP = "model.layers.{i}.mlp."
_TENSORS = {
    "layers.{i}.attn.q_down.weight": f"{_ATTENTION}q_a_proj.weight",
    "layers.{i}.attn.q_down_norm.weight": f"{_ATTENTION}q_a_layernorm.weight",
    "layers.{i}.attn.q_up.weight": f"{_ATTENTION}q_b_proj.weight",
    "layers.{i}.attn.kv_down.weight": f"{_ATTENTION}kv_a_proj_with_mqa.weight",
    "layers.{i}.attn.kv_down_norm.weight": f"{_ATTENTION}kv_a_layernorm.weight",
    "layers.{i}.attn.kv_up.weight": f"{_ATTENTION}kv_b_proj.weight",
    "layers.{i}.moe.correction_bias": f"{_MLP}gate.e_score_correction_bias",
    **{
        f"layers.{{i}}.moe.shared.{part}.weight": f"{_MLP}shared_experts.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}


def _common(keys: ConfigKeys, interleaved: bool) -> dict[str, Any]:
    nope, turning = keys.integer("qk_nope_head_dim", 128), keys.integer("qk_rope_head_dim", 64)
    keys.ignore("head_dim", "qk_head_dim")
    traits = sizes(keys, eps=1e-6, head_dim=nope + turning, own_head_dim=False)
    keys.require("attention_bias", False, False)
    keys.require("mlp_bias", False, False)
    rope = dataclasses.replace(read_rope(keys, turning, theta=10000.0, interleaved=interleaved), rotary_dim=turning)
    scale = (nope + turning) ** -0.5
    stretch = (keys.take("rope_parameters", None) or keys.take("rope_scaling", None) or {}).get("mscale_all_dim")
    if rope.kind != "default" and stretch and rope.factor > 1:
        scale *= (0.1 * stretch * math.log(rope.factor) + 1.0) ** 2
    return {
        **traits,
        "rope": rope,
        "activation": keys.activation(),
        "attention_scale": scale,
        "mla": MlaConfig(
            q_lora_rank=keys.integer("q_lora_rank", None),
            kv_lora_rank=keys.integer("kv_lora_rank", 512),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=turning,
            v_head_dim=keys.integer("v_head_dim", 128),
        ),
    }


def _experts(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
    dense, step = keys.integer("first_k_dense_replace", 0, low=0), keys.integer("moe_layer_freq", 1)
    width = keys.integer("moe_intermediate_size")
    return {
        "num_experts": keys.integer("n_routed_experts"),
        "experts_per_token": keys.integer("num_experts_per_tok"),
        "intermediate_size": width,
        "layers": tuple(layer >= dense and layer % step == 0 for layer in range(num_layers)),
        "scaling": keys.number("routed_scaling_factor", 1.0),
        "shared_intermediate_size": width * keys.integer("n_shared_experts", 0, low=0),
    }


def read_deepseek_v2(keys: ConfigKeys) -> ModelConfig:
    traits = _common(keys, interleaved=True)
    keys.require("norm_topk_prob", False, False)
    keys.require("scoring_func", "softmax", "softmax")
    method = keys.take("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.error("topk_method", "only greedy and group_limited_greedy are implemented")
    groups, kept = keys.integer("n_group", 1), keys.integer("topk_group", 1)
    limited = {"num_groups": groups, "groups_kept": kept} if method == "group_limited_greedy" else {}
    return ModelConfig(**traits, moe=MoeConfig(**_experts(keys, traits["num_layers"]), **limited))


def read_deepseek_v3(keys: ConfigKeys) -> ModelConfig:
    traits = _common(keys, interleaved=keys.boolean("rope_interleave", True))
    keys.require("scoring_func", "sigmoid", "sigmoid")
    keys.require("topk_method", "noaux_tc", "noaux_tc")
    # Layers after the last that draft further tokens; they are not loaded.
    keys.ignore("num_nextn_predict_layers", "num_mtp_layers")
    moe = MoeConfig(
        **_experts(keys, traits["num_layers"]),
        router="sigmoid",
        normalize=keys.boolean("norm_topk_prob", True),
        num_groups=keys.integer("n_group", 8),
        groups_kept=keys.integer("topk_group", 4),
        group_score="top2",
        correction_bias=True,
    )
    return ModelConfig(**traits, moe=moe)


DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    examples="DeepSeek-V2, V2-Lite, Coder-V2",
    model_types=("deepseek_v2",),
    read_config=read_deepseek_v2,
    tensors=_TENSORS,
)
DEEPSEEK_V3 = Family(
    name="DeepSeek-V3",
    examples="DeepSeek-V3 and R1, Moonlight, as bfloat16",
    model_types=("deepseek_v3",),
    read_config=read_deepseek_v3,
    tensors=_TENSORS,
    skipped=(r"model\.layers\.61\..*",),
)
