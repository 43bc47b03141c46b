"""Frequencies of every kind of RoPE against transformers, and the tables' precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from precast.models import rope
from precast.models.config import RopeConfig
from precast.models.families import read_config

HEAD_DIM, TRAINED = 16, 64
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4 * TRAINED,
}
ORIGINAL = {"original_max_position_embeddings": TRAINED}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + 0.7 * i for i in range(8)]}
KINDS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "yarn bounds": {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, **ORIGINAL},
    "yarn mscale": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, **ORIGINAL},
    "yarn attention": {"factor": 4.0, "attention_factor": 1.3, **ORIGINAL},
    "longrope": {**FACTORS, **ORIGINAL},
}


@pytest.mark.parametrize("length", [TRAINED, 3 * TRAINED, 5 * TRAINED])
@pytest.mark.parametrize("case", KINDS)
def test_frequencies(case, length):
    options = {"rope_type": case.split()[0], "rope_theta": 10000.0, **KINDS[case]}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=dict(options))
    expected, factor = ROPE_INIT_FUNCTIONS[options["rope_type"]](config, seq_len=length)
    _, ours = read_config({"model_type": "llama", **SIZES, "rope_scaling": options}, "config.json")
    got = rope.inverse_frequencies(ours.rope, HEAD_DIM, length)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6)
    assert ours.rope.attention_factor == pytest.approx(factor, rel=1e-7)


def test_llama3_bands():
    options = {"kind": "llama3", "factor": 8.0, **ORIGINAL}
    plain = rope.inverse_frequencies(RopeConfig(), HEAD_DIM, TRAINED)
    ratios = rope.inverse_frequencies(RopeConfig(**options), HEAD_DIM, TRAINED) / plain
    np.testing.assert_allclose(ratios, [1, 0.7728, 0.1304, 0.125, 0.125, 0.125, 0.125, 0.125], atol=5e-5)
    large = RopeConfig(kind="llama3", theta=500000.0, factor=8.0, original_max_position_embeddings=8192)
    plain = rope.inverse_frequencies(RopeConfig(theta=500000.0), 128, 8192)
    ratios = rope.inverse_frequencies(large, 128, 8192) / plain
    assert (np.isclose(ratios, 1).sum(), np.isclose(ratios, 0.125).sum()) == (29, 29)


def test_gemma3_scales_its_full_layers_only():
    raw = {"model_type": "gemma3_text", **SIZES, "head_dim": 16, "sliding_window": 8}
    _, config = read_config({**raw, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "config.json")
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("linear", 1000000.0, 8.0)
    assert config.rope_sliding is not None
    assert (config.rope_sliding.kind, config.rope_sliding.theta) == ("default", 10000.0)
    nested = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    _, config = read_config({**raw, "rope_parameters": nested}, "config.json")
    assert config.rope_sliding is not None
    assert (config.rope.theta, config.rope_sliding.theta) == (5e5, 2e4)


def test_angles_are_exact_far_out():
    """Where bfloat16 would make position 257 into 256 and 15962 into 15936."""
    _, config = read_config({"model_type": "llama", **SIZES}, "config.json")
    cos, sin = rope.tables(config, 20000)["full"]
    assert cos.dtype == sin.dtype == np.float32
    positions = np.array([257, 15962, 19999])
    np.testing.assert_allclose(cos[positions, 0], np.cos(positions), atol=1e-6)
    assert cos[257, 0] == pytest.approx(0.8193, abs=1e-4)


def test_interleaved_pairs_become_halves():
    rows = np.arange(2 * 8).reshape(16, 1)
    assert rope.halves_first(rows, 2, 2, 4)[:, 0].tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 9, 10, 12, 11, 13, 14, 15]
