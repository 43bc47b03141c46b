"""Tokenizer, template and special ids of Hugging Face directories."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoints as tiny

from precast.models.checkpoint import CheckpointError, open_checkpoint

SPECIALS = ["<s>", "</s>", "<|im_end|>"]


def tokenizer(**changes):
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in enumerate(SPECIALS)
    ]
    vocabulary = {text: i for i, text in enumerate([*SPECIALS, "a", "b"])}
    return {
        "version": "1.0",
        "added_tokens": added,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    } | changes


def text_of(directory, *, config=None, **files):
    """Writes a checkpoint with the given JSON files and returns its text assets."""
    tiny.write(directory, **(config or {}))
    files = {"tokenizer": tokenizer(), "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}} | files
    for name, content in files.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    text = open_checkpoint(str(directory)).text
    assert text is not None
    return text


def prepending(token):
    return {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            },
        ],
    }


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, {}, (1,)),
        ({"eos_token_id": [2, 1]}, {}, (1, 2)),
        ({"eos_token_id": 2}, {"eos_token_id": 4}, (1, 2)),
        ({}, {"eos_token_id": [2, 4]}, (1, 2, 4)),
    ],
)
def test_end_ids_are_a_union(tmp_path, generation, config, ends):
    files = {} if generation is None else {"generation_config": generation}
    assert text_of(tmp_path, config=config, **files).eos_token_ids == ends


@pytest.mark.parametrize(
    ("post_processor", "setting", "add_bos"),
    [
        (None, None, False),
        (prepending("<s>"), None, True),
        (prepending("</s>"), None, False),
        (None, True, True),
        (prepending("<s>"), False, False),
    ],
)
def test_bos_follows_the_tokenizer(tmp_path, post_processor, setting, add_bos):
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": setting}
    text = text_of(tmp_path, tokenizer=tokenizer(post_processor=post_processor), tokenizer_config=settings)
    assert (text.add_bos, text.bos_token_id) == (add_bos, 0)


def test_chat_template_from_its_three_places(tmp_path):
    settings = {
        "eos_token": "</s>",
        "chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}],
    }
    assert text_of(tmp_path, tokenizer_config=settings).chat_template == "D"
    assert text_of(tmp_path, chat_template={"chat_template": "J"}).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    text = text_of(tmp_path)
    assert text.chat_template == text.tokenizer_config["chat_template"] == "F"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer": "{"}, "tokenizer.json is not valid JSON"),
        ({"tokenizer": {"version": "1.0"}}, "tokenizer.json is not a tokenizer"),
        ({"tokenizer": tokenizer(model={"type": "BPE", "vocab": {"x": 320}, "merges": []})}, "'x' has id 320.*320 ids"),
        ({"tokenizer_config": "[]"}, "tokenizer_config.json"),
        ({"generation_config": "nothing"}, "generation_config.json"),
    ],
)
def test_damaged_text_files(tmp_path, files, words):
    with pytest.raises(CheckpointError, match=words):
        text_of(tmp_path, **files)
