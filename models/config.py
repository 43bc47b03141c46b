"""What differs between model families, as data.

``ModelConfig`` lists the traits of a decoder-only transformer; every default means "as in Llama".
One shared forward pass reads them, and a family (``families/``) is a mapping from its published
config to these fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
LayerKind = Literal["full", "sliding"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) of one kind of layer.

    Attributes:
      kind: how the frequencies are stretched beyond the trained length.
      theta: base of the geometric series of wavelengths.
      rotary_dim: how many of a head's leading dimensions turn; None is the whole head.
      interleaved: neighbours (0, 1), (2, 3), … form the pairs; otherwise the two halves do.
      factor, original_max_position_embeddings: by how much, and beyond which trained length.
      low_freq_factor, high_freq_factor: borders of llama3's three bands.
      beta_fast, beta_slow, truncate: borders of yarn's ramp (arXiv:2309.00071) and their rounding.
      attention_factor: multiplies cos and sin; 1 for the kinds that have none.
      short_factor, long_factor: longrope's divisors (arXiv:2402.13753), one a pair of dimensions.
      divisors: divisors of the frequencies given outright, one a pair; empty for none.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in place of some layers' MLP.

    Attributes:
      num_experts, experts_per_token: how many there are, and how many a token visits.
      intermediate_size: width of one expert.
      layers: for each layer, whether it is a mixture.
      router: score of an expert: "softmax" over all experts, "softmax_chosen" over those chosen by
        their logit, "sigmoid" of its own logit.
      normalize: divide the chosen weights by their sum.
      scaling: multiplies the weights after that.
      num_groups, groups_kept: experts are chosen from the best groups only; 1 of 1 is no limit.
      group_score: a group's score: its best expert, or the sum of its best two.
      correction_bias: a learned bias enters the choice (and only the choice).
      router_bias, expert_bias: the router and the experts' products have biases.
      shared_intermediate_size: width of the expert that every token visits; 0 for none.
      shared_gate: that expert's output is multiplied by a learned sigmoid.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]
    router: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    normalize: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention (arXiv:2405.04434): keys and values rebuilt from one latent a token.

    q_lora_rank is None where queries are one plain product; norm_eps is of the latents' norms.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Traits of a decoder-only transformer; the defaults mean "as in Llama".

    Attributes:
      max_position_embeddings: longest context the model is made for, in tokens.
      tie_embeddings: the head is the embedding table.
      dtype: what the checkpoint holds.
      activation: of the gated MLP; "swiglu_clamped" is (up + 1) * gate * sigmoid(1.702 gate) with
        gate clamped from above and up on both sides at ``activation_limit``.
      norm_kind: root mean square, or mean and variance ("layer", without bias).
      norm_offset: norm weights are stored less 1.
      norm_placement: before each block ("pre"), on its output ("post"), on both ("both"), or one
        norm before attention and MLP side by side ("parallel").
      qk_norm: of queries and keys before RoPE: none, over a head's dimensions with one weight for
        all heads ("head") or one a head ("per_head"), or over all heads at once ("all").
      qkv_bias, output_bias, mlp_bias: which products have biases.
      attention_scale: multiplies the scores; None is head_dim ** -0.5.
      attention_soft_cap, logits_soft_cap: x -> cap * tanh(x / cap).
      attention_sinks: a learned logit a head joins each softmax and is then dropped.
      layer_kinds: full or sliding attention, layer by layer; empty is all full.
      sliding_window: a sliding layer's query sees this many latest tokens, its own included.
      rope_sliding: RoPE of sliding layers where it differs.
      rope_layers: for each layer, whether it has RoPE at all; empty is all of them.
      embedding_multiplier, residual_multiplier, logits_multiplier: of the embedding's output, of
        what each block adds to the residual, and of the logits (before the soft cap).
      rounds_embedding_multiplier: the first of them has the precision of the weights.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    rope: RopeConfig = RopeConfig()
    dtype: str = "float32"
    activation: Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped"] = "silu"
    activation_limit: float = 7.0
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_offset: bool = False
    norm_placement: Literal["pre", "post", "both", "parallel"] = "pre"
    qk_norm: Literal["none", "head", "per_head", "all"] = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    attention_sinks: bool = False
    layer_kinds: tuple[LayerKind, ...] = ()
    sliding_window: int | None = None
    rope_sliding: RopeConfig | None = None
    rope_layers: tuple[bool, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no transformer can have."""
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}: it must be a multiple of num_kv_heads, {self.num_kv_heads}"
            )
        for rope in filter(None, (self.rope, self.rope_sliding)):
            turning = self.rotary_dim(rope)
            if turning % 2 or not 0 < turning <= self.head_dim:
                raise ValueError(f"rotary_dim is {turning}: it must be even and at most head_dim, {self.head_dim}")
        for field in ("layer_kinds", "rope_layers"):
            if getattr(self, field) and len(getattr(self, field)) != self.num_layers:
                raise ValueError(
                    f"{field} has {len(getattr(self, field))} entries: it must have num_layers, {self.num_layers}"
                )
        if "sliding" in self.layer_kinds and not (self.sliding_window and self.sliding_window > 0):
            raise ValueError(f"sliding_window is {self.sliding_window}: sliding layers need a window of at least 1")

    def rotary_dim(self, rope: RopeConfig) -> int:
        """How many leading dimensions of a head ``rope`` turns."""
        return self.head_dim if rope.rotary_dim is None else rope.rotary_dim

    def layer_window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees, its own included; None is all of them."""
        return self.sliding_window if self.layer_kinds and self.layer_kinds[layer] == "sliding" else None

    def layer_rope_kind(self, layer: int) -> LayerKind | None:
        """Which of ``rope`` ("full") and ``rope_sliding`` turns this layer's heads; None for neither."""
        if self.rope_layers and not self.rope_layers[layer]:
            return None
        return "sliding" if self.rope_sliding is not None and self.layer_window(layer) is not None else "full"

    def embedding_scale(self, dtype: Any) -> float:
        """What multiplies the output of an embedding table of this dtype."""
        scale = self.embedding_multiplier
        return float(np.asarray(scale).astype(dtype)) if self.rounds_embedding_multiplier else scale

    def layer_is_moe(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]


_NESTED = {"rope": RopeConfig, "rope_sliding": RopeConfig, "moe": MoeConfig, "mla": MlaConfig}


def from_values(values: Mapping[str, Any]) -> ModelConfig:
    """The inverse of ``dataclasses.asdict`` after a passage through JSON."""

    def tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}

    nested = {key: kind(**tuples(values[key])) for key, kind in _NESTED.items() if values.get(key) is not None}
    return ModelConfig(**{**tuples(values), **nested})
