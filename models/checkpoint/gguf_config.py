"""GGUF metadata said in the words of ``config.json``, so that each family reads one form only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precast.models.checkpoint.base import Header
from precast.models.errors import CheckpointError
from precast.models.families import FAMILIES
from precast.models.families.base import Family, GgufNames

# Metadata key, without the architecture in front -> key of config.json.
_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_READ_HERE = ("vocab_size", "attention.value_length", "rope.dimension_count")
_SCALING = "rope.scaling."


def family_of(metadata: Mapping[str, Any], where: str) -> tuple[Family, GgufNames, str]:
    """(family, its GGUF names, architecture) of a file."""
    architecture = metadata.get("general.architecture")
    for family in FAMILIES:
        if family.gguf is not None and architecture in family.gguf.architectures:
            return family, family.gguf, str(architecture)
    known = ", ".join(sorted(name for family in FAMILIES if family.gguf for name in family.gguf.architectures))
    raise CheckpointError(
        f"{where}: general.architecture is {architecture!r}: not implemented for GGUF; implemented: {known}"
    )


def as_config(
    metadata: Mapping[str, Any], headers: Mapping[str, Header], names: GgufNames, architecture: str, where: str
) -> dict[str, Any]:
    """The ``config.json`` that the metadata amount to.

    Metadata that no family knows keep their own name, so that reading the config reports them.
    """
    prefix = architecture + "."
    ours = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    embedding = headers.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{where}: 1 tensor is missing: token_embd.weight")
    config: dict[str, Any] = {
        "model_type": names.architectures[architecture],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in headers,
        **names.constants,
    }
    for key, value in ours.items():
        if key not in _READ_HERE and not key.startswith(_SCALING):
            config[_KEYS.get(key, key)] = value
    scaling = {key.removeprefix(_SCALING): value for key, value in ours.items() if key.startswith(_SCALING)}
    if scaling.get("type", "none") != "none":
        config["rope_scaling"] = {
            "rope_type": scaling["type"],
            "factor": scaling.get("factor"),
            "original_max_position_embeddings": scaling.get("original_context_length"),
            "attention_factor": scaling.get("attn_factor"),
        }
    if "blk.0.attn_q.bias" in headers:
        config["attention_bias"] = True
    _set_head_dim(config, ours, where)
    return config


def _set_head_dim(config: dict[str, Any], ours: Mapping[str, Any], where: str) -> None:
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise CheckpointError(f"{where}: attention.head_count is {heads!r}: it must be an integer of at least 1")
    head_dim = config.setdefault("head_dim", config.get("hidden_size", 0) // heads)
    if ours.get("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{where}: attention.value_length is {ours['attention.value_length']}: "
            f"only that of the keys, {head_dim}, is implemented"
        )
    turning = ours.get("rope.dimension_count", head_dim)
    if turning != head_dim:
        config["partial_rotary_factor"] = turning / head_dim
