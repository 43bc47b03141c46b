"""Tokenizer, chat template and special ids of a Hugging Face directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from precast.models.checkpoint.base import TextAssets, load_json, load_text
from precast.models.errors import CheckpointError

_log = logging.getLogger(__name__)


def read_text(directory: str, config: Mapping[str, Any], vocab_size: int) -> TextAssets | None:
    """Reads ``tokenizer.json`` and what belongs to it; None where there is no tokenizer.

    The end ids are the union of the tokenizer's end token and of those in generation_config.json
    (config.json where that has none).

    Raises:
      CheckpointError: a file is damaged, or the tokenizer has ids beyond the model's vocabulary.
    """
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.exists(path):
        other = [name for name in ("tokenizer.model", "vocab.json") if os.path.exists(os.path.join(directory, name))]
        if other:
            _log.warning("%s: %s cannot be used: convert it to tokenizer.json with transformers", directory, other[0])
        return None
    tokenizer = load_json(path)
    token_ids = _token_ids(tokenizer, path, vocab_size)
    settings = dict(_optional(directory, "tokenizer_config.json"))
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        settings[name] = _token_text(settings.get(name))
    template = _chat_template(directory, settings)
    settings["chat_template"] = template
    generation = _optional(directory, "generation_config.json")
    ends = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    ends |= _ids(token_ids.get(settings["eos_token"]))
    bos = _first(token_ids.get(settings["bos_token"]), generation.get("bos_token_id"), config.get("bos_token_id"))
    pad = _first(token_ids.get(settings["pad_token"]), generation.get("pad_token_id"), config.get("pad_token_id"))
    if settings["bos_token"] is None and bos is not None:
        settings["bos_token"] = next((text for text, token_id in token_ids.items() if token_id == bos), None)
    if not isinstance(settings.get("add_bos_token"), bool):
        settings["add_bos_token"] = settings["bos_token"] in _prepended(tokenizer.get("post_processor"))
    return TextAssets(
        tokenizer_json=load_text(path),
        tokenizer_config=settings,
        chat_template=template,
        bos_token_id=bos,
        eos_token_ids=tuple(sorted(token_id for token_id in ends if token_id < vocab_size)),
        pad_token_id=pad,
        add_bos=settings["add_bos_token"] and bos is not None,
        config_json=dict(config),
    )


def _optional(directory: str, name: str) -> dict[str, Any]:
    path = os.path.join(directory, name)
    return load_json(path) if os.path.exists(path) else {}


def _token_ids(tokenizer: Mapping[str, Any], path: str, vocab_size: int) -> dict[str | None, int]:
    """Text of each token -> id; every id must be one that the model has."""
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        token_ids = {**vocabulary, **added}
        highest = max(token_ids.values(), default=-1)
        if highest >= vocab_size:
            text = next(text for text, token_id in token_ids.items() if token_id == highest)
            raise CheckpointError(
                f"{path}: token {text!r} has id {highest}, but the model has {vocab_size} ids: "
                "the tokenizer is of another model"
            )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a tokenizer of the tokenizers library: {error!r}") from None
    return token_ids


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(directory: str, settings: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja, chat_template.json, or the tokenizer's settings, in that order."""
    path = os.path.join(directory, "chat_template.jinja")
    if os.path.exists(path):
        return load_text(path)
    value = _optional(directory, "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) else None


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0}


def _first(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _prepended(processor: Any) -> list[str]:
    """Special tokens that a tokenizer.json's post-processor puts in front of a text."""
    if not isinstance(processor, Mapping):
        return []
    if processor.get("type") == "Sequence":
        return [text for inner in processor.get("processors", ()) for text in _prepended(inner)]
    if processor.get("type") != "TemplateProcessing":
        return []
    texts = []
    for piece in processor.get("single", ()):
        if "SpecialToken" not in piece:
            break
        texts.append(piece["SpecialToken"].get("id"))
    return texts
