"""The least that a step can cost on a chip, what a compiled one costs, and how long it takes at the chip's peak rates.

Decode is held against bytes: the weights once and the live part of the KV cache once.  Prefill is held against the
operations of its products.  Everything is of one device; ``tensor`` devices share the heads, the feed-forward and the
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from precast.kernels_pallas import layout
from precast.kernels_pallas.targets import GpuChip, Target, TpuChip
from precast.models.config import ModelConfig
from precast.runtime.hlo import Account, Cost

# Of what a device puts into a collective over n devices, the part that its links carry: (n - 1) / n times this.
_CARRIED = {"all-reduce": 2, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1}


@dataclass(frozen=True)
class Step:
    """One launch of the backbone, as the device sees it.

    Attributes:
      rows: sequences.
      queries: new tokens of each: 1 for decode.
      context: tokens of each in the cache after the step, its own included.
      head: whether the product with the vocabulary is part of it, for one token a row.
    """

    rows: int
    queries: int
    context: int
    head: bool = False


@dataclass(frozen=True)
class Least:
    """What one device must do at least: read weights and live cache once, and multiply."""

    weight_bytes: int
    cache_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True)
class Prediction:
    """Seconds of one run at the chip's peak rates: no run is faster, none need be as fast."""

    memory: float
    products: float
    collectives: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.products) + self.collectives


def least(
    config: ModelConfig, step: Step, *, tensor: int = 1, itemsize: float = 2, cache_itemsize: float | None = None
) -> Least:
    """The least work of a step on each of ``tensor`` devices.

    Args:
      itemsize: bytes of a weight; fractions for packed ones.
      cache_itemsize: bytes of a number in the cache; None is that of a weight.
    """
    tokens = step.rows * step.queries
    read = used = 0.0
    for layer in range(config.num_layers):
        attention = _attention_weights(config, tensor)
        fixed, each, experts, visited = _feed_forward_weights(config, layer, tensor)
        # a step reads the experts that its tokens visit: each visits others where it can
        read += attention + fixed + each * min(experts, tokens * visited)
        used += attention + fixed + each * visited
    head = config.hidden_size * config.vocab_size / tensor * step.head
    held, pairs, width = _cache(config, step, tensor)
    embedded = tokens * config.hidden_size
    return Least(
        weight_bytes=math.ceil((read + head + embedded) * itemsize),
        cache_bytes=math.ceil(held * (itemsize if cache_itemsize is None else cache_itemsize)),
        flops=math.ceil(2 * (tokens * used + step.rows * head + pairs * width)),
    )


def kernel_costs(config: ModelConfig, step: Step, *, tensor: int = 1, itemsize: float = 2) -> dict[str, Cost]:
    """What ``hlo.account`` is to count for one call of the attention kernel, on average over the layers, when every row
    has its context; ``itemsize`` is that of the cache, whose lanes are padded."""
    held, pairs, width = _cache(config, step, tensor)
    used = _token_width(config, tensor)
    padding = layout.pad_to(used, layout.LANES) / used
    moved = math.ceil(held * padding * itemsize / config.num_layers)
    return {"precast_paged_attention": Cost(moved, math.ceil(2 * pairs * width / config.num_layers))}


def predict(account: Account, target: Target, *, devices: int = 1) -> Prediction | None:
    """How long a program takes on each of the devices that its collectives span; None for a target without known rates
    (CPU)."""
    if target.backend not in ("tpu", "gpu"):
        return None
    chip: TpuChip | GpuChip = target.tpu if target.backend == "tpu" else target.gpu
    carried = 0.0
    for item in account.items:
        # of the others, what goes in is passed on to each device
        factor = _CARRIED[item.kind] / devices if item.kind in _CARRIED else 1
        carried += item.times * item.sent_bytes * factor * (devices - 1)
    return Prediction(
        memory=account.bytes / chip.hbm_bytes_per_second,
        products=account.flops / chip.flops_per_second,
        # half of the rate is for the other direction
        collectives=carried / (chip.link_bytes_per_second / 2),
    )


def _attention_weights(config: ModelConfig, tensor: int) -> float:
    """Numbers in a layer's attention."""
    hidden, heads, mla = config.hidden_size, config.num_heads / tensor, config.mla
    if mla is None:
        kv_heads = max(config.num_kv_heads / tensor, 1)
        return hidden * config.head_dim * (2 * heads + 2 * kv_heads)
    query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    shared = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    into_query = hidden
    if mla.q_lora_rank is not None:
        shared += hidden * mla.q_lora_rank
        into_query = mla.q_lora_rank
    ups = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    return shared + heads * (into_query * query + ups + mla.v_head_dim * hidden)


def _feed_forward_weights(config: ModelConfig, layer: int, tensor: int) -> tuple[float, float, int, int]:
    """(numbers that every token meets, numbers of an expert, experts, experts that a token visits)."""
    hidden, moe = config.hidden_size, config.moe
    if moe is None or not config.layer_is_moe(layer):
        return 3 * hidden * config.intermediate_size / tensor, 0.0, 0, 0
    fixed = hidden * moe.num_experts + 3 * hidden * moe.shared_intermediate_size / tensor
    return fixed, 3 * hidden * moe.intermediate_size / tensor, moe.num_experts, moe.experts_per_token


def _token_width(config: ModelConfig, tensor: int) -> int:
    """Numbers of a token in one layer's cache: a latent is held by every device."""
    mla = config.mla
    if mla is not None:
        return mla.kv_lora_rank + mla.qk_rope_head_dim
    return 2 * -(-config.num_kv_heads // tensor) * config.head_dim


def _cache(config: ModelConfig, step: Step, tensor: int) -> tuple[float, float, float]:
    """(numbers of the cache that are live, pairs of a query and a key over layers and this device's heads, the widths
    of a key and of a value together)."""
    held = pairs = 0.0
    for layer in range(config.num_layers):
        window = config.layer_window(layer) or step.context
        seen = min(step.context, window + step.queries - 1)
        held += step.rows * seen * _token_width(config, tensor)
        # each query sees one key more than the one before
        before = [max(step.context - step.queries, 0) + 1, step.context]
        pairs += step.rows * step.queries * sum(min(keys, window) for keys in before) / 2
    mla = config.mla
    width = 2 * config.head_dim if mla is None else 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
    return held, pairs * config.num_heads / tensor, width
