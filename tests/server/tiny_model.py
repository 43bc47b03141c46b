"""A small random Llama checkpoint in Hugging Face format, with a byte-level tokenizer and a chat template."""

import json
import pathlib

import numpy as np
import safetensors.numpy
import tokenizers

SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _FFN = 32, 2, 4, 2, 8, 64


def tokenizer():
    """Bytes, the special tokens, and a few merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "t"), ("t", "h"), ("th", "e")]
    entries = SPECIAL_TOKENS + alphabet + [a + b for a, b in merges]
    model = tokenizers.models.BPE({token: index for index, token in enumerate(entries)}, merges)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return made


def write(folder, seed=0, max_position_embeddings=256):
    """Writes config.json, tokenizer files and model.safetensors; returns the folder."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_position_embeddings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    safetensors.numpy.save_file(_weights(seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def _weights(seed):
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(0, 0.5, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(VOCAB_SIZE, _HIDDEN), "lm_head.weight": normal(VOCAB_SIZE, _HIDDEN)}
    weights["model.norm.weight"] = np.ones(_HIDDEN, np.float32)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
            prefix + "self_attn.q_proj.weight": normal(_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.k_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.v_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.o_proj.weight": normal(_HIDDEN, _HEADS * _HEAD_DIM),
            prefix + "mlp.gate_proj.weight": normal(_FFN, _HIDDEN),
            prefix + "mlp.up_proj.weight": normal(_FFN, _HIDDEN),
            prefix + "mlp.down_proj.weight": normal(_HIDDEN, _FFN),
        }
    return weights
