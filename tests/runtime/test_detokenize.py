"""Pieces of text, joined, are one decode of all ids; stop strings cut exactly."""

import random

import pytest
import tokenizers
import toy_models

from precast.runtime.detokenize import Detokenizer, StopMatcher


def metaspace_tokenizer():
    """SentencePiece-like: a leading space is a mark, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁the", "▁cat", "s", "x", "▁x", "\ufffd"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return tokenizer


TOKENIZERS = {"bytes": toy_models.byte_level_tokenizer(), "metaspace": metaspace_tokenizer()}


def streamed(tokenizer, ids, prompt=(), skip=True):
    stream = Detokenizer(tokenizer).stream(list(prompt), skip_special_tokens=skip)
    pieces = [stream.push(token_id) for token_id in ids]
    return pieces, "".join(pieces) + stream.flush()


def whole(tokenizer, ids, prompt=(), skip=True):
    """Text of ``ids`` after the prompt's."""
    before = tokenizer.decode(list(prompt), skip_special_tokens=skip)
    return tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)[len(before) :]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_fuzz_against_one_decode(name, skip):
    tokenizer = TOKENIZERS[name]
    rng = random.Random(0)
    size = tokenizer.get_vocab_size()
    common = [tokenizer.token_to_id(piece) for piece in ("▁", "▁the", "▁cat", "s", "Ġthe", "he", "ow")]
    common = [token_id for token_id in common if token_id is not None]
    for _ in range(3000):
        ids = [rng.choice(common) if rng.random() < 0.3 else rng.randrange(size + 5) for _ in range(rng.randint(1, 30))]
        ids = [token_id for token_id in ids if token_id < size]
        # A prompt that ends in the middle of a character has no text of its own to compare with.
        prompt = [rng.choice(common) for _ in range(rng.randint(1, 6))]
        _, text = streamed(tokenizer, ids, prompt, skip)
        assert text == whole(tokenizer, ids, prompt, skip), (ids, prompt)


def bytes_of(text):
    return [TOKENIZERS["metaspace"].token_to_id(f"<0x{byte:02X}>") for byte in text]


def test_known_sequences_of_byte_fallback():
    tokenizer = TOKENIZERS["metaspace"]
    token = tokenizer.token_to_id
    hello = [token("▁Hello"), token("▁"), *bytes_of("😀".encode()), token("▁the")]
    assert streamed(tokenizer, hello)[1] == "Hello 😀 the"
    assert streamed(tokenizer, [token("▁"), token("▁cat"), token("▁x")])[1] == " cat x"
    assert streamed(tokenizer, [token("▁Hello"), *bytes_of(b"\xc3"), token("▁the")])[1] == "Hello\ufffd the"
    assert streamed(tokenizer, bytes_of("😀".encode()[:2]))[1] == "\ufffd\ufffd"
    assert streamed(tokenizer, [token("\ufffd"), token("x")])[0] == ["\ufffd", "x"]


def test_a_long_run_of_broken_bytes_is_not_held_for_ever():
    tokenizer = TOKENIZERS["metaspace"]
    pieces, text = streamed(tokenizer, bytes_of(b"\xe4") * 2000)
    assert text == "\ufffd" * 2000
    assert len("".join(pieces[:200])) > 100


def test_a_character_is_given_out_when_it_is_whole():
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.encode("a😀b").ids
    assert streamed(tokenizer, ids)[0] == ["a", "", "", "", "😀", "b"]


def test_an_id_without_a_token_is_empty_text():
    for tokenizer in TOKENIZERS.values():
        assert streamed(tokenizer, [tokenizer.get_vocab_size() + 3])[1] == ""


def cut(pieces, stops, include=False):
    """(text, matched) of a stream of pieces."""
    matcher = StopMatcher(stops, include_stop=include)
    out = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        out += text
        if matched is not None:
            return out, matched
    return out + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["B<"], ("A", "B<")),
        (["<|im_end|>"], ("AB", "<|im_end|>")),
        (["|im_end"], ("AB<", "|im_end")),
        (["C"], ("AB<|im_end|>", "C")),
        (["AB", "B<|im"], ("", "AB")),
        (["<|im_end|>!", "<|im"], ("AB", "<|im")),
        (["zzz", "é"], ("AB<|im_end|>C", None)),
    ],
)
def test_stop_strings_over_several_tokens(stops, expected):
    assert cut(["A", "B", "<", "|im", "_end|>", "C"], stops) == expected


def test_the_stop_string_can_stay():
    assert cut(["A", "B", "<x"], ["B<"], include=True) == ("AB<", "B<")


def test_what_was_held_back_is_given_out_at_the_end():
    assert cut(["...", "?"], ["?x"]) == ("...?", None)


def test_random_stops_against_the_whole_text():
    rng = random.Random(1)
    for _ in range(300):
        pieces = ["".join(rng.choice("ab<") for _ in range(rng.randint(1, 3))) for _ in range(12)]
        stops = ["".join(rng.choice("ab<") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        out, matched = cut(pieces, stops)
        text = "".join(pieces)
        if matched is None:
            assert out == text and not any(stop in text for stop in stops)
        else:
            # The first piece with which any stop is complete decides; in it the earliest start.
            prefix = next(p for n in range(1, 13) if any(s in (p := "".join(pieces[:n])) for s in stops))
            assert out == prefix[: min(prefix.find(stop) for stop in stops if stop in prefix)]
