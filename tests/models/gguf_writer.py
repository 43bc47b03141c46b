"""Writes the tiny checkpoints as GGUF, as llama.cpp's converter would."""

from __future__ import annotations

import pathlib
from typing import Any

import gguf
import numpy as np
import tiny_checkpoints as tiny

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def in_pairs(array: np.ndarray, heads: int, turning: int) -> np.ndarray:
    """The converter's permutation: halves to interleaved pairs, of the rows that turn."""
    split = array.reshape(heads, -1, *array.shape[1:]).copy()
    pairs = split[:, :turning].reshape(heads, 2, turning // 2, *array.shape[1:])
    split[:, :turning] = pairs.swapaxes(1, 2).reshape(heads, turning, *array.shape[1:])
    return split.reshape(array.shape)


def write(
    path: pathlib.Path,
    weights: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    alignment: int = 32,
    turning: int = tiny.HEAD_DIM,
    split_max_tensors: int = 0,
) -> str:
    """One file, or several with at most ``split_max_tensors`` tensors each; returns the first one's path."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    writer.add_custom_alignment(alignment)
    writer.add_context_length(256)
    writer.add_embedding_length(tiny.HIDDEN)
    writer.add_block_count(tiny.LAYERS)
    writer.add_feed_forward_length(tiny.FFN)
    writer.add_head_count(tiny.HEADS)
    writer.add_head_count_kv(tiny.KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(tiny.HEAD_DIM)
    writer.add_rope_dimension_count(turning)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, *_kind_of(value))
    heads = {"q_proj": tiny.HEADS, "k_proj": tiny.KV_HEADS}
    for name, array in weights.items():
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            array = in_pairs(array, heads[part], turning)
        _add(writer, gguf_name(name), array, kind if array.ndim > 1 else gguf.GGMLQuantizationType.F32)
    for name, array in (extra or {}).items():
        _add(writer, name, array, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(next(iter(sorted(path.parent.glob(f"{path.stem}*.gguf")))))


def _add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    data = gguf.quants.quantize(array, kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _kind_of(value: Any) -> tuple[Any, ...]:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        return kinds.ARRAY, _kind_of(value[0])[0]
    if isinstance(value, bool):
        return (kinds.BOOL,)
    return ({int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)],)
