"""Small Llama-type checkpoints written by hand, to be damaged by tests."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from precast.models.checkpoint import CheckpointError, open_checkpoint

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 32, 2, 4, 2, 8, 64, 320

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def tensors(*, bias: bool = False, head: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """The weights under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if head:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (HIDDEN,)
        for side, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{at}.self_attn.{side}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
            if bias:
                shapes[f"{at}.self_attn.{side}_proj.bias"] = (heads * HEAD_DIM,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        if bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (HIDDEN,)
        for part in ("gate", "up"):
            shapes[f"{at}.mlp.{part}_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, FFN)
    return {name: rng.normal(0.0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def write_config(directory: pathlib.Path, **changes: Any) -> None:
    """config.json with changes; a value of None takes the key out."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))


def write(directory: pathlib.Path, weights: dict[str, np.ndarray] | None = None, **changes: Any) -> str:
    """A directory with one safetensors file."""
    write_config(directory, **changes)
    save_file(tensors() if weights is None else weights, directory / "model.safetensors")
    return str(directory)


def write_shards(directory: pathlib.Path, count: int = 3) -> dict[str, str]:
    """A directory with ``count`` shards and an index; returns the index's weight map."""
    write_config(directory)
    weights = tensors()
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {name: weights[name] for name in names[number::count]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: pathlib.Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def refused(path, *words):
    """Opening fails with one line that has all the words."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(path))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, message
