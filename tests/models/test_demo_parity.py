"""The demo model: the same logits as transformers at every position, from GGUF and from safetensors."""

from __future__ import annotations

import pathlib

import gguf
import numpy as np
import pytest
import reference_models
import tokenizers
import torch
import transformers
from gguf_writer import gguf_name
from model_runner import ModelRunner

from precast.models.checkpoint import open_checkpoint
from precast.server import demo, environment

LENGTH = 300
AWKWARD = [
    "Hello, world!",
    "  leading and   inner spaces ",
    "\n\n\ttabs\r\nand lines\n",
    "def f(x):\n    return x**2  # ok",
    "1234567890 3.14159 1e-5",
    "漢字かな交じり文、한국어 текст العربية",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 emoji",
    "<|im_start|>user\nhi<|im_end|>",
    "it's we'll I'D",
    "\x00\x7f\u200b\ufeff",
    "",
]


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(str(demo.fetch(environment.cache_dir())))


@pytest.fixture(scope="module")
def stored(checkpoint):
    """The file as the gguf library reads it, which takes seconds."""
    return gguf.GGUFReader(checkpoint.path)


@pytest.fixture(scope="module")
def reference(stored):
    """The weights in transformers, by way of the gguf library alone."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tensors = {tensor.name: tensor for tensor in stored.tensors}
    for name, parameter in model.named_parameters():
        tensor = tensors[gguf_name(name)]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(parameter.shape)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = array.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(parameter.shape)
        parameter.data.copy_(torch.tensor(array))
    return model


def test_logits_at_every_position(checkpoint, reference, tmp_path):
    text = (pathlib.Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizers.Tokenizer.from_str(checkpoint.text.tokenizer_json).encode(text).ids[:LENGTH]
    assert len(ids) == LENGTH
    expected = reference_models.logits(reference, ids)
    got = ModelRunner(checkpoint, num_positions=LENGTH).prefill(ids)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)
    reference.save_pretrained(tmp_path)
    same = open_checkpoint(str(tmp_path))
    np.testing.assert_array_equal(ModelRunner(same, num_positions=LENGTH).prefill(ids), got)


def test_tokenizer_is_that_of_the_model(checkpoint, stored):
    """Against one put together as the model's tokenizer.json is: digits one by one, then GPT-2's byte level."""
    ours = tokenizers.Tokenizer.from_str(checkpoint.text.tokenizer_json)
    metadata = stored.fields
    tokens = metadata["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"].contents()]
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel(False)]
    )
    theirs.decoder = tokenizers.decoders.ByteLevel()
    theirs.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens[:17]])
    for text in AWKWARD:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert checkpoint.text.eos_token_ids == (2,)
    assert (checkpoint.text.bos_token_id, checkpoint.text.pad_token_id, checkpoint.text.add_bos) == (1, 2, False)
    assert checkpoint.text.chat_template.startswith("{% for message in messages %}")
