"""Small models in memory: one with chosen logits, one with random weights."""

import dataclasses
import hashlib

import numpy as np
import tokenizers

from precast.models.checkpoint.base import Checkpoint, TextAssets
from precast.models.config import ModelConfig, RopeConfig
from precast.models.params import param_specs

VOCAB = 320
EOS_IDS = (2, 9)


class MemoryCheckpoint(Checkpoint):
    """A checkpoint whose arrays are at hand."""

    def __init__(self, name, config, arrays, folder, text=None):
        self.path = str(folder)
        self.name = name
        self.config = config
        self.fingerprint = hashlib.sha256(name.encode()).hexdigest()
        self.text = text
        self._arrays = arrays

    def read(self, name, index=None):
        return self._arrays[name] if index is None else self._arrays[name][index]

    def check(self):
        assert {name: array.shape for name, array in self._arrays.items()} == {
            name: spec.shape for name, spec in param_specs(self.config).items()
        }


def text_assets(tokenizer=None, eos_token_ids=EOS_IDS):
    return TextAssets(
        tokenizer_json=(tokenizer or byte_level_tokenizer()).to_str(),
        tokenizer_config={},
        chat_template=None,
        bos_token_id=None,
        eos_token_ids=eos_token_ids,
        pad_token_id=None,
        add_bos=False,
        config_json={},
    )


def byte_level_tokenizer():
    """256 bytes and a few merges behind ten special tokens."""
    specials = ["<s>", "<pad>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<x>", "<y>", "<|eot|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("l", "l"), ("o", "w")]
    vocab = {token: i for i, token in enumerate([*specials, *alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def chain(rows, folder, *, poisoned=(), max_positions=512, eos_token_ids=EOS_IDS, name="chain"):
    """A model whose logits after token i are ``rows[i]`` (a dict of id -> logit over a floor of -30, or an array).

    Tokens are one-hot, attention and MLP add nothing, and the final norm makes token i sqrt(VOCAB) at position i,
    so that column i of the head times that is the row.  A ``poisoned`` token is not a number from the start.
    """
    config = ModelConfig(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        num_layers=1,
        num_heads=20,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=32,
        max_position_embeddings=max_positions,
        norm_eps=1e-6,
    )
    scale = 1 / np.sqrt(1 / VOCAB + 1e-6)
    logits = np.full((VOCAB, VOCAB), -30.0, np.float32)
    for token_id, row in rows.items() if isinstance(rows, dict) else enumerate(rows):
        if isinstance(row, dict):
            for other, value in row.items():
                logits[token_id, other] = value
        else:
            logits[token_id] = row
    arrays = {}
    for key, spec in param_specs(config).items():
        arrays[key] = np.ones(spec.shape, np.float32) if "norm" in key else np.zeros(spec.shape, np.float32)
    arrays["embed.weight"] = np.eye(VOCAB, dtype=np.float32)
    arrays["embed.weight"][list(poisoned)] = np.nan
    arrays["head.weight"] = (logits.T / scale).astype(np.float32)
    return MemoryCheckpoint(name, config, arrays, folder, text_assets(eos_token_ids=eos_token_ids))


def random_llama(folder, *, seed=0, vocab_size=VOCAB, max_positions=512, name="rand", **changes):
    """Two layers of live attention, with weights large enough that logits are not flat."""
    config = ModelConfig(
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=max_positions,
        rope=RopeConfig(theta=10000.0),
    )
    config = dataclasses.replace(config, **changes)
    rng = np.random.default_rng(seed)
    arrays = {}
    for key, spec in param_specs(config).items():
        std = 0.1 if "norm" in key else 0.5
        arrays[key] = (rng.standard_normal(spec.shape) * std + ("norm" in key)).astype(np.float32)
    return MemoryCheckpoint(name, config, arrays, folder, text_assets(eos_token_ids=()))
