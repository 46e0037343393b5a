"""Chat templates: Jinja in a sandbox, fed plain data only, with the names transformers gives it.

A template is code from a model file. It sees messages copied into plain strings, lists and dicts,
cannot reach Python's own objects, and its own complaint (``raise_exception``) becomes the user's
error. Nothing is cached between calls but the compiled template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stairs.errors import ConfigError, InvalidRequestError

__all__ = ["ChatTemplate", "plain_data", "plain_messages"]

# Templates build control tokens from roles ("<|" + role + "|>"), so a role is one word.
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ChatTemplate:
    """A compiled template; ``ConfigError`` where it is no Jinja."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "namespace": _Namespace,
        }
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is broken at line {error.lineno}: {error.message}",
                param="chat_template",
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt as text; a refusal by the template is an ``InvalidRequestError``."""
        try:
            return self._template.render(messages=messages, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise InvalidRequestError(
                f"the chat template refused the messages: {reason[0]:.300}", param="messages"
            ) from None


def plain_messages(
    messages: Iterable[Mapping[str, Any]], change: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Copies in plain types, every string passed through ``change``.

    Content given as a list of text parts becomes one string, its parts on lines of their own, as
    text-only templates expect.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequestError("messages must be a list of messages", param="messages")
    copies = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"{where} must be an object, got {message!r:.80}", param=where
            )
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise InvalidRequestError(
                f"{where}.role must be a word such as user, got {role!r:.80}", param=f"{where}.role"
            )
        content = _text_of(message.get("content"), f"{where}.content")
        copies.append(plain_data({**message, "content": content}, change, where))
    if not copies:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return copies


def _text_of(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{where} must be text, got {content!r:.80}", param=where)
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{where}: this model reads text parts only, got {part!r:.80}", param=where
            )
        texts.append(part["text"])
    return "\n".join(texts)


def plain_data(value: Any, change: Callable[[str], str], where: str, depth: int = 0) -> Any:
    """``value`` copied into str, int, float, bool, None, list and dict, and nothing else."""
    if depth > 64:
        raise InvalidRequestError(f"{where} is nested more than 64 deep", param=where)
    if isinstance(value, str):
        return change(str(value))
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            plain_data(key, change, where, depth + 1): plain_data(item, change, where, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [plain_data(item, change, where, depth + 1) for item in value]
    raise InvalidRequestError(f"{where} holds a {type(value).__name__}", param=where)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Namespace(jinja2.utils.Namespace):
    """Jinja's own, but no attribute that starts with an underscore can be set."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
