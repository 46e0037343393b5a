"""Tools: how a chat template's model calls them, and how calls are read out of its text.

The form is known by the template. Qwen's wraps a JSON object in <tool_call> tags; Llama 3's is a
bare object with "parameters"; a template that knows no tools gets the JSON form: the tools are
described in the system message and a call is a bare object with "arguments". Any other template
is refused, since its calls would come back as text. A forced or strict call follows a grammar.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stairs.errors import InvalidRequestError
from stairs.server.replies import ToolCall, ToolFunction
from stairs.server.schemas import MAX_DEPTH, ChatRequest, FunctionTool, NamedTool, too_deep
from stairs.text.tokenizer import Tokenizer

__all__ = ["CallReader", "Form", "ToolUse", "form_of", "json_grammar"]

# One way to write JSON: fewer tokens, and no room for a small model to write spaces for ever.
_ONE_WAY = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_DEFINED = re.compile(r"^#/(\$defs|definitions)/")
_INSTRUCTION = (
    "You can call functions. To call one, answer with nothing but a JSON object of this form:\n"
    '{"name": "the function\'s name", "arguments": {"parameter": "value"}}\n'
    "These are the functions:\n"
)


@dataclass(frozen=True, slots=True)
class Form:
    """``begin`` and ``end`` stand around a call; ``arguments`` is their key in its object."""

    name: str
    begin: str
    end: str
    arguments: str
    in_template: bool


_QWEN = Form("qwen", "<tool_call>\n", "\n</tool_call>", "arguments", in_template=True)
_LLAMA3 = Form("llama3", "", "", "parameters", in_template=True)
_JSON = Form("json", "", "", "arguments", in_template=False)


def form_of(template: str) -> Form | None:
    """The form a chat template teaches its model; None where it is not one of those known."""
    if "<function=" in template:  # XML inside the tags, not JSON
        return None
    if "<tool_call>" in template:
        return _QWEN
    if "<|python_tag|>" in template or '"parameters": dictionary of argument' in template:
        return _LLAMA3
    return None if "tools" in template else _JSON


class ToolUse:
    """A request's tools: what the template is shown, what the answer must be, how it is read."""

    def __init__(
        self,
        form: Form,
        functions: Sequence[FunctionTool],
        choice: str,
        *,
        forced: bool,
        most_calls: int | None,
    ) -> None:
        self._form = form
        self._functions = {function.name: function for function in functions}
        self._choice = choice
        self._forced = forced
        self._most_calls = most_calls

    @classmethod
    def of(cls, request: ChatRequest, tokenizer: Tokenizer) -> ToolUse:
        """Raises InvalidRequestError for tools that this model's template cannot take."""
        functions = [tool.function for tool in request.tools or ()]
        names = {function.name for function in functions}
        if len(names) < len(functions):
            raise InvalidRequestError("tools: two functions have the same name", param="tools")
        choice = request.tool_choice or "auto"
        forced = choice == "required" or isinstance(choice, NamedTool)
        if isinstance(choice, NamedTool):
            if choice.function.name not in names:
                raise InvalidRequestError(
                    f"tool_choice names {choice.function.name!r:.80}, which is not among tools",
                    param="tool_choice",
                )
            functions = [f for f in functions if f.name == choice.function.name]
        if choice == "none":
            functions = []
        form = form_of(tokenizer.chat_template or "")
        spoken = any(message.tool_calls or message.role == "tool" for message in request.messages)
        if form is None and (functions or spoken):
            raise InvalidRequestError(
                "the form in which this model's chat template calls tools is not known; known are "
                "Qwen's, Llama 3's and plain JSON",
                param="tools",
            )
        most_calls = 1 if forced or request.parallel_tool_calls is False else None
        return cls(form or _JSON, functions, str(choice), forced=forced, most_calls=most_calls)

    def in_template(
        self, messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the template takes them."""
        for index, message in enumerate(messages):
            for number, call in enumerate(message.get("tool_calls") or ()):
                where = f"messages[{index}].tool_calls[{number}].function.arguments"
                call["function"]["arguments"] = _object(call["function"]["arguments"], where)
        if self._form.in_template:
            for message in messages:
                message.setdefault("content", "")
            tools = [
                {"type": "function", "function": function.model_dump(exclude_none=True)}
                for function in self._functions.values()
            ]
            return messages, tools or None
        messages = [self._plain(message) for message in messages]
        return self._described(messages), None

    def _plain(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message for a template that knows no tools: calls and results as their text."""
        if message["role"] == "tool":
            return {"role": "user", "content": f"Result of the function: {_text(message)}"}
        if message.get("tool_calls"):
            calls = [
                json.dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"]})
                for c in message["tool_calls"]
            ]
            said = [_text(message)] if message.get("content") else []
            return {"role": "assistant", "content": "\n".join([*said, *calls])}
        return message

    def _described(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self._functions:
            return messages
        lines = [
            json.dumps(function.model_dump(exclude_none=True, exclude={"strict"}))
            for function in self._functions.values()
        ]
        text = _INSTRUCTION + "\n".join(lines)
        if messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{_text(messages[0])}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def grammar(self) -> str | None:
        """What the answer must follow: a call where it is forced; where a function is strict,
        any text in which calls, if there are some, have its arguments."""
        if not self._functions:
            return None
        call = self._call_schema()
        begin, end = json.dumps(self._form.begin), json.dumps(self._form.end)
        whole = f"{begin} %json {json.dumps(call)} {end}" if self._form.begin else _json_rule(call)
        if self._forced:
            return f"start: {whole}"
        if not any(function.strict for function in self._functions.values()):
            return None
        if self._form.begin:
            body = f"{json.dumps(self._form.begin[11:])} %json {json.dumps(call)} {end}"
            return (
                f"start: (call)* TEXT\ncall: head {body}\n"
                'head[lazy]: TEXT "<tool_call>"\nTEXT: /(.|\\n)*/'
            )
        return f"start: {whole} | TEXT\nTEXT: /[^{{\\s](.|\\n)*/"

    def _call_schema(self) -> dict[str, Any]:
        """One call of any of the functions, as its object."""
        definitions: dict[str, Any] = {}
        calls = []
        for index, function in enumerate(self._functions.values()):
            # References are from the root: what the parameters define moves there.
            root = f"#/$defs/{index}."
            arguments = {"type": "object", **(function.parameters or {})}
            for word in ("$defs", "definitions"):
                own = arguments.pop(word, {})
                if arguments["type"] != "object" or not isinstance(own, dict):
                    raise InvalidRequestError(
                        f"tools: the parameters of {function.name!r} must describe an object",
                        param="tools",
                    )
                definitions |= {f"{index}.{key}": _moved(part, root) for key, part in own.items()}
            properties = {
                "name": {"const": function.name},
                self._form.arguments: _moved(arguments, root),
            }
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                }
            )
        return {"anyOf": calls, "$defs": definitions, "x-guidance": _ONE_WAY}

    def reader(self) -> CallReader:
        return CallReader(self._form, frozenset(self._functions), self._most_calls)


