"""Every family against transformers in float32: prefill, chunked prefill, decode, greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from model_runner import ModelRunner
from reference_models import greedy, logits, make

from precast.models.checkpoint import open_checkpoint

STEPS = 64
PROMPT = 40
TOLERANCE = 1e-3


def _options(**values):
    return values


BASE = _options(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# A line a case: the reference's config class and what differs from BASE.
CASES = {
    "llama": ("Llama", {}),
    "llama biased": ("Llama", _options(attention_bias=True, mlp_bias=True, head_dim=24, tie_word_embeddings=True)),
    "llama3": (
        "Llama",
        _options(
            rope_parameters=_options(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_family_agrees_with_transformers(case, tmp_path):
    kind, options = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **options})
    model = make(config, str(tmp_path))
    prompt = np.random.default_rng(7).integers(3, config.vocab_size, PROMPT).tolist()
    runner = ModelRunner(open_checkpoint(str(tmp_path)), num_positions=PROMPT + STEPS + 1)

    expected = logits(model, prompt)
    whole = runner.prefill(prompt)
    tolerance = TOLERANCE * expected.std()
    np.testing.assert_allclose(whole, expected, rtol=0, atol=tolerance)
    runner.reset()
    np.testing.assert_array_equal(runner.prefill(prompt, chunk=24), whole)
    runner.reset()
    runner.prefill(prompt[:24])
    for position in range(24, 32):
        np.testing.assert_array_equal(runner.decode(prompt[position]), whole[position])
    runner.reset()
    assert runner.greedy(prompt, STEPS) == greedy(model, prompt, STEPS)
