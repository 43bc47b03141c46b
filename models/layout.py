"""From a checkpoint's arrays to the weights as the target wants them.

The forward pass reads one leaf a weight (a scan over stacked layers would copy each slice on CPU), with
query, key and value fused into one product and gate and up into another.  What can be settled once is
settled here: norms stored less 1 get it back, and heads whose RoPE turns interleaved pairs are reordered
so that it turns halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precast.models import rope
from precast.models.config import MlaConfig, ModelConfig
from precast.models.layers import Dense
from precast.models.params import layer_specs

Read = Callable[[str], np.ndarray]


def build(
    config: ModelConfig, read: Read, *, dtype: str, num_positions: int, on_layer: Callable[[], Any] = lambda: None
):
    """Reads a model's arrays one layer at a time and lays them out.

    Args:
      config: the model.
      read: canonical name -> array (see ``models.params``).
      dtype: of dense weights and the embedding; norms, biases, routers and angles are float32.
      num_positions: rows of the tables of rotary angles: the longest context that is served.
      on_layer: called after each layer, for a progress bar.

    Returns:
      The weight pytree that ``transformer.forward`` takes.
    """
    layers = []
    for i in range(config.num_layers):
        layers.append(_Layer(config, read, dtype, i).build())
        on_layer()
    ends = _Arrays(read, dtype, "", frozenset())
    weights = {
        "embed": ends.dense("embed").kernel,
        "layers": tuple(layers),
        "final_norm": ends.vector("final_norm.weight") + config.norm_offset,
        "rope": jax.tree.map(jnp.asarray, rope.tables(config, num_positions)),
    }
    if not config.tie_embeddings:
        weights["head"] = ends.dense("head")
    return weights


class _Arrays:
    """Arrays below one prefix, cast for the target."""

    def __init__(self, read: Read, dtype: str, prefix: str, names: frozenset[str]):
        self._read, self._dtype, self._prefix, self.names = read, jnp.dtype(dtype), prefix, names

    def vector(self, name: str) -> jax.Array:
        return jnp.asarray(self.stored(name), dtype=jnp.float32)

    def stored(self, name: str) -> np.ndarray:
        return self._read(self._prefix + name)

    def dense(self, *parts: str, axis: int = 0, dtype: Any = None) -> Dense:
        """One product of several, its outputs side by side along ``axis``."""
        kernel = _joined([self.stored(f"{part}.weight").astype(dtype or self._dtype) for part in parts], axis)
        bias = None
        if f"{parts[0]}.bias" in self.names:
            bias = _joined([self.stored(f"{part}.bias").astype(np.float32) for part in parts], axis)
        return Dense(kernel, bias)


class _Layer(_Arrays):
    """The weights of one layer."""

    def __init__(self, config: ModelConfig, read: Read, dtype: str, layer: int):
        names = frozenset(layer_specs(config, layer))
        super().__init__(read, dtype, f"layers.{layer}.", names)
        self._config, self._layer = config, layer

    def build(self) -> dict[str, Any]:
        config = self._config
        norms = [name for name in self.names if name.endswith("_norm.weight") and "." not in name[: -len(".weight")]]
        weights: dict[str, Any] = {
            name.removesuffix(".weight"): self.vector(name) + config.norm_offset for name in sorted(norms)
        }
        weights |= self._latent(config.mla) if config.mla else self._attention()
        weights |= self._mixture() if config.layer_is_moe(self._layer) else self._mlp("mlp", "")
        return weights

    def stored(self, name: str) -> np.ndarray:
        """As read, but for the order of a head's dimensions."""
        array = super().stored(name)
        config = self._config
        if not config.rope.interleaved or not name.startswith("attn."):
            return array
        turning = config.rotary_dim(config.rope)
        if config.mla is not None:
            starts = {
                "attn.q.weight": (config.num_heads, config.mla.qk_nope_head_dim),
                "attn.q_up.weight": (config.num_heads, config.mla.qk_nope_head_dim),
                "attn.kv_down.weight": (1, config.mla.kv_lora_rank),
            }
            return rope.halves_first(array, *starts[name], turning) if name in starts else array
        side = name.split(".")[1]
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(side)
        if side in ("q_norm", "k_norm"):
            flat = array.reshape(-1)
            return rope.halves_first(flat, flat.size // config.head_dim, 0, turning).reshape(array.shape)
        return array if heads is None else rope.halves_first(array, heads, 0, turning)

    def _attention(self) -> dict[str, Any]:
        weights: dict[str, Any] = {"qkv": self.dense("attn.q", "attn.k", "attn.v"), "o": self.dense("attn.o")}
        for side in ("q", "k"):
            if f"attn.{side}_norm.weight" in self.names:
                weights[f"{side}_norm"] = self.vector(f"attn.{side}_norm.weight") + self._config.norm_offset
        if "attn.sinks" in self.names:
            weights["sinks"] = self.vector("attn.sinks")
        return weights

    def _latent(self, mla: MlaConfig) -> dict[str, Any]:
        weights: dict[str, Any] = {"o": self.dense("attn.o"), "kv_down": self.dense("attn.kv_down")}
        for part in ("q", "q_down", "q_up"):
            if f"attn.{part}.weight" in self.names:
                weights[part] = self.dense(f"attn.{part}")
        for part in ("q_down_norm", "kv_down_norm"):
            if f"attn.{part}.weight" in self.names:
                weights[part] = self.vector(f"attn.{part}.weight")
        up = self.stored("attn.kv_up.weight").reshape(self._config.num_heads, -1, mla.kv_lora_rank)
        keys, values = np.split(up.astype(self._dtype), [mla.qk_nope_head_dim], axis=1)
        weights["key_up"] = jnp.asarray(np.ascontiguousarray(keys.swapaxes(1, 2)))
        weights["value_up"] = jnp.asarray(np.ascontiguousarray(values))
        return weights

    def _mlp(self, source: str, prefix: str) -> dict[str, Any]:
        return {
            f"{prefix}gate_up": self.dense(f"{source}.gate", f"{source}.up"),
            f"{prefix}down": self.dense(f"{source}.down"),
        }

    def _mixture(self) -> dict[str, Any]:
        weights: dict[str, Any] = {
            "router": self.dense("moe.router", dtype=np.float32),
            "experts_gate_up": _as_bits(self.dense("moe.gate", "moe.up", axis=1)),
            "experts_down": _as_bits(self.dense("moe.down")),
        }
        if "moe.correction_bias" in self.names:
            weights["correction_bias"] = self.vector("moe.correction_bias")
        if "moe.shared.gate.weight" in self.names:
            weights |= self._mlp("moe.shared", "shared_")
        if "moe.shared_gate.weight" in self.names:
            weights["shared_gate"] = self.vector("moe.shared_gate.weight").reshape(-1)
        return weights


def _as_bits(weight: Dense) -> Dense:
    """The form that ``layers.grouped_linear`` takes."""
    is_bfloat16 = weight.kernel.dtype == jnp.bfloat16
    return Dense(jax.lax.bitcast_convert_type(weight.kernel, jnp.uint16), weight.bias) if is_bfloat16 else weight


def _joined(arrays: list[np.ndarray], axis: int) -> jax.Array:
    return jnp.asarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis))