class CallReader:
    """Splits one answer's text into what is said and what is called, as it comes.

    Text that may turn out to be a call is held back; if it is none it is given out as text.
    """

    def __init__(self, form: Form, names: frozenset[str], most_calls: int | None) -> None:
        self._form = form
        self._names = names
        self._most_calls = most_calls
        self._held = ""
        self._said = False  # text was given out: a bare object later on is no call
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Text and calls that are certain now."""
        if not self._names:
            return text, []
        self._held += text
        return self._bare() if not self._form.begin else self._tagged()

    def finish(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        if not held or (self._said and not self._form.begin):
            return held, []
        calls = self._calls(held.strip().removeprefix(self._form.begin.strip()))
        return ("", calls) if calls is not None else (held, [])

    def _bare(self) -> tuple[str, list[ToolCall]]:
        """A bare object is a call only when it is the whole answer: it is held to the end."""
        start = self._held.lstrip()
        if not self._said and (not start or start[0] in "{["):
            return "", []
        self._said = True
        text, self._held = self._held, ""
        return text, []

    def _tagged(self) -> tuple[str, list[ToolCall]]:
        begin, end = self._form.begin.strip(), self._form.end.strip()
        text, calls = "", list[ToolCall]()
        while True:
            before, tag, rest = self._held.partition(begin)
            if not tag:
                keep = _overlap(self._held, begin)
                cut = len(self._held) - keep
                text += self._visible(self._held[:cut])
                self._held = self._held[cut:]
                return text, calls
            inside, closed, after = rest.partition(end)
            text += self._visible(before)
            self._held = tag + rest
            if not closed:
                return text, calls
            found = self._calls(inside)
            if found is None:
                text += tag + inside + closed
            calls += found or []
            self._held = after

    def _visible(self, text: str) -> str:
        """Line breaks between and around calls are not something said."""
        return "" if self._num_calls and not text.strip() else text

    def _calls(self, text: str) -> list[ToolCall] | None:
        """Calls of known functions; None where ``text`` is none."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        found = []
        for item in value if isinstance(value, list) else [value]:
            call = self._call(item)
            if call is None:
                return None
            found.append(call)
        if self._most_calls is not None:
            found = found[: max(self._most_calls - self._num_calls, 0)]
        self._num_calls += len(found)
        return found

    def _call(self, item: object) -> ToolCall | None:
        name = item.get("name") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or not isinstance(name, str) or name not in self._names:
            return None
        arguments = item.get(self._form.arguments, item.get("arguments", {}))
        if not isinstance(arguments, Mapping) or too_deep(arguments):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(f"call_{uuid.uuid4().hex[:24]}", ToolFunction(name, text))


def json_grammar(schema: Mapping[str, Any]) -> str:
    """A grammar of the JSON texts that ``schema`` allows."""
    return f"start: {_json_rule({**schema, 'x-guidance': _ONE_WAY})}"


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def _moved(schema: Any, root: str) -> Any:
    """A copy whose references to definitions begin with ``root``."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _DEFINED.sub(root, value)
        if key == "$ref" and isinstance(value, str)
        else _moved(value, root)
        for key, value in schema.items()
    }


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of ``text`` that begins ``word``."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or too_deep(value):
        raise InvalidRequestError(
            f"{where} must be a JSON object as text, at most {MAX_DEPTH} deep", param=where
        )
    return value


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(_parts(content))


def _parts(content: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for part in content:
        yield part["text"]
