"""GGUF files: the same numbers as safetensors, whatever the permutation, type or split; and damaged ones."""

from __future__ import annotations

import os
import pathlib

import gguf
import gguf_writer
import numpy as np
import pytest
import reference_models
import tiny_checkpoints as tiny
import torch
import transformers
from model_runner import ModelRunner
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from precast.models import rope
from precast.models.checkpoint import CheckpointError, open_checkpoint
from precast.models.checkpoint.gguf_file import DTYPES, GgufFile

KINDS = gguf.GGMLQuantizationType
PROMPT = np.random.default_rng(1).integers(0, tiny.VOCAB, 70).tolist()


def logits(checkpoint):
    return ModelRunner(checkpoint, num_positions=128).prefill(PROMPT)


WRITTEN = [KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1]
DEQUANTISED = [KINDS.Q2_K, KINDS.Q3_K, KINDS.Q4_K, KINDS.Q5_K, KINDS.Q6_K]


def test_every_implemented_type_is_tested():
    assert {kind.name for kind in (*WRITTEN, *DEQUANTISED)} == DTYPES


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", WRITTEN)
def test_same_arrays_as_safetensors(tmp_path, architecture, kind):
    weights = tiny.tensors(bias=True)
    if architecture == "qwen2":
        weights = {name: array for name, array in weights.items() if "o_proj.bias" not in name}
    if architecture == "qwen3":
        for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight"))]:
            weights[name.replace("_proj", "_norm")] = np.arange(1, 1 + tiny.HEAD_DIM, dtype=np.float32)
    path = gguf_writer.write(tmp_path / "a.gguf", weights, architecture=architecture, kind=kind)
    checkpoint = open_checkpoint(path)
    (tmp_path / "hf").mkdir()
    changes = {"model_type": architecture, "head_dim": tiny.HEAD_DIM}
    if architecture != "qwen2":
        changes["attention_bias"] = True
    reference = open_checkpoint(tiny.write(tmp_path / "hf", weights, **changes))
    assert set(checkpoint.names()) == set(reference.names())
    for name in reference.names():
        got, want = np.asarray(checkpoint.read(name), np.float64), reference.read(name).astype(np.float64)
        assert got.shape == want.shape
        cosine = (got * want).sum() / np.sqrt((got**2).sum() * (want**2).sum())
        assert cosine > {"Q4": 0.98, "Q5": 0.998}.get(kind.name[:2], 0.9999), name
        if kind == KINDS.F32:
            np.testing.assert_array_equal(got, want)
    assert checkpoint.config.rope == reference.config.rope


def test_mixture_as_transformers_reads_it(tmp_path):
    """Qwen3-MoE: experts in one tensor, and a config of which the metadata say only a part."""
    experts, width = 4, 24
    rng = np.random.default_rng(5)
    weights = {name: array for name, array in tiny.tensors().items() if ".mlp." not in name}
    extra = {}
    for layer in range(tiny.LAYERS):
        for side in "qk":
            weights[f"model.layers.{layer}.self_attn.{side}_norm.weight"] = 1 + rng.random(tiny.HEAD_DIM, np.float32)
        shapes = {"gate_inp": (experts, tiny.HIDDEN), "gate_exps": (experts, width, tiny.HIDDEN)}
        shapes |= {"up_exps": (experts, width, tiny.HIDDEN), "down_exps": (experts, tiny.HIDDEN, width)}
        for name, shape in shapes.items():
            extra[f"blk.{layer}.ffn_{name}.weight"] = rng.normal(0, 0.5, shape).astype(np.float32)
    sizes = {"expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": width}
    path = gguf_writer.write(
        tmp_path / "a.gguf",
        weights,
        architecture="qwen3moe",
        extra=extra,
        metadata={f"qwen3moe.{key}": value for key, value in sizes.items()},
    )
    config = load_gguf_checkpoint(path)["config"] | {"moe_intermediate_size": width, "vocab_size": tiny.VOCAB}
    theirs = transformers.Qwen3MoeForCausalLM._from_config(
        transformers.Qwen3MoeConfig(**config), attn_implementation="eager", dtype=torch.float32
    )
    theirs.load_state_dict(load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)["tensors"])
    expected = reference_models.logits(theirs.eval(), PROMPT)
    np.testing.assert_allclose(logits(open_checkpoint(path)), expected, rtol=0, atol=1e-3 * expected.std())


def test_same_logits_as_safetensors(tmp_path):
    weights = tiny.tensors(bias=True)
    path = gguf_writer.write(tmp_path / "a.gguf", weights)
    (tmp_path / "hf").mkdir()
    reference = open_checkpoint(tiny.write(tmp_path / "hf", weights, attention_bias=True))
    np.testing.assert_array_equal(logits(open_checkpoint(path)), logits(reference))


