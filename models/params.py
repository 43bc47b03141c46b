"""Every weight of a model, declared once: name, shape, logical axes.

Initialisation, sharding, loading and the accounting of checkpoints derive from this table.  Dense
weights are ``[out, in]``; experts are stacked, ``[experts, out, in]``.
"""

from __future__ import annotations

import dataclasses

from precast.models.config import MlaConfig, ModelConfig, MoeConfig


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape of an array and, for each dimension, its logical axis (None: never sharded)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def param_specs(config: ModelConfig) -> dict[str, ArraySpec]:
    """Canonical name -> ArraySpec of every parameter, in the order of the forward pass."""
    hidden = config.hidden_size
    specs = {"embed.weight": ArraySpec((config.vocab_size, hidden), ("vocab", "embed"))}
    for layer in range(config.num_layers):
        for name, spec in layer_specs(config, layer).items():
            specs[f"layers.{layer}.{name}"] = spec
    specs["final_norm.weight"] = ArraySpec((hidden,), ("embed",))
    if not config.tie_embeddings:
        specs["head.weight"] = ArraySpec((config.vocab_size, hidden), ("vocab", "embed"))
    return specs


def layer_specs(config: ModelConfig, layer: int) -> dict[str, ArraySpec]:
    """The parameters of one layer, without the ``layers.{i}.`` in front."""
    norm = ArraySpec((config.hidden_size,), ("embed",))
    specs: dict[str, ArraySpec] = {}
    if config.norm_placement != "post":
        specs["attn_norm.weight"] = norm
    specs |= _mla_specs(config, config.mla) if config.mla else _attention_specs(config)
    if config.norm_placement in ("post", "both"):
        specs["attn_post_norm.weight"] = norm
    if config.norm_placement in ("pre", "both"):
        specs["mlp_norm.weight"] = norm
    if config.moe is not None and config.moe.layers[layer]:
        specs |= _moe_specs(config, config.moe)
    else:
        specs |= _mlp_specs("mlp", config.hidden_size, config.intermediate_size, config.mlp_bias)
    if config.norm_placement in ("post", "both"):
        specs["mlp_post_norm.weight"] = norm
    return specs


def _dense(out: int, out_axis: str | None, into: int, in_axis: str | None) -> ArraySpec:
    return ArraySpec((out, into), (out_axis, in_axis))


def _attention_specs(config: ModelConfig) -> dict[str, ArraySpec]:
    hidden, head_dim = config.hidden_size, config.head_dim
    widths = {
        "q": (config.num_heads, "heads"),
        "k": (config.num_kv_heads, "kv_heads"),
        "v": (config.num_kv_heads, "kv_heads"),
    }
    specs: dict[str, ArraySpec] = {}
    for side, (heads, axis) in widths.items():
        specs[f"attn.{side}.weight"] = _dense(heads * head_dim, axis, hidden, "embed")
        if config.qkv_bias:
            specs[f"attn.{side}.bias"] = ArraySpec((heads * head_dim,), (axis,))
    for side in ("q", "k"):
        heads, axis = widths[side]
        if config.qk_norm == "head":
            specs[f"attn.{side}_norm.weight"] = ArraySpec((head_dim,), (None,))
        elif config.qk_norm == "per_head":
            specs[f"attn.{side}_norm.weight"] = ArraySpec((heads, head_dim), (axis, None))
        elif config.qk_norm == "all":
            specs[f"attn.{side}_norm.weight"] = ArraySpec((heads * head_dim,), (axis,))
    if config.attention_sinks:
        specs["attn.sinks"] = ArraySpec((config.num_heads,), ("heads",))
    return specs | _output_specs(config, config.num_heads * head_dim)


def _output_specs(config: ModelConfig, width: int) -> dict[str, ArraySpec]:
    specs = {"attn.o.weight": _dense(config.hidden_size, "embed", width, "heads")}
    if config.output_bias:
        specs["attn.o.bias"] = ArraySpec((config.hidden_size,), ("embed",))
    return specs


def _mla_specs(config: ModelConfig, mla: MlaConfig) -> dict[str, ArraySpec]:
    hidden, heads = config.hidden_size, config.num_heads
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    latent = mla.kv_lora_rank
    if mla.q_lora_rank is None:
        specs = {"attn.q.weight": _dense(queries, "heads", hidden, "embed")}
    else:
        specs = {
            "attn.q_down.weight": _dense(mla.q_lora_rank, None, hidden, "embed"),
            "attn.q_down_norm.weight": ArraySpec((mla.q_lora_rank,), (None,)),
            "attn.q_up.weight": _dense(queries, "heads", mla.q_lora_rank, None),
        }
    specs["attn.kv_down.weight"] = _dense(latent + mla.qk_rope_head_dim, None, hidden, "embed")
    specs["attn.kv_down_norm.weight"] = ArraySpec((latent,), (None,))
    specs["attn.kv_up.weight"] = _dense(heads * (mla.qk_nope_head_dim + mla.v_head_dim), "heads", latent, None)
    return specs | _output_specs(config, heads * mla.v_head_dim)


def _mlp_specs(prefix: str, hidden: int, width: int, bias: bool, axis: str = "mlp") -> dict[str, ArraySpec]:
    specs: dict[str, ArraySpec] = {}
    for part in ("gate", "up"):
        specs[f"{prefix}.{part}.weight"] = _dense(width, axis, hidden, "embed")
        if bias:
            specs[f"{prefix}.{part}.bias"] = ArraySpec((width,), (axis,))
    specs[f"{prefix}.down.weight"] = _dense(hidden, "embed", width, axis)
    if bias:
        specs[f"{prefix}.down.bias"] = ArraySpec((hidden,), ("embed",))
    return specs


def _moe_specs(config: ModelConfig, moe: MoeConfig) -> dict[str, ArraySpec]:
    hidden = config.hidden_size
    specs = {"moe.router.weight": _dense(moe.num_experts, None, hidden, "embed")}
    if moe.router_bias:
        specs["moe.router.bias"] = ArraySpec((moe.num_experts,), (None,))
    if moe.correction_bias:
        specs["moe.correction_bias"] = ArraySpec((moe.num_experts,), (None,))
    for name, spec in _mlp_specs("moe", hidden, moe.intermediate_size, moe.expert_bias, "expert_mlp").items():
        specs[name] = ArraySpec((moe.num_experts, *spec.shape), ("experts", *spec.axes))
    if moe.shared_intermediate_size:
        specs |= _mlp_specs("moe.shared", hidden, moe.shared_intermediate_size, False)
    if moe.shared_gate:
        specs["moe.shared_gate.weight"] = _dense(1, None, hidden, "embed")
    return specs
