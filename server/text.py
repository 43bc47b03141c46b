"""Text to token ids.

Two routes, one rule each.  A raw prompt follows the tokenizer's own setting for a begin token, and
gets none when its text starts with one already.  A chat is what its template writes, tokenised
with nothing added.  In a chat the text of a special token that a user or a tool wrote stays text:
it never becomes the token.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from precast.runtime.request import RequestError
from precast.server.bundle import TokenizerBundle
from precast.server.chat_template import ChatError, ChatTemplate, check_messages

_UNTRUSTED_ROLES = ("user", "tool")
_PRIVATE_USE = range(0xE000, 0xF900)


class TextEncoder:
    """Turns raw prompts and chats into token ids.

    Attributes:
      bundle: what it was made of.
      tokenizer: the bundle's.
    """

    def __init__(self, bundle: TokenizerBundle):
        self.bundle = bundle
        self.tokenizer = tokenizers.Tokenizer.from_str(bundle.tokenizer_json)
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        texts = {name: _token_text(bundle.tokenizer_config.get(name)) for name in names}
        self._token_texts = {name: text for name, text in texts.items() if text is not None}
        bos = self._token_texts.get("bos_token")
        self._bos_token_id = None if bos is None else self.tokenizer.token_to_id(bos)
        self._add_bos = bool(bundle.tokenizer_config.get("add_bos_token"))
        self._template: ChatTemplate | None = None

    def check_length(self, text: str, max_tokens: int) -> None:
        """Refuses, before the work of tokenising it, a text of more bytes than ``max_tokens`` tokens ever have.

        Raises RequestError with both numbers.
        """
        size = len(text.encode(errors="surrogatepass"))
        if size > max_tokens and size > (limit := max_tokens * self._max_token_bytes):
            raise RequestError(
                f"prompt has {size} bytes: the limit is {limit}, max_model_len {max_tokens} tokens "
                f"of at most {self._max_token_bytes} bytes each"
            )

    def encode_prompt(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Ids of a raw prompt, with one begin token at the most; max_tokens as ``check_length``."""
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        ids = _encode(self.tokenizer, text)
        bos = self._bos_token_id
        if self._add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The chat template's text for ``messages``; arguments and errors as ``ChatTemplate.render``."""
        return self._chat_template().render(messages, **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of a chat; arguments and errors as ``ChatTemplate.render``."""
        check_messages(messages)
        added = self.tokenizer.get_added_tokens_decoder().values()
        marks = _Marks([token.content for token in added if token.special], messages)
        text = self.render_chat(marks.hide(messages), **options)
        if not marks.used:
            return _encode(self.tokenizer, text)
        return self._encode_around_specials(text, marks)

    @functools.cached_property
    def _max_token_bytes(self) -> int:
        return max(len(token.encode()) for token in self.tokenizer.get_vocab())

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            source = _template_source(self.bundle.tokenizer_config.get("chat_template"))
            if source is None:
                raise ChatError("this model has no chat template: send a prompt instead of messages")
            self._template = ChatTemplate(source, self._token_texts)
        return self._template

    def _encode_around_specials(self, text: str, marks: _Marks) -> list[int]:
        """Ids of a rendered chat whose untrusted special tokens are hidden behind ``marks``.

        The special tokens still in sight are the template's.  The text is cut at them, and what
        lies between is encoded by tokenizers that take special tokens for text.
        """
        added = self.tokenizer.get_added_tokens_decoder()
        specials = {token_id: token for token_id, token in added.items() if token.special}
        opening, inner = (_blind_tokenizer(self.bundle.tokenizer_json, first) for first in (True, False))
        ids: list[int] = []
        start = 0
        for match in _special_pattern(specials).finditer(text):
            ids += _encode(inner if start else opening, marks.show(text[start : match.start()]))
            ids += [token_id for token_id in specials if match[f"t{token_id}"]]
            start = match.end()
        return ids + _encode(inner if start else opening, marks.show(text[start:]))


class _Marks:
    """Stands one private-use character in for each special token's text while a template renders."""

    def __init__(self, specials: Sequence[str], messages: Sequence[Mapping[str, Any]]):
        given = json.dumps(list(messages), ensure_ascii=False, default=str)
        unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in given)
        # The longest first: where two start alike, the whole one counts.
        present = sorted((text for text in specials if _json_text(text) in given), key=len, reverse=True)
        self._marks = dict(zip(present, unused, strict=False))
        if len(self._marks) < len(present):
            raise ChatError("messages contain too many different special tokens or private-use characters")
        self.used = False

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [
            {key: value if key == "role" else self._hide(value) for key, value in message.items()}
            if message.get("role") in _UNTRUSTED_ROLES
            else message
            for message in messages
        ]

    def show(self, text: str) -> str:
        for special, mark in self._marks.items():
            text = text.replace(mark, special)
        return text

    def _hide(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._hide(item) for item in value]
        if not isinstance(value, str):
            return value
        hidden = value
        for special, mark in self._marks.items():
            hidden = hidden.replace(special, mark)
        self.used |= hidden != value
        return hidden


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ChatError(f"the text has a lone surrogate at character {error.start}: it is not valid Unicode") from None
    # A batch of one: unlike ``encode`` it lets other threads run meanwhile.
    return tokenizer.encode_batch([text], add_special_tokens=False)[0].ids


def _blind_tokenizer(tokenizer_json: str, first: bool) -> tokenizers.Tokenizer:
    """A tokenizer that takes special tokens for text.

    ``first`` says whether what it encodes begins the whole: some tokenizers put a space before the
    first word, and must not put one before every piece.
    """
    if not first:
        tokenizer_json = json.dumps(_without_first_space(json.loads(tokenizer_json)))
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _without_first_space(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_first_space(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "Metaspace" and value.get("prepend_scheme") == "first":
        return {**value, "prepend_scheme": "never"}
    return {key: item if key == "model" else _without_first_space(item) for key, item in value.items()}


def _special_pattern(specials: Mapping[int, tokenizers.AddedToken]) -> re.Pattern[str]:
    """Finds one special token (group ``t<id>``) with the white space that it swallows."""
    longest_first = sorted(specials.items(), key=lambda item: len(item[1].content), reverse=True)
    space = {True: r"\s*", False: ""}
    return re.compile(
        "|".join(
            f"{space[token.lstrip]}(?P<t{token_id}>{re.escape(token.content)}){space[token.rstrip]}"
            for token_id, token in longest_first
        )
    )


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _token_text(token: Any) -> str | None:
    """A token of tokenizer_config.json: a string, or a dictionary with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _template_source(template: Any) -> str | None:
    """A chat_template of tokenizer_config.json: a string, or a list of named ones."""
    if not isinstance(template, list):
        return template or None
    named = {entry.get("name"): entry.get("template") for entry in template}
    return named.get("default")
