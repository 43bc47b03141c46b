"""Parts of parameters: equal to the same part of the whole, from every format, and no more is read."""

from __future__ import annotations

import itertools
import math

import gguf
import gguf_writer
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as tiny
import transformers
from reference_models import make
from safetensors.numpy import load_file, save_file

from precast.models.checkpoint import open_checkpoint
from precast.models.checkpoint.gguf_file import GgufFile
from precast.models.checkpoint.native import save
from precast.models.checkpoint.shards import Shards
from precast.models.checkpoint.slices import extent

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def hugging_face(directory):
    return open_checkpoint(tiny.write(directory))


def quantised(directory):
    kind = gguf.GGMLQuantizationType.Q8_0
    return open_checkpoint(gguf_writer.write(directory / "a.gguf", tiny.tensors(bias=True), kind=kind))


def native(directory):
    source = directory / "source"
    source.mkdir()
    save(hugging_face(source), str(directory / "native"))
    return open_checkpoint(str(directory / "native"))


def fused(directory):
    """Queries, keys and values in one tensor, gate and up in another."""
    make(transformers.Phi3Config(**BASE, pad_token_id=0), str(directory))
    return open_checkpoint(str(directory))


def one_tensor_an_expert(directory):
    make(transformers.MixtralConfig(**BASE, num_local_experts=4), str(directory))
    return open_checkpoint(str(directory))


def packed(directory):
    """gpt-oss: gate and up alternate, transposed, four bits a value."""
    make(transformers.GptOssConfig(**BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2), str(directory))
    weights = load_file(directory / "model.safetensors")
    rng = np.random.default_rng(0)
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{part}"
        experts, into, out = weights.pop(name).shape
        weights[f"{name}_blocks"] = rng.integers(0, 256, (experts, out, into // 32, 16), dtype=np.uint8)
        weights[f"{name}_scales"] = rng.integers(118, 126, (experts, out, into // 32), dtype=np.uint8)
    save_file(weights, directory / "model.safetensors")
    return open_checkpoint(str(directory))


def parts_of(size):
    """Some runs of a dimension: all, as jax spells it; the first and last quarter; one in the middle; none."""
    quarter = max(size // 4, 1)
    return [
        slice(None),
        slice(0, quarter),
        slice(size - quarter, size, None),
        slice(size // 2, size // 2 + 1),
        slice(0, 0),
    ]


@pytest.mark.parametrize("make_checkpoint", [hugging_face, quantised, native, fused, one_tensor_an_expert, packed])
def test_a_part_equals_the_part_of_the_whole(tmp_path, make_checkpoint, monkeypatch):
    checkpoint = make_checkpoint(tmp_path)
    asked = []
    for kind in (Shards, GgufFile):
        fetch = kind.fetch
        monkeypatch.setattr(
            kind, "fetch", lambda self, name, at, fetch=fetch: asked.append(extent(at)) or fetch(self, name, at)
        )
    for name in checkpoint.names():
        whole = checkpoint.read(name)
        for index in itertools.product(*map(parts_of, whole.shape)):
            asked.clear()
            part = checkpoint.read(name, index)
            np.testing.assert_array_equal(part, whole[index], err_msg=f"{name} {index}")
            assert part.dtype == whole.dtype
            # A part of a head may need all of the head's rows; MXFP4 comes in blocks of 32 with a scale each.
            least = max(part[..., :1].size * max(part.shape[-1], 32), tiny.HEAD_DIM * tiny.HIDDEN)
            assert sum(map(math.prod, asked)) <= least * 17 / 16


def test_only_the_bytes_of_a_part_are_read(tmp_path):
    """By the kernel's own count of what the process has read through calls, or touched in a mapped file."""

    def read_bytes():
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    shape = (4096, 512)
    weights = {"a": np.arange(math.prod(shape)).reshape(shape).astype(ml_dtypes.bfloat16)}
    save_file(weights, tmp_path / "model.safetensors")
    shards = Shards(str(tmp_path))
    before = read_bytes()
    rows = shards.fetch("a", (slice(1024, 2048, 1), slice(0, 512, 1)))
    assert rows.nbytes <= read_bytes() - before < rows.nbytes + 4096
    np.testing.assert_array_equal(rows, weights["a"][1024:2048])
    columns = shards.fetch("a", (slice(0, 4096, 2), slice(128, 256, 1)))
    np.testing.assert_array_equal(columns, weights["a"][::2, 128:256])
    assert type(columns) is np.ndarray


@pytest.mark.parametrize(
    "index", [(slice(None),), (slice(0, 321), slice(None)), (slice(6, 5), slice(None)), (slice(0, 8, 2), slice(None))]
)
def test_an_index_that_is_no_run_is_refused(tmp_path, index):
    with pytest.raises(ValueError, match=r"embed\.weight"):
        hugging_face(tmp_path).read("embed.weight", index)
