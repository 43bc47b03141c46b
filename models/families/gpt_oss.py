"""gpt-oss: attention sinks, clamped SwiGLU, biases everywhere, experts in MXFP4."""

from __future__ import annotations

from precast.models.config import ModelConfig, MoeConfig
from precast.models.families.base import Family, Stored, rope_and_sizes, sliding_layers
from precast.models.families.keys import ConfigKeys

_MLP = "model.layers.{i}.mlp."


def read_gpt_oss(keys: ConfigKeys) -> ModelConfig:
    traits = rope_and_sizes(keys, eps=1e-5, theta=150000.0, head_dim=64)
    num_layers = traits["num_layers"]
    quantization = keys.take("quantization_config", None)
    if quantization is not None and quantization.get("quant_method") != "mxfp4":
        raise keys.error("quantization_config", "only mxfp4 is implemented")
    keys.require("hidden_act", "silu", "silu")
    keys.require("swiglu_alpha", 1.702, 1.702)
    keys.ignore("initial_context_length", "experts_per_token")
    bias = keys.boolean("attention_bias", True)
    moe = MoeConfig(
        num_experts=keys.integer("num_local_experts"),
        experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=traits["intermediate_size"],
        layers=(True,) * num_layers,
        router="softmax_chosen",
        router_bias=True,
        expert_bias=True,
    )
    return ModelConfig(
        **traits,
        **sliding_layers(keys, num_layers, lambda layer: layer % 2 == 0, keys.integer("sliding_window", 128)),
        activation="swiglu_clamped",
        activation_limit=keys.number("swiglu_limit", 7.0),
        attention_sinks=True,
        qkv_bias=bias,
        output_bias=bias,
        moe=moe,
    )


def _experts(part: str, name: str, every: tuple[int, int] | None) -> dict[str, Stored]:
    return {
        f"layers.{{i}}.moe.{part}.weight": Stored(f"{_MLP}experts.{name}", transposed=True, every=every),
        f"layers.{{i}}.moe.{part}.bias": Stored(f"{_MLP}experts.{name}_bias", every=every),
    }


GPT_OSS = Family(
    name="gpt-oss",
    examples="gpt-oss-20b, gpt-oss-120b",
    model_types=("gpt_oss",),
    read_config=read_gpt_oss,
    tensors={
        "layers.{i}.attn.sinks": "model.layers.{i}.self_attn.sinks",
        "layers.{i}.moe.router.weight": f"{_MLP}router.weight",
        "layers.{i}.moe.router.bias": f"{_MLP}router.bias",
        **_experts("gate", "gate_up_proj", (0, 2)),
        **_experts("up", "gate_up_proj", (1, 2)),
        **_experts("down", "down_proj", None),
    },
)
