"""The table of families and their traits in ``docs/models.md``: ``python -m precast.models.families.table``.

Each family reads one sample config; what its ModelConfig then says is what the table shows.
"""

from __future__ import annotations

import sys
from typing import Any

from precast.models.config import ModelConfig, MoeConfig
from precast.models.families import FAMILIES
from precast.models.families.base import Family
from precast.models.families.keys import ConfigKeys

_LAYERS = 12
# Every key that some family cannot do without.
_SAMPLE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "q_lora_rank": 64,
    "sliding_window": 1024,
    "embedding_multiplier": 2.0,
}
_NORMS = {
    "post": "norms on the blocks' outputs",
    "both": "norms before and after each block",
    "parallel": "attention and MLP side by side",
}
_QK_NORMS = {
    "head": "norm of queries and keys, a head at a time",
    "per_head": "norm of queries and keys, weights of its own for each head",
    "all": "norm of queries and keys, all heads at once",
}
_HEADER = """# Models

Made by `python -m precast.models.families.table > docs/models.md`; do not edit.

A checkpoint is a Hugging Face directory (safetensors), a hub id, a GGUF file, or a directory that
`runtime-convert` wrote. Its `model_type` chooses the family. What the table does not show is as in Llama: norms
before each block (root mean square), full attention, RoPE over halves of the whole head, a gated SiLU MLP.
Everything else that a config asks for is either among the traits below or an error that names it.

RoPE kinds, for all families: default, linear, dynamic, llama3, yarn, longrope. The frequencies of `dynamic` and
`longrope` depend on a sequence's length in the reference; here they are those of the longest context served
(`--max_model_len`), for all requests, so that a token's cached key does not depend on what came after it.

GGUF types: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K; quantised ones are dequantised by the gguf
library and cast to `--dtype`. Other types (IQ…, TQ…, MXFP4) are refused by name. `tokenizer.ggml.model` may be `llama`
or `gpt2`; the latter's `tokenizer.ggml.pre` may be `llama-bpe` (`llama3`, `llama-v3`), `qwen2`, `deepseek-r1-qwen`,
`megrez`, `smollm`, `starcoder`, `refact`, `gpt-2` or `default`, each compared in the tests with llama.cpp's definition
of it; others are refused by name.

Not implemented is Llama 4 (`llama4_text`): attention in chunks would be a second kind of mask in every attention
kernel, and the temperature of queries by position, their norm without weights after RoPE, and experts whose input
(not output) the router scales are traits that no other family has.

| family | models | `model_type` | GGUF | may differ from Llama by |
|---|---|---|---|---|
"""


def traits(config: ModelConfig) -> list[str]:
    """What distinguishes a model from Llama, in words."""
    found = [
        _NORMS.get(config.norm_placement),
        "layer norms" if config.norm_kind == "layer" else None,
        "norm weights less 1" if config.norm_offset else None,
        _QK_NORMS.get(config.qk_norm),
        "biases on queries, keys and values" if config.qkv_bias else None,
        "latent attention" if config.mla else None,
        "attention sinks" if config.attention_sinks else None,
        _window(config),
        "some layers without RoPE" if config.rope_layers and not all(config.rope_layers) else None,
        "RoPE of its own in sliding layers" if config.rope_sliding else None,
        "RoPE over part of the head" if config.rope.rotary_dim and not config.mla else None,
        "RoPE over interleaved pairs" if config.rope.interleaved else None,
        "soft cap on attention" if config.attention_soft_cap else None,
        "soft cap on logits" if config.logits_soft_cap else None,
        {"gelu_tanh": "GELU", "swiglu_clamped": "clamped SwiGLU"}.get(config.activation),
        "multipliers" if config.embedding_multiplier != 1 or config.logits_multiplier != 1 else None,
        _mixture(config.moe) if config.moe else None,
    ]
    return [trait for trait in found if trait]


def _window(config: ModelConfig) -> str | None:
    sliding = config.layer_kinds.count("sliding")
    if not sliding:
        return None
    return "sliding window" if sliding == config.num_layers else f"sliding window in {sliding} of {_LAYERS} layers"


def _mixture(moe: MoeConfig) -> str:
    parts = [{"softmax": "softmax", "softmax_chosen": "softmax over the chosen", "sigmoid": "sigmoid"}[moe.router]]
    parts += ["weights normalised"] if moe.normalize else []
    parts += ["groups"] if moe.num_groups > 1 else []
    parts += ["correction bias"] if moe.correction_bias else []
    parts += ["a shared expert"] if moe.shared_intermediate_size else []
    return f"mixture of experts ({', '.join(parts)})"


def _row(family: Family) -> str:
    types = family.model_types
    config = family.read_config(ConfigKeys({**_SAMPLE, "model_type": types[0]}, "sample"))
    gguf = ", ".join(f"`{name}`" for name in family.gguf.architectures) if family.gguf else ""
    cells = [family.name, family.examples, ", ".join(f"`{name}`" for name in types), gguf, "; ".join(traits(config))]
    return "| " + " | ".join(cells) + " |\n"


def markdown() -> str:
    """The whole of ``docs/models.md``."""
    return _HEADER + "".join(_row(family) for family in FAMILIES)


if __name__ == "__main__":
    sys.stdout.write(markdown())
