"""Experts in MXFP4 against the dequantisation of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from reference_models import make
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from precast.models.checkpoint import CheckpointError, open_checkpoint

EXPERTS, HIDDEN, WIDTH = 4, 64, 96


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """(directory of a gpt-oss checkpoint with packed experts, what its experts should read as)."""
    directory = tmp_path_factory.mktemp("packed")
    config = transformers.GptOssConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    make(config, str(directory))
    weights = load_file(directory / "model.safetensors")
    rng = np.random.default_rng(0)
    expected = {}
    for part, out, width in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        name = f"model.layers.0.mlp.experts.{part}"
        blocks = rng.integers(0, 256, (EXPERTS, out, width // 32, 16), dtype=np.uint8)
        scales = rng.integers(118, 126, (EXPERTS, out, width // 32), dtype=np.uint8)
        expected[part] = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
        del weights[name]
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, directory / "model.safetensors")
    content = json.loads((directory / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(content))
    return directory, expected


def test_reads_what_transformers_reads(packed):
    directory, expected = packed
    checkpoint = open_checkpoint(str(directory))
    gate_up = expected["gate_up_proj"]
    for name, wanted in (
        ("gate", gate_up[..., ::2]),
        ("up", gate_up[..., 1::2]),
        ("down", expected["down_proj"]),
    ):
        got = checkpoint.read(f"layers.0.moe.{name}.weight").astype(np.float32)
        np.testing.assert_array_equal(got, wanted.swapaxes(1, 2))


def test_scales_that_do_not_fit_are_refused(packed, tmp_path):
    directory, _ = packed
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    for changed in ({**weights, name: weights[name][:, :-1].copy()}, {k: v for k, v in weights.items() if k != name}):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="down_proj_scales"):
            open_checkpoint(str(tmp_path))
