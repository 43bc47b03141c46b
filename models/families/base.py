"""What a family is made of: a reading of its config and a table of its tensors' names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from precast.models.config import ModelConfig
from precast.models.families.keys import ConfigKeys
from precast.models.families.rope import read_rope


@dataclasses.dataclass(frozen=True)
class Stored:
    """A parameter that is not simply one tensor of the same shape.

    Attributes:
      name: the tensor's name; ``{i}`` is the layer, and with ``{e}`` there is one tensor an expert.
      fused: canonical parameters whose rows lie in this tensor, in order; empty when it is not shared.
      transposed: the last two dimensions are swapped in the file.
      every: (first, step) of the parameter's indices along its output dimension, for tensors in which
        two parameters alternate.
    """

    name: str
    fused: tuple[str, ...] = ()
    transposed: bool = False
    every: tuple[int, int] | None = None


Template = str | Stored


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one parameter's array lies in a checkpoint.

    Attributes:
      names: the tensor, or one an expert, stacked in this order.
      shape: what each of those tensors must have in the file.
      rows: (start, stop) of the parameter's rows, when it shares the tensor with others.
      stored: what else to do with them.
      order: for each row of the parameter the row that holds it, where a file has them in another order.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, int] | None
    stored: Stored
    order: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class GgufNames:
    """How a family's checkpoints look as GGUF.

    Attributes:
      architectures: value of ``general.architecture`` -> the ``model_type`` that it stands for.
      tensors: templates that differ from the usual ones.
      constants: keys of config.json that the metadata leave out because all models of the architecture agree.
      permuted: query and key rows are stored as interleaved pairs and must be put back into halves.
    """

    architectures: Mapping[str, str]
    tensors: Mapping[str, Template] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    permuted: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
      name: for people.
      examples: well-known models of it.
      model_types: values of ``model_type`` in config.json.
      read_config: config.json -> ModelConfig.
      tensors: templates in Hugging Face directories that differ from Llama's.
      skipped: patterns of tensors that are no part of the language model (a vision tower, a draft head).
      gguf: the same for GGUF, where supported.
    """

    name: str
    examples: str
    model_types: tuple[str, ...]
    read_config: Callable[[ConfigKeys], ModelConfig]
    tensors: Mapping[str, Template] = dataclasses.field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    gguf: GgufNames | None = None


_GATE_UP = tuple(f"layers.{{i}}.mlp.{part}.weight" for part in ("gate", "up"))
# For families that store the MLP's gate and up as one tensor.
FUSED_GATE_UP = {part: Stored("model.layers.{i}.mlp.gate_up_proj.weight", fused=_GATE_UP) for part in _GATE_UP}


def sizes(
    keys: ConfigKeys,
    *,
    eps: float,
    eps_key: str = "rms_norm_eps",
    head_dim: int | None = None,
    own_head_dim: bool = True,
    tied: bool = False,
    defaults: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The fields of ModelConfig that every family spells alike, but for RoPE.

    Args:
      keys: the config.
      eps, head_dim, tied: the family's defaults (head_dim None: hidden_size / num_attention_heads).
      eps_key: name of the norms' epsilon.
      own_head_dim: the key ``head_dim`` counts.
      defaults: sizes that a config of the family may leave out.
    """

    def size(key: str) -> int:
        return keys.integer(key, defaults[key]) if defaults else keys.integer(key)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    given = keys.integer("head_dim", None) if own_head_dim else None
    if given is None and head_dim is None and hidden % heads:
        raise keys.error("hidden_size", f"it must be a multiple of num_attention_heads, {heads}, without head_dim")
    return {
        "model_type": keys.take("model_type"),
        "vocab_size": size("vocab_size"),
        "hidden_size": hidden,
        "num_layers": size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": keys.integer("num_key_value_heads", (defaults or {}).get("num_key_value_heads", heads)),
        "head_dim": given or head_dim or hidden // heads,
        "intermediate_size": size("intermediate_size"),
        "max_position_embeddings": size("max_position_embeddings"),
        "norm_eps": keys.number(eps_key, eps),
        "tie_embeddings": keys.boolean("tie_word_embeddings", tied),
    }


def rope_and_sizes(keys: ConfigKeys, *, theta: float = 10000.0, **defaults: Any) -> dict[str, Any]:
    """``sizes`` with the RoPE of a family in which all layers share one and the whole head turns."""
    traits = sizes(keys, **defaults)
    return {**traits, "rope": read_rope(keys, traits["head_dim"], theta=theta)}


def attention_biases(keys: ConfigKeys) -> dict[str, Any]:
    """For families in which one key switches the biases of all four of attention's products."""
    bias = keys.boolean("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias}


def sliding_layers(
    keys: ConfigKeys, num_layers: int, is_sliding: Callable[[int], bool], window: int | None
) -> dict[str, Any]:
    """Which layers see a window only: from ``layer_types``, or by the family's rule where that is absent."""
    kinds = {"full_attention": "full", "sliding_attention": "sliding"}
    given = keys.sequence("layer_types", num_layers)
    if given is None:
        given = [
            "sliding_attention" if window and is_sliding(layer) else "full_attention" for layer in range(num_layers)
        ]
    unknown = set(map(str, given)) - set(kinds)
    if unknown:
        raise keys.error(
            "layer_types", f"{', '.join(sorted(unknown))} is not implemented; implemented: {', '.join(kinds)}"
        )
    layer_kinds = tuple(kinds[kind] for kind in given)
    return {"layer_kinds": layer_kinds, "sliding_window": window} if "sliding" in layer_kinds else {}
