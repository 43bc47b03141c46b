"""``models.load``: against transformers, logits and gradients; batches, vmap and jit against one sequence at a time."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_models
import torch
import transformers

import precast.models
from precast.models import research
from precast.models.checkpoint import CheckpointError

VOCAB, MAX_TOKENS = 96, 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def pair(request, tmp_path_factory):
    """transformers' model and ours of the same files."""
    folder = str(tmp_path_factory.mktemp(request.param))
    return reference_models.make(CONFIGS[request.param], folder), precast.models.load(folder, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With both functions under jit: each test that can uses the same few programs."""
    folder = str(tmp_path_factory.mktemp("llama"))
    reference_models.make(CONFIGS["llama"], folder)
    config, params, prefill, decode = precast.models.load(folder, max_tokens=MAX_TOKENS)
    return config, params, jax.jit(prefill), jax.jit(decode)


def loss(prefill, params):
    logits, _ = prefill(params, IDS)
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(logprobs, IDS[:, 1:, None], axis=-1).mean(), logits


def test_logits_and_gradients_are_those_of_transformers(pair):
    reference, (_, params, prefill, _) = pair
    logits = reference(torch.tensor(IDS)).logits
    (ours, ours_logits), gradient = jax.jit(jax.value_and_grad(lambda p: loss(prefill, p), has_aux=True))(params)
    np.testing.assert_allclose(ours_logits, logits.detach(), atol=1e-4)
    theirs = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(IDS[:, 1:]).flatten().long())
    theirs.backward()
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-5)
    named = dict(reference.named_parameters())
    embed, head = named["model.embed_tokens.weight"], named["lm_head.weight"]
    np.testing.assert_allclose(gradient["embed"], embed.grad, atol=1e-5)
    np.testing.assert_allclose(gradient["head"].kernel, head.grad, atol=1e-5)
    is_stacked = len(gradient["layers"]) == 1
    for i in range(2):
        layer = jax.tree.map(lambda x, i=i: x[i], gradient["layers"][0]) if is_stacked else gradient["layers"][i]
        attention = [named[f"model.layers.{i}.self_attn.{side}_proj.weight"].grad for side in "qkv"]
        np.testing.assert_allclose(layer["qkv"].kernel, torch.cat(attention), atol=1e-5)
        norm = named[f"model.layers.{i}.input_layernorm.weight"].grad
        np.testing.assert_allclose(layer["attn_norm"], norm, atol=1e-5)


def test_decode_continues_a_ragged_batch(model):
    """Sequences of 4 and 6 tokens, padded."""
    _, params, prefill, decode = model
    whole, _ = prefill(params, IDS)
    lengths = np.array([4, 6], np.int32)
    padded = np.where(np.arange(IDS.shape[1]) < lengths[:, None], IDS, 7)
    logits, cache = prefill(params, padded)
    np.testing.assert_allclose(logits[0, :4], whole[0, :4], atol=1e-5)
    np.testing.assert_allclose(logits[1, :6], whole[1, :6], atol=1e-5)
    for _ in range(3):
        logits, cache = decode(params, cache, IDS[[0, 1], lengths], lengths)
        np.testing.assert_allclose(logits, whole[[0, 1], lengths], atol=1e-4)
        lengths += 1


def test_vmap_is_a_loop(model):
    _, params, prefill, decode = model
    logits, cache = prefill(params, IDS)
    token_ids, positions = IDS[:, 0], np.full(2, IDS.shape[1], np.int32)
    next_logits, _ = decode(params, cache, token_ids, positions)

    def both(sequence, token_id, position):
        logits, cache = prefill(params, sequence[None])
        return logits[0], decode(params, cache, token_id[None], position[None])[0][0]

    each, each_next = jax.jit(jax.vmap(both))(IDS, token_ids, positions)
    np.testing.assert_allclose(each, logits, atol=1e-5)
    np.testing.assert_allclose(each_next, next_logits, atol=1e-4)


def test_gradient_by_the_cached_keys_and_values_is_the_finite_difference(model):
    _, params, prefill, decode = model
    _, cache = prefill(params, IDS)

    @jax.jit
    @jax.value_and_grad
    def surprise(cache):
        logits, _ = decode(params, cache, IDS[:, 0], np.full(2, IDS.shape[1], np.int32))
        return jax.nn.log_softmax(logits)[:, 5].sum()

    direction = 1e-2 * np.random.default_rng(1).normal(size=cache.shape).astype(np.float32)
    expected = (surprise(cache + direction)[0] - surprise(cache - direction)[0]) / 2
    np.testing.assert_allclose((surprise(cache)[1] * direction).sum(), expected, rtol=1e-2, atol=1e-4)


def test_keys_and_values_of_both_ways_agree(model):
    config, params, prefill, decode = model
    _, whole = prefill(params, IDS)
    last = IDS.shape[1] - 1
    _, cache = prefill(params, np.concatenate([IDS[:, :-1], IDS[:, :1]], axis=1))
    _, cache = decode(params, cache, IDS[:, -1], np.full(2, last, np.int32))
    both = [research.keys_and_values(one, 2, config) for one in (cache, whole)]
    for ours, theirs in zip(*both, strict=True):
        assert ours.shape == (2, 2, 48, config.num_kv_heads, config.head_dim)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert np.abs(ours[:, :, : last + 1]).min() > 0 and not ours[:, :, last + 1 :].any()


def test_what_does_not_fit_is_told(model, tmp_path):
    config, params, prefill, decode = model
    with pytest.raises(ValueError, match=r"token_ids has 41 tokens: .* max_tokens, 40"):
        prefill(params, np.zeros((1, 41), np.int32))
    _, cache = prefill(params, IDS)
    with pytest.raises(ValueError, match=r"cache is .*: for 1 sequences it must be"):
        decode(params, cache, IDS[:1, 0], np.zeros(1, np.int32))
    logits, after = decode(params, cache, IDS[:, 0], np.array([39, 48], np.int32))
    assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()
    for old, new in zip(*(research.keys_and_values(one, 2, config) for one in (cache, after)), strict=True):
        np.testing.assert_array_equal(old[:, 1], new[:, 1])
    with pytest.raises(ValueError, match=r"max_tokens is 0"):
        precast.models.load(str(tmp_path), max_tokens=0)
    with pytest.raises(CheckpointError):
        precast.models.load(str(tmp_path))


def test_bfloat16_is_near_float32(model, tmp_path):
    reference_models.make(CONFIGS["llama"], str(tmp_path))
    config, params, prefill, _ = precast.models.load(str(tmp_path), dtype="bfloat16", max_tokens=MAX_TOKENS)
    logits, cache = jax.jit(prefill)(params, IDS)
    assert cache.dtype == jnp.bfloat16 and config == model[0]
    np.testing.assert_allclose(logits, model[2](model[1], IDS)[0], atol=0.5)


def test_the_package_alone_loads_nothing():
    subprocess.run([sys.executable, "-c", "import sys, precast.models; assert 'jax' not in sys.modules"], check=True)
