"""Hugging Face directories: what is read from where, and every way in which they can be damaged."""

from __future__ import annotations

import json
import logging
import os

import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as tiny
from safetensors.numpy import save_file

from precast.models.checkpoint import open_checkpoint

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SECOND = "model-00002-of-00003.safetensors"


def test_reads_what_was_written(tmp_path):
    weights = tiny.tensors()
    checkpoint = open_checkpoint(tiny.write(tmp_path, weights))
    np.testing.assert_array_equal(checkpoint.read("embed.weight"), weights[EMBED])
    np.testing.assert_array_equal(
        checkpoint.read("layers.1.attn.k.weight"), weights["model.layers.1.self_attn.k_proj.weight"]
    )
    assert set(checkpoint.names()) >= {"final_norm.weight", "head.weight", "layers.0.mlp.down.weight"}
    assert checkpoint.config.dtype == "float32"
    assert checkpoint.text is None


def test_shards_equal_one_file(tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    tiny.write_shards(many)
    first, second = open_checkpoint(tiny.write(one)), open_checkpoint(str(many))
    for name in first.names():
        np.testing.assert_array_equal(first.read(name), second.read(name))


def test_dtype_is_that_of_the_file(tmp_path):
    weights = {name: array.astype(ml_dtypes.bfloat16) for name, array in tiny.tensors().items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float32)
    checkpoint = open_checkpoint(tiny.write(tmp_path, weights, torch_dtype="float16"))
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.read("embed.weight").dtype == ml_dtypes.bfloat16
    assert checkpoint.read("final_norm.weight").dtype == np.float32


def test_fingerprint_follows_config_and_files(tmp_path):
    first = open_checkpoint(tiny.write(tmp_path)).fingerprint
    assert open_checkpoint(str(tmp_path)).fingerprint == first
    tiny.write_config(tmp_path, rope_theta=5000.0)
    assert open_checkpoint(str(tmp_path)).fingerprint != first


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["config.json is missing"]),
        (b"", ["is empty"]),
        (b"[]", ["list", "object"]),
        (b"{", ["not valid JSON"]),
        (b"\xef\xbb\xbf{}", ["byte order mark"]),
        (b"\xff\xfe", ["cannot be read"]),
        (b"[" * 100000, ["not valid JSON"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["git-lfs pointer"]),
    ],
)
def test_broken_config_file(tmp_path, content, words):
    tiny.write(tmp_path)
    if content is None:
        os.remove(tmp_path / "config.json")
    else:
        (tmp_path / "config.json").write_bytes(content)
    tiny.refused(tmp_path, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, ["model_type is missing"]),
        ({"model_type": "foo"}, ["'foo'", "llama", "qwen2"]),
        ({"model_type": "foo", "auto_map": {"AutoModel": "modeling_foo.Foo"}}, ["trust_remote_code"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": "32"}, ["hidden_size", "integer"]),
        ({"hidden_size": -1}, ["hidden_size", "at least 1"]),
        ({"num_attention_heads": 3}, ["hidden_size", "num_attention_heads"]),
        ({"num_key_value_heads": 3}, ["num_heads is 4", "num_kv_heads"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "finite"]),
        ({"hidden_act": "relu"}, ["hidden_act", "relu"]),
        ({"sliding_window": 128}, ["sliding_window", "not implemented for model_type 'llama'"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({"use_alibi": True}, ["use_alibi"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"rope_scaling": {"rope_type": "foo"}}, ["rope_type", "'foo'"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "new": 1}}, ["new", "linear"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "object"]),
        ({"rope_parameters": {"rope_theta": 5.0}}, ["rope_theta", "10000.0", "agree"]),
        ({"rope_theta": "much"}, ["rope_theta", "finite number"]),
        ({"partial_rotary_factor": 0.4}, ["rotary_dim is 3", "even"]),
        ({"text_config": []}, ["text_config"]),
    ],
)
def test_config_that_cannot_be_served(tmp_path, changes, words):
    tiny.refused(tiny.write(tmp_path, **changes), *words)


def test_harmless_keys_pass(tmp_path):
    tiny.write(tmp_path, attention_dropout=0.1, use_cache=True, _name_or_path="x", unsloth_fixed=True, use_alibi=False)
    open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 500000}, 500000.0),
        ({"rope_theta": "500000"}, 500000.0),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 500000.0),
        ({"rope_theta": None, "rope_scaling": {"rope_theta": 500000.0, "type": "default"}}, 500000.0),
        ({"rope_theta": None, "text_config": {"rope_theta": 500000.0}}, 500000.0),
        ({"rope_theta": 500000.0, "rope_scaling": None}, 500000.0),
        ({"rope_theta": None}, 10000.0),
    ],
)
def test_rope_base_in_all_spellings(tmp_path, changes, theta):
    assert open_checkpoint(tiny.write(tmp_path, **changes)).config.rope.theta == theta


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_or_not(tmp_path, flag, head, caplog):
    weights = tiny.tensors(head=head != "absent")
    if head == "equal":
        weights[HEAD] = weights[EMBED].copy()
    path = tiny.write(tmp_path, weights, tie_word_embeddings=flag)
    if flag is False and head == "absent":
        tiny.refused(path, "lm_head.weight", "tie_word_embeddings is false")
        return
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(path)
    assert checkpoint.config.tie_embeddings == (head == "absent" or (flag is True and head == "equal"))
    assert bool(caplog.messages) == ((flag, head) in ((True, "different"), (None, "absent")))
    if not checkpoint.config.tie_embeddings:
        np.testing.assert_array_equal(checkpoint.read("head.weight"), weights[HEAD])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), ["1 tensor is missing", "model.norm.weight"]),
        (lambda w: [w.pop(name) for name in list(w) if "mlp" in name], ["6 tensors are missing", "…"]),
        (lambda w: w.update(foo=np.ones(3, np.float32)), ["1 tensor is unknown", "foo"]),
        (lambda w: w.update({EMBED: w[EMBED].T.copy()}), ["wrong shape", "[32, 320]", "[320, 32]"]),
        (lambda w: w.update({EMBED: w[EMBED].astype(np.int32)}), ["not implemented", "I32"]),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, words):
    weights = tiny.tensors()
    change(weights)
    tiny.refused(tiny.write(tmp_path, weights), *words)