@pytest.mark.parametrize("kind", DEQUANTISED)
def test_k_quants_are_read_through_the_library(tmp_path, kind):
    """The library cannot write these, so blocks of random bits are read and compared with its dequantisation."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 256, (tiny.VOCAB, 2 * block_bytes), dtype=np.uint8)
    # Where a block's half-precision scales lie in one kind or another, so that they are ordinary numbers.
    for scale in (slice(0, 2), slice(2, 4), slice(-4, -2), slice(-2, None)):
        raw.reshape(-1, block_bytes)[:, scale] = np.array([0.01], np.float16).view(np.uint8)
    expected = gguf.quants.dequantize(raw, kind)
    assert np.isfinite(expected).all()
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(str(tmp_path / "a.gguf"))
    assert file.headers["token_embd.weight"].shape == expected.shape == (tiny.VOCAB, 2 * block)
    for part in ((0, tiny.VOCAB, 0, 2 * block), (3, 7, 0, 2 * block), (5, 6, block, 2 * block), (2, 9, 100, block + 3)):
        index = (slice(part[0], part[1], 1), slice(part[2], part[3], 1))
        np.testing.assert_array_equal(file.fetch("token_embd.weight", index), expected[index])


def test_other_types_are_refused_by_name(tmp_path):
    path = gguf_writer.write(tmp_path / "a.gguf", tiny.tensors(), kind=KINDS.MXFP4)
    tiny.refused(path, "not implemented", "MXFP4", "Q4_K", "token_embd.weight")


@pytest.mark.parametrize("alignment", [32, 64])
def test_alignment_and_splits(tmp_path, alignment):
    weights = tiny.tensors()
    path = gguf_writer.write(tmp_path / "m.gguf", weights, alignment=alignment, split_max_tensors=8)
    assert path.endswith("m-00001-of-00003.gguf")
    checkpoint = open_checkpoint(path)
    np.testing.assert_array_equal(checkpoint.read("head.weight"), weights["lm_head.weight"])
    os.rename(tmp_path / "m-00002-of-00003.gguf", tmp_path / "x")
    tiny.refused(path, "absent", "m-00002-of-00003.gguf")
    tiny.refused(tmp_path / "m-00003-of-00003.gguf", "not the first")


def test_partial_rotary_permutes_only_what_turns(tmp_path):
    weights = tiny.tensors()
    checkpoint = open_checkpoint(gguf_writer.write(tmp_path / "a.gguf", weights, turning=4))
    assert checkpoint.config.rope.rotary_dim == 4
    np.testing.assert_array_equal(
        checkpoint.read("layers.0.attn.q.weight"), weights["model.layers.0.self_attn.q_proj.weight"]
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama3_frequencies_from_the_factor_tensor(tmp_path):
    (tmp_path / "hf").mkdir()
    reference = open_checkpoint(tiny.write(tmp_path / "hf", rope_scaling=LLAMA3))
    plain = open_checkpoint(gguf_writer.write(tmp_path / "a.gguf", tiny.tensors()))
    wanted = rope.inverse_frequencies(reference.config.rope, tiny.HEAD_DIM, 256)
    divisors = (rope.inverse_frequencies(plain.config.rope, tiny.HEAD_DIM, 256) / wanted).astype(np.float32)
    path = gguf_writer.write(tmp_path / "b.gguf", tiny.tensors(), extra={"rope_freqs.weight": divisors})
    scaled = open_checkpoint(path)
    np.testing.assert_allclose(rope.inverse_frequencies(scaled.config.rope, tiny.HEAD_DIM, 256), wanted, rtol=1e-6)
    assert np.abs(logits(scaled) - logits(reference)).max() < 1e-3 < np.abs(logits(plain) - logits(reference)).max()
    for bad in (divisors[:-1], -divisors):
        path = gguf_writer.write(tmp_path / "c.gguf", tiny.tensors(), extra={"rope_freqs.weight": bad})
        tiny.refused(path, "rope_freqs")


def test_tied_when_there_is_no_head(tmp_path):
    path = gguf_writer.write(tmp_path / "a.gguf", tiny.tensors(head=False))
    assert open_checkpoint(path).config.tie_embeddings


def test_a_file_cut_anywhere_is_refused(tmp_path):
    content = pathlib.Path(gguf_writer.write(tmp_path / "a.gguf", tiny.tensors())).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 7), *range(3000, len(content), 9973), len(content) - 1]:
        cut.write_bytes(content[:length])
        tiny.refused(cut, "cut.gguf")


def test_a_file_with_any_byte_of_its_head_changed_never_breaks_the_reader(tmp_path):
    content = pathlib.Path(gguf_writer.write(tmp_path / "a.gguf", tiny.tensors())).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.integers(0, 2500)] = rng.integers(0, 256)
        (tmp_path / "b.gguf").write_bytes(bytes(damaged))
        try:
            open_checkpoint(str(tmp_path / "b.gguf"))
        except CheckpointError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "mamba"}, ["'mamba'", "llama"]),
        ({"metadata": {"llama.expert_count": 8}}, ["num_experts is 8"]),
        ({"metadata": {"llama.attention.clamp_kqv": 8.0}}, ["clamp_kqv"]),
        ({"metadata": {"llama.attention.value_length": 4}}, ["value_length"]),
        ({"metadata": {"llama.rope.scaling.type": "foo"}}, ["rope_type", "foo"]),
        ({"extra": {"foo.weight": np.ones(3, np.float32)}}, ["1 tensor is unknown", "foo.weight"]),
    ],
)
def test_files_that_cannot_be_served(tmp_path, changes, words):
    tiny.refused(gguf_writer.write(tmp_path / "a.gguf", tiny.tensors(), **changes), *words)
