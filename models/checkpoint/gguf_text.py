"""A tokenizer and its settings from GGUF metadata."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from precast.models.checkpoint.base import TextAssets
from precast.models.errors import CheckpointError

_log = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# GPT-2's own pattern, and those of Llama 3 and of Qwen 2, which differ in how many digits stand together.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# How ``tokenizer.ggml.pre`` cuts a text before merging: by one pattern after the other, as llama.cpp's
# src/llama-vocab.cpp defines the name (matches and what lies between them are pieces alike).
_CUTS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "megrez": (_QWEN2,),
}
# A piece that is a token is not merged from its letters, and a text begins with BOS unless the file says otherwise.
_WHOLE_PIECES = ("llama-bpe", "llama3", "llama-v3")
# llama.cpp does not normalise; the tokenizers that these models were trained with do.
_NFC = ("qwen2",)


def read_text(metadata: Mapping[str, Any], config: Mapping[str, Any], where: str) -> TextAssets | None:
    """Builds what a Hugging Face directory would hold; None where the file has no vocabulary.

    Args:
      metadata: the file's.
      config: what stands for ``config.json``.
      where: the file, for errors.

    Raises:
      CheckpointError: a kind of tokenizer that is not implemented, or inconsistent metadata.
    """
    ours = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    tokens = ours.get("tokens")
    if tokens is None:
        return None
    if len(tokens) > config["vocab_size"]:
        raise CheckpointError(f"{where}: the tokenizer has {len(tokens)} tokens, the model {config['vocab_size']}")
    kind = ours.get("model")
    types = ours.get("token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if kind == "gpt2":
        tokenizer = _byte_level(ours, tokens, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(ours, tokens, types, where)
    else:
        raise CheckpointError(f"{where}: tokenizer.ggml.model is {kind!r}: not implemented; implemented: gpt2, llama")
    tokenizer["added_tokens"] = _added(tokens, types)
    ids = {name: _token_id(ours, f"{name}_token_id", len(tokens), where) for name in ("bos", "eos")}
    ids["pad"] = _token_id(ours, "padding_token_id", len(tokens), where)
    ids["unk"] = _token_id(ours, "unknown_token_id", len(tokens), where)
    add_bos = ours.get("add_bos_token", kind == "llama" or ours.get("pre") in _WHOLE_PIECES) and ids["bos"] is not None
    ends = {_token_id(ours, key, len(tokens), where) for key in _END_KEYS} - {None}
    settings = {f"{name}_token": None if token_id is None else tokens[token_id] for name, token_id in ids.items()}
    template = metadata.get("tokenizer.chat_template")
    settings |= {
        "add_bos_token": bool(add_bos),
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return TextAssets(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False),
        tokenizer_config=settings,
        chat_template=template,
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(sorted(token_id for token_id in ends if token_id is not None)),
        pad_token_id=ids["pad"],
        add_bos=bool(add_bos),
        config_json={**config, "eos_token_id": ids["eos"], "bos_token_id": ids["bos"], "pad_token_id": ids["pad"]},
    )


def _token_id(ours: Mapping[str, Any], key: str, count: int, where: str) -> int | None:
    value = ours.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise CheckpointError(f"{where}: tokenizer.ggml.{key} is {value}: it must be from 0 to {count - 1}")
    return value


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found in the text before anything else: control tokens and those a user defined."""
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _tokenizer(model: dict[str, Any], normalizer: Any, pre_tokenizer: Any, decoder: Any) -> dict[str, Any]:
    bpe = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, **model}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": bpe,
    }


def _byte_level(ours: Mapping[str, Any], tokens: Sequence[str], where: str) -> dict[str, Any]:
    """Byte-level BPE: a vocabulary over visible stand-ins for bytes, and a list of merges."""
    merges = ours.get("merges")
    if merges is None:
        raise CheckpointError(f"{where}: tokenizer.ggml.merges is missing: a tokenizer of kind gpt2 needs it")
    cut = ours.get("pre")
    if cut is None:
        cut = "default"
        _log.warning("%s: tokenizer.ggml.pre is missing: ids may differ from those that the model knows", where)
    if cut not in _CUTS:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre is {cut!r}: not implemented; implemented: {', '.join(_CUTS)}"
        )
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _CUTS[cut]
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    model = {
        "unk_token": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": cut in _WHOLE_PIECES,
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": [_pair(merge) for merge in merges],
    }
    normalizer = {"type": "NFC"} if cut in _NFC else None
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _tokenizer(model, normalizer, {"type": "Sequence", "pretokenizers": steps}, decoder)


def _pair(merge: str) -> tuple[str, str]:
    gap = merge.index(" ", 1)
    return merge[:gap], merge[gap + 1 :]


def _sentencepiece(ours: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str) -> dict[str, Any]:
    """SentencePiece BPE: pieces with scores, spaces as U+2581, unknown characters as bytes."""
    scores = ours.get("scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.scores must have one entry a token: a tokenizer of kind llama needs it"
        )
    spaced = bool(ours.get("add_space_prefix", True))
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    steps = [{"type": "Prepend", "prepend": "\u2581"}, to_mark] if spaced else [to_mark]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaced:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = ours.get("unknown_token_id")
    model = {
        "unk_token": tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": _merges(tokens, scores, types),
    }
    return _tokenizer(
        model, {"type": "Sequence", "normalizers": steps}, None, {"type": "Sequence", "decoders": decoders}
    )


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first: what SentencePiece does, as a merge list."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    found = []
    for token_id, token in enumerate(tokens):
        if types[token_id] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[token_id], token_id, left, right))
    return [(str(tokens[left]), str(tokens[right])) for _, _, left, right in sorted(found)]