def test_known_harmless_tensors_are_listed_in_the_log(tmp_path, caplog):
    weights = tiny.tensors()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    with caplog.at_level(logging.INFO):
        open_checkpoint(tiny.write(tmp_path, weights))
    assert "rotary_emb.inv_freq" in caplog.text


def _rewrite(directory, file, change):
    path = directory / file
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d, m: os.remove(d / SECOND), ["in the index but their files are absent", SECOND]),
        (lambda d, m: _rewrite(d, SECOND, lambda b: b[:-1]), [SECOND, "complete"]),
        (lambda d, m: _rewrite(d, SECOND, lambda b: b""), [SECOND, "complete"]),
        (lambda d, m: _rewrite(d, SECOND, lambda b: b"\xff" * 7 + b"\x7f" + b[8:]), [SECOND]),
        (
            lambda d, m: _rewrite(d, SECOND, lambda b: b"version https://git-lfs.github.com/spec/v1"),
            ["git-lfs pointer"],
        ),
        (lambda d, m: tiny.write_index(d, {**m, "foo": SECOND}), ["missing", "foo", SECOND]),
        (lambda d, m: tiny.write_index(d, {**m, EMBED: "../x.safetensors"}), ["../x", "same folder"]),
        (lambda d, m: tiny.write_index(d, {**m, EMBED: "/etc/passwd"}), ["/etc/passwd", "same folder"]),
        (lambda d, m: tiny.write_index(d, {n: f for n, f in m.items() if n != EMBED}), ["does not name", EMBED]),
        (lambda d, m: tiny.write_index(d, {}), ["weight_map"]),
        (lambda d, m: [os.remove(d / file) for file in set(m.values())], ["files are absent"]),
        (lambda d, m: os.remove(d / "model.safetensors.index.json"), ["index.json is missing"]),
        (lambda d, m: _duplicate(d, m), ["in two files", EMBED]),
        (lambda d, m: os.chmod(d, 0o755) or (d / "config.json").write_text("{}"), ["model_type is missing"]),
    ],
)
def test_damaged_shards(tmp_path, damage, words):
    damage(tmp_path, tiny.write_shards(tmp_path))
    tiny.refused(tmp_path, *words)


def _duplicate(directory, weight_map):
    """Puts the embedding, with other values, into a second shard."""
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[EMBED])
    names = [name for name, file in weight_map.items() if file == other]
    weights = tiny.tensors()
    save_file({**{name: weights[name] for name in names}, EMBED: weights[EMBED] + 1}, directory / other)


def test_stray_files_are_not_read(tmp_path):
    tiny.write_shards(tmp_path)
    save_file({EMBED: np.zeros((3, 3), np.float32)}, tmp_path / "consolidated.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    np.testing.assert_array_equal(checkpoint.read("embed.weight"), tiny.tensors()[EMBED])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p / "absent", ["no such file or directory"]),
        (lambda p: p, ["empty directory"]),
        (lambda p: (p / "x.txt").write_text("x") and p, ["config.json is missing"]),
        (lambda p: (p / "a.gguf").write_text("x") and p, ["config.json is missing", "a.gguf"]),
        (lambda p: (p / "x.txt").write_text("x") and p / "x.txt", ["not a GGUF file"]),
        (lambda p: tiny.write_config(p) or p, ["model.safetensors is missing"]),
        (lambda p: tiny.write_config(p) or ((p / "pytorch_model.bin").write_text("x") and p), ["pickle"]),
        (lambda p: "../a/..", []),
    ],
)
def test_paths_that_are_no_checkpoint(tmp_path, make, words):
    tiny.refused(make(tmp_path), *words)


def test_composite_checkpoints_keep_their_text_part(tmp_path):
    """As Gemma 3 with vision: the text model's tensors behind a prefix, beside others."""
    text = {key: tiny.CONFIG[key] for key in tiny.CONFIG if key not in ("architectures", "model_type", "rope_theta")}
    text |= {"model_type": "gemma3_text", "head_dim": tiny.HEAD_DIM, "sliding_window": 16}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {f"language_model.{name}": array for name, array in tiny.tensors(head=True).items()}
    for layer in range(tiny.LAYERS):
        at = f"language_model.model.layers.{layer}"
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weights[f"{at}.{norm}.weight"] = np.zeros(tiny.HIDDEN, np.float32)
        for side in "qk":
            weights[f"{at}.self_attn.{side}_norm.weight"] = np.zeros(tiny.HEAD_DIM, np.float32)
    weights["vision_tower.x.weight"] = np.zeros(3, np.float32)
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.model_type == "gemma3_text"
    np.testing.assert_array_equal(checkpoint.read("embed.weight"), weights[f"language_model.{EMBED}"])
