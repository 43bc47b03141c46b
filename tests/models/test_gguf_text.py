"""Tokenizers from GGUF metadata."""

from __future__ import annotations

import inspect
import itertools

import gguf_writer
import pytest
import regex
import tiny_checkpoints as tiny
import tokenizers
import transformers
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter

from precast.models.checkpoint import CheckpointError, gguf_text, open_checkpoint

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


def byte_level(cut):
    """The tokenizer of a byte-level vocabulary with a few merges, and its (vocabulary, merges)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        "h e",
        "l l",
        "he ll",
        "\u0120 w",
        "1 2",
        "12 3",
        "\u0120 \u0120",
        "' s",
        "\u010a \u010a",
        "\u00c3 \u00a9",
    ]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges)]
    values = {"tokens": tokens, "merges": merges, "pre": cut}
    tokenizer = gguf_text.read_text(
        {f"tokenizer.ggml.{key}": value for key, value in {"model": "gpt2", **values}.items()},
        {"vocab_size": len(tokens)},
        "test",
    )
    assert tokenizer is not None
    return tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json), (tokens, merges)


AWKWARD = [
    "Hello world, it's 12345 o'clock; I'LL pay $1,000.50!",
    "  leading\t\ttabs and   runs  \n\n\n of\r\nlines \n",
    "caf\u00e9 cafe\u0301 漢字はい ภาษา مرحبا",
    "\U0001f600\U0001f1e9\U0001f1ea \u00bd \u00b2\u00b3 \u0663\u0664",
    "def f(x):\n    return x**2  # <= >= != ~^|`\n",
    "a\u00a0b\u2003c\u200bd __init__ \u2026\u2014\u201cquoted\u201d 'tis 's",
    "",
    " ",
    "\n",
    "9 99 999 9999 1e-5 0x1F",
]


# The patterns in the order in which llama.cpp's src/llama-vocab.cpp applies them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ENGLISH = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_CPP = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [_GPT2],
    **{name: [r"\p{N}", _GPT2] for name in ("smollm", "starcoder", "refact")},
    **{name: [_ENGLISH + r"\p{N}{1,3}" + _REST] for name in ("llama-bpe", "llama3", "llama-v3")},
    **{name: [_ENGLISH + r"\p{N}" + _REST] for name in ("qwen2", "deepseek-r1-qwen", "megrez")},
}


def pieces_of(text, patterns):
    """What each pattern matches, and what lies between its matches, is cut by the next."""
    parts = [text]
    for pattern in patterns:
        parts = [piece for part in parts for piece in isolated(part, pattern)]
    return parts


def isolated(text, pattern):
    at, found = 0, []
    for match in regex.finditer(pattern, text):
        found += [text[at : match.start()], match.group()]
        at = match.end()
    return [piece for piece in (*found, text[at:]) if piece]


def test_every_implemented_cut_is_compared():
    assert set(LLAMA_CPP) == set(gguf_text._CUTS)


@pytest.mark.parametrize("cut", LLAMA_CPP)
def test_texts_are_cut_as_llama_cpp_does(cut):
    tokenizer, _ = byte_level(cut)
    for text in AWKWARD:
        cuts = [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert cuts == pieces_of(text, LLAMA_CPP[cut]), text


@pytest.mark.parametrize(("cut", "kind"), [("gpt-2", "GPT2"), ("qwen2", "Qwen2")])
def test_ids_are_those_of_transformers(cut, kind):
    tokenizer, (tokens, merges) = byte_level(cut)
    theirs = getattr(transformers, f"{kind}Tokenizer")(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(merge.split(" ")) for merge in merges]
    )
    for text in AWKWARD:
        ids = tokenizer.encode(text).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert cut == "qwen2" or tokenizer.decode(ids) == text


def test_llama3_is_cut_as_transformers_does():
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    assert pattern == gguf_text._CUTS["llama-bpe"][0]
