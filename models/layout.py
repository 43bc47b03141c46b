"""From a checkpoint's arrays to the weights as the target wants them.

The forward pass reads one leaf a weight (a scan over stacked layers would copy each slice on CPU), with
query, key and value fused into one product and gate and up into another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precast.models import rope
from precast.models.config import ModelConfig
from precast.models.layers import Dense

Read = Callable[[str], np.ndarray]


def build(
    config: ModelConfig, read: Read, *, dtype: str, num_positions: int, on_layer: Callable[[], Any] = lambda: None
):
    """Reads a model's arrays one layer at a time and lays them out.

    Args:
      config: the model.
      read: canonical name -> array (see ``models.params``).
      dtype: of dense weights and the embedding; norms, biases and angles are float32.
      num_positions: rows of the table of rotary angles.
      on_layer: called after each layer, for a progress bar.

    Returns:
      The weight pytree that ``transformer.forward`` takes.
    """

    def array(name: str) -> jax.Array:
        return jnp.asarray(read(name), dtype=jnp.float32)

    def dense(*names: str) -> Dense:
        kernels = [np.asarray(read(f"{name}.weight")).astype(jnp.dtype(dtype)) for name in names]
        return Dense(jnp.asarray(kernels[0] if len(kernels) == 1 else np.concatenate(kernels)))

    layers = []
    for i in range(config.num_layers):
        at = f"layers.{i}"
        layers.append(
            {
                "attn_norm": array(f"{at}.attn_norm.weight"),
                "qkv": dense(f"{at}.attn.q", f"{at}.attn.k", f"{at}.attn.v"),
                "o": dense(f"{at}.attn.o"),
                "mlp_norm": array(f"{at}.mlp_norm.weight"),
                "gate_up": dense(f"{at}.mlp.gate", f"{at}.mlp.up"),
                "down": dense(f"{at}.mlp.down"),
            }
        )
        on_layer()
    cos, sin = rope.table(config, num_positions)
    weights = {
        "embed": dense("embed").kernel,
        "layers": tuple(layers),
        "final_norm": array("final_norm.weight"),
        "rope": {"cos": jnp.asarray(cos), "sin": jnp.asarray(sin)},
    }
    if not config.tie_embeddings:
        weights["head"] = dense("head")
    return weights
