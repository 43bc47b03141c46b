"""From a family's table of names to where each parameter lies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from precast.models.config import ModelConfig
from precast.models.families.base import Source, Stored, Template
from precast.models.params import ArraySpec, param_specs

_ATTENTION = "model.layers.{i}.self_attn."
_MLP = "model.layers.{i}.mlp."

HUGGING_FACE: Mapping[str, Template] = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    **{
        f"layers.{{i}}.attn.{side}.{kind}": f"{_ATTENTION}{side}_proj.{kind}"
        for side in "qkvo"
        for kind in ("weight", "bias")
    },
    **{f"layers.{{i}}.attn.{side}_norm.weight": f"{_ATTENTION}{side}_norm.weight" for side in "qk"},
    **{
        f"layers.{{i}}.mlp.{part}.{kind}": f"{_MLP}{part}_proj.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    "layers.{i}.moe.router.weight": f"{_MLP}gate.weight",
    **{f"layers.{{i}}.moe.{part}.weight": f"{_MLP}experts.{{e}}.{part}_proj.weight" for part in ("gate", "up", "down")},
}

GGUF: Mapping[str, Template] = {
    "embed.weight": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "layers.{i}.attn_norm.weight": "blk.{i}.attn_norm.weight",
    "layers.{i}.mlp_norm.weight": "blk.{i}.ffn_norm.weight",
    **{
        f"layers.{{i}}.attn.{side}.{kind}": f"blk.{{i}}.attn_{side}.{kind}"
        for side in "qkv"
        for kind in ("weight", "bias")
    },
    **{f"layers.{{i}}.attn.o.{kind}": f"blk.{{i}}.attn_output.{kind}" for kind in ("weight", "bias")},
    **{f"layers.{{i}}.attn.{side}_norm.weight": f"blk.{{i}}.attn_{side}_norm.weight" for side in "qk"},
    **{
        f"layers.{{i}}.mlp.{part}.{kind}": f"blk.{{i}}.ffn_{part}.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    "layers.{i}.moe.router.weight": "blk.{i}.ffn_gate_inp.weight",
    **{f"layers.{{i}}.moe.{part}.weight": f"blk.{{i}}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
}


def sources(config: ModelConfig, templates: Mapping[str, Template]) -> dict[str, Source]:
    """Canonical name -> Source for every parameter of the model."""
    specs = param_specs(config)
    return {name: _source(name, specs, templates, config) for name in specs}


def tensor_name(template: Template) -> str:
    """The tensor's name in the file, for a parameter that is one tensor."""
    return template if isinstance(template, str) else template.name


def prefixed(template: Template, prefix: str) -> Template:
    """The template with ``prefix`` in front of the tensor's name."""
    if isinstance(template, str):
        return prefix + template
    return dataclasses.replace(template, name=prefix + template.name)


def _source(
    name: str, specs: Mapping[str, ArraySpec], templates: Mapping[str, Template], config: ModelConfig
) -> Source:
    layer = re.match(r"layers\.(\d+)\.", name)
    number = layer.group(1) if layer else ""
    template = templates[name.replace(f"layers.{number}.", "layers.{i}.", 1) if layer else name]
    stored = Stored(template) if isinstance(template, str) else template
    shape = specs[name].shape
    tensor = stored.name.replace("{i}", number)
    names = (tensor,)
    if "{e}" in tensor and config.moe is not None:
        names = tuple(tensor.replace("{e}", str(expert)) for expert in range(config.moe.num_experts))
        shape = shape[1:]
    rows = None
    if stored.fused:
        heights = {part: specs[part.replace("{i}", number)].shape[0] for part in stored.fused}
        order = [part.replace("{i}", number) for part in stored.fused]
        first = sum(list(heights.values())[: order.index(name)])
        rows = (first, first + specs[name].shape[0])
        shape = (sum(heights.values()), *shape[1:])
    if stored.every:
        axis = len(shape) - (1 if name.endswith(".bias") else 2)
        shape = (*shape[:axis], shape[axis] * stored.every[1], *shape[axis + 1 :])
    if stored.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return Source(names, shape, rows, stored)
