"""Tokenizers from GGUF metadata."""

from __future__ import annotations

import itertools

import gguf_writer
import pytest
import tiny_checkpoints as tiny
import tokenizers

from precast.models.checkpoint import CheckpointError, open_checkpoint

SPACE = "\u2581"
PIECES = ["he", "ll", "o", "llo", "hello", "wor", "ld", "world", "th", "the", "cat", "s", "cats", "at", "a"]
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
TEXTS = ["hello world", "  the cats", "hellothe", "café 漢字 😀", "", " ", "the\ncat", "a<s>b", "cat</think>s"]


def pieces():
    """(tokens, scores, types) of a SentencePiece BPE vocabulary."""
    vocabulary = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    vocabulary += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    words = [*PIECES, *(SPACE + piece for piece in PIECES), SPACE * 2]
    vocabulary += [(word, -float(rank), NORMAL) for rank, word in enumerate(words)]
    letters = sorted({letter for word in words for letter in word} - set(words))
    vocabulary += [(letter, -1000.0 - rank, NORMAL) for rank, letter in enumerate(letters)]
    vocabulary += [("</think>", 0.0, USER)]
    return [list(column) for column in zip(*vocabulary, strict=True)]


def metadata(kind="llama", **changes):
    tokens, scores, types = pieces()
    values = {
        "model": kind,
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "gpt2":
        values |= {"merges": ["h e", "l l"], "pre": "gpt-2"}
    values |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def open_with(tmp_path, **values):
    path = gguf_writer.write(tmp_path / "a.gguf", tiny.tensors(), metadata=metadata(**values))
    text = open_checkpoint(path).text
    assert text is not None
    return text


def sentencepiece(text, tokens, scores, types):
    """The algorithm itself: merge the best-scored neighbours, the leftmost first; bytes for unknown letters."""
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list(text)
    while True:
        pairs = [
            (-scores[ids[a + b]], at)
            for at, (a, b) in enumerate(itertools.pairwise(symbols))
            if types[ids.get(a + b, 0)] == NORMAL
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        i for symbol in symbols for i in ([ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()])
    ]


@pytest.mark.parametrize("spaced", [True, False])
def test_sentencepiece_ids(tmp_path, spaced):
    text = open_with(tmp_path, add_space_prefix=spaced)
    tokenizer = tokenizers.Tokenizer.from_str(text.tokenizer_json)
    tokens, scores, types = pieces()
    for string in TEXTS[:-2]:
        marked = (SPACE if spaced and string else "") + string.replace(" ", SPACE)
        ids = tokenizer.encode(string, add_special_tokens=False).ids
        assert ids == sentencepiece(marked, tokens, scores, types), string
        assert tokenizer.decode(ids) == string
    assert tokens.index("<s>") in tokenizer.encode(TEXTS[-2]).ids
    assert tokens.index("</think>") in tokenizer.encode(TEXTS[-1]).ids


@pytest.mark.parametrize(
    ("kind", "changes", "add_bos"),
    [
        ("llama", {}, True),
        ("llama", {"add_bos_token": False}, False),
        ("llama", {"add_bos_token": True}, True),
        ("llama", {"bos_token_id": None}, False),
        ("gpt2", {}, False),
        ("gpt2", {"add_bos_token": True}, True),
        ("gpt2", {"pre": "llama-bpe"}, True),
        ("gpt2", {"pre": None}, False),
    ],
)
def test_bos(tmp_path, kind, changes, add_bos):
    text = open_with(tmp_path, kind=kind, **changes)
    assert text.add_bos is add_bos
    assert text.tokenizer_config["add_bos_token"] is add_bos
    assert text.bos_token_id == (None if changes.get("bos_token_id", 1) is None else 1)


def test_every_end_token_counts(tmp_path):
    assert open_with(tmp_path, eot_token_id=7, eom_token_id=9).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "rwkv"}, "rwkv"),
        ({"kind": "gpt2", "merges": None}, "merges is missing"),
        ({"kind": "gpt2", "pre": "foo"}, "'foo'"),
        ({"scores": [0.0]}, "scores"),
        ({"token_type": [1]}, "token_type"),
        ({"eos_token_id": 100000}, "eos_token_id"),
        ({"tokens": [f"t{i}" for i in range(400)], "token_type": None, "scores": [0.0] * 400}, "400 tokens"),
    ],
)
def test_metadata_that_cannot_be_used(tmp_path, changes, words):
    with pytest.raises(CheckpointError, match=words):
        open_with(tmp_path, **changes)
