"""From token ids to text, a few tokens at a time, and where stop strings end it.

The pieces that a stream gives, joined, are what one decode of all its ids gives after the prompt's text.
Characters whose bytes come in several tokens are held back until they are whole.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import final

from tokenizers import Tokenizer, decoders

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 4
# A run of byte tokens longer than this is given out as far as its characters are whole: a decoder that looks at
# the whole run could still turn them into replacement characters, but a stream cannot wait for ever.
_MAX_HELD_BYTES = 64


class TextStream(ABC):
    """Text of one output sequence."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that is certain now."""

    @abstractmethod
    def flush(self) -> str:
        """Returns what was held back; incomplete characters become replacement characters."""


class Detokenizer:
    """Makes text streams for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes_cache: dict[int, bytes] = {}

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """A stream for the output that follows ``prompt_token_ids``."""
        skipped = self._special if skip_special_tokens else set[int]()
        if self._byte_level:
            return _ByteLevelStream(self, skipped)
        return _WindowStream(self._tokenizer, skipped, prompt_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a byte-level token stands for; empty for an id that the tokenizer does not have."""
        found = self._bytes_cache.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            try:
                found = bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                found = token.encode()
            self._bytes_cache[token_id] = found
        return found


@final
class _ByteLevelStream(TextStream):
    """Byte-level BPE: tokens are bytes, and text is their UTF-8 with replacement characters."""

    def __init__(self, detokenizer: Detokenizer, skipped: set[int]) -> None:
        self._detokenizer = detokenizer
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._detokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@final
class _WindowStream(TextStream):
    """Any other decoder: each token is decoded after a few before it, so that what the decoder does at the start
    of a text (dropping a space, say) falls on those.  Runs of byte tokens are decoded here."""

    def __init__(self, tokenizer: Tokenizer, skipped: set[int], prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context = [i for i in prompt_token_ids[-4 * _CONTEXT_TOKENS :] if i not in skipped][-_CONTEXT_TOKENS:]
        self._run = bytearray()
        self._run_is_broken = False

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        context = [*self._context, token_id]
        before, self._context = self._context, context[-_CONTEXT_TOKENS:]
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return self._extend_run(int(match.group(1), 16))
        decode = self._tokenizer.decode
        known = decode(before, skip_special_tokens=False)
        return self.flush() + decode(context, skip_special_tokens=False)[len(known) :]

    def flush(self) -> str:
        run, self._run, self._run_is_broken = bytes(self._run), bytearray(), False
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _extend_run(self, byte: int) -> str:
        """The ByteFallback decoder takes a run as a whole: its text if it is UTF-8, else one replacement a byte."""
        if self._run_is_broken:
            return _REPLACEMENT
        self._run.append(byte)
        if len(self._run) <= _MAX_HELD_BYTES:
            return ""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(bytes(self._run))
        except UnicodeDecodeError:
            self._run_is_broken = True
            text = _REPLACEMENT * len(self._run)
            self._run.clear()
            return text
        self._run = bytearray(decoder.getstate()[0])
        return text


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (GPT-2): printable ones for themselves, the others
    for 256 and up in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


class StopMatcher:
    """Finds the first stop string in a growing text and holds back what may become one."""

    def __init__(self, stops: Iterable[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Takes more text; returns (text to give out, matched stop string or None).

        On a match the text ends before the stop string (after it with include_stop) and nothing is held any more.
        Not ``armed`` (before min_tokens), everything is given out and nothing matches.
        """
        if not self._stops or not armed:
            return text, None
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops]
        found = [(at, stop) for at, stop in found if at >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            return text[: at + len(stop) if self._include_stop else at], stop
        keep = self._may_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Gives out what was held back when the output ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stops):
                return length
        return 0
