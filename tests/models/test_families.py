"""Every family against transformers in float32: prefill, chunked prefill, decode, greedy tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from model_runner import ModelRunner
from reference_models import greedy, logits, make

from precast.models.checkpoint import open_checkpoint
from precast.models.families import read_config

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
LLAMA3 = _options(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = _options(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
EXPERTS = _options(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48)
LATENT = _options(
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    num_key_value_heads=4,
    n_routed_experts=16,
    num_experts_per_tok=3,
    n_shared_experts=2,
    moe_intermediate_size=48,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
# A line a case: the reference's config class and what differs from BASE.
CASES = {
    "llama": ("Llama", {}),
    "llama biased tied": ("Llama", _options(attention_bias=True, mlp_bias=True, head_dim=24, tie_word_embeddings=True)),
    "llama3 rope": ("Llama", _options(rope_parameters=LLAMA3)),
    "yarn rope": ("Qwen2", _options(rope_parameters=YARN, num_key_value_heads=1)),
    "mistral": ("Mistral", _options(sliding_window=12, head_dim=20)),
    "smollm3": (
        "SmolLM3",
        _options(num_hidden_layers=4, rope_parameters=_options(rope_type="default", rope_theta=5e5)),
    ),
    "qwen2": ("Qwen2", _options(use_sliding_window=True, sliding_window=12, max_window_layers=1)),
    "qwen3": ("Qwen3", _options(head_dim=24, attention_bias=True)),
    "gemma2": (
        "Gemma2",
        _options(head_dim=24, sliding_window=12, query_pre_attn_scalar=48, attn_logit_softcapping=5.0),
    ),
    "gemma3": ("Gemma3Text", _options(num_hidden_layers=4, sliding_window_pattern=2, head_dim=24, sliding_window=12)),
    "phi3": ("Phi3", _options(sliding_window=20)),
    "phi4 longrope": (
        "Phi3",
        _options(
            partial_rotary_factor=0.75,
            head_dim=16,
            original_max_position_embeddings=32,
            rope_parameters=_options(
                rope_type="longrope",
                rope_theta=10000.0,
                short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
            ),
        ),
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        _options(embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=4.0, attention_multiplier=0.1),
    ),
    "glm": ("Glm", _options(head_dim=24)),
    "glm4": ("Glm4", _options(head_dim=24)),
    "cohere": ("Cohere", _options(use_qk_norm=True, logit_scale=0.25)),
    "cohere2": ("Cohere2", _options(num_hidden_layers=4, sliding_window=12, attention_bias=True)),
    "mixtral": ("Mixtral", _options(num_local_experts=6, num_experts_per_tok=2, sliding_window=12)),
    "qwen2 moe": ("Qwen2Moe", _options(**EXPERTS, shared_expert_intermediate_size=64)),
    "qwen3 moe": ("Qwen3Moe", _options(**EXPERTS, norm_topk_prob=True, mlp_only_layers=[0], head_dim=24)),
    "olmoe": ("Olmoe", _options(num_experts=8, num_experts_per_tok=3)),
    "gpt-oss": ("GptOss", _options(num_local_experts=6, num_experts_per_tok=2, head_dim=24, sliding_window=12)),
    "deepseek v2": ("DeepseekV2", _options(**LATENT, q_lora_rank=48, topk_method="group_limited_greedy")),
    "deepseek v2 lite": ("DeepseekV2", _options(**LATENT, q_lora_rank=None, topk_method="greedy")),
    "deepseek v3": (
        "DeepseekV3",
        _options(**LATENT, q_lora_rank=48, rope_parameters=_options(**YARN, mscale=1.0, mscale_all_dim=0.8)),
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


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3Text"])
def test_gemma_multiplies_embeddings_by_what_the_weights_dtype_makes_of_it(kind):
    theirs = getattr(transformers, f"{kind}Config")(**{**BASE, "hidden_size": 72})
    _, config = read_config(theirs.to_dict(), "config.json")
    for weights, dtype in ((torch.bfloat16, jnp.bfloat16), (torch.float32, jnp.float32)):
        embedding = transformers.AutoModelForCausalLM.from_config(theirs, dtype=weights).get_input_embeddings()
        torch.nn.init.ones_(embedding.weight)
        with torch.no_grad():
            scale = float(embedding(torch.ones(1, dtype=torch.long))[0, 0])
        assert np.float32(config.embedding_scale(jnp.dtype(dtype))) == scale
    assert config.embedding_scale(jnp.dtype(jnp.bfloat16)) != config.embedding_multiplier
