"""Chat templates: Jinja in a sandbox, with the few extras that published templates use."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from precast.runtime.request import shown


class ChatError(ValueError):
    """Messages that cannot become a prompt: the text says why."""


class ChatTemplate:
    """A compiled template; rendering is a pure function of its arguments (and the clock, if it asks)."""

    def __init__(self, source: str, variables: Mapping[str, Any]):
        """``variables`` are seen by every rendering, such as ``bos_token``.

        Raises ChatError when the source is no valid template.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatError(f"the model's chat template is not valid: {error}") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text for ``messages``.

        Args:
          messages: mappings with ``role`` and ``content``: a string or a list of text parts, or None in what an
            assistant said.
          options: ``tools``, ``documents``, ``add_generation_prompt`` (true unless given) and
            whatever else this template reads.

        Raises:
          ChatError: no messages, a role or content of a wrong type, or the template refuses them.
        """
        check_messages(messages)
        variables = {**self._variables, "add_generation_prompt": True, "tools": None, "documents": None, **options}
        try:
            return self._template.render(messages=[_with_flat_content(message) for message in messages], **variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatError(f"the chat template refuses these messages: {error}") from error


def check_messages(messages: Any) -> None:
    """Raises ChatError unless ``messages`` is a list of mappings with ``role`` and ``content``."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ChatError(f"messages is {shown(messages)}: it must be a list of dictionaries")
    if not messages:
        raise ChatError("messages is empty: a chat needs at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f"messages[{number}] is {shown(message)}: it must be a dictionary with a role and content")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message["role"] == "assistant"):
            raise ChatError(
                f"messages[{number}] has the content {shown(content)}: it must be a string or a list of text parts"
            )


def _with_flat_content(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(f"content has a part of type {str(kind)[:40]!r}: only text is supported")
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
