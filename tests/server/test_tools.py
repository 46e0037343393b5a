"""Calls are read out of text as it comes, in each form, and never invented."""

from __future__ import annotations

import json

import pytest

from stairs.errors import InvalidRequestError
from stairs.server.schemas import ChatRequest
from stairs.server.tools import ToolUse, form_of


class Template:
    def __init__(self, source: str) -> None:
        self.chat_template = source


QWEN = Template("{% if tools %}<tools>{{ tools }}</tools> <tool_call>{% endif %}")
LLAMA3 = Template("{{ tools }} <|python_tag|>")
PLAIN = Template("{{ messages }}")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ASK = [{"role": "user", "content": "add"}]


def use(template: Template, **options) -> ToolUse:
    request = {"messages": ASK, "tools": [TOOL]} | options
    return ToolUse.of(ChatRequest.model_validate(request), template)  # type: ignore[arg-type]


def read(tools: ToolUse, text: str, size: int) -> tuple[str, list[tuple[str, dict]]]:
    """Text and calls of an answer that comes in pieces of ``size`` characters."""
    reader, said, calls = tools.reader(), "", []
    pieces = [reader.push(text[i : i + size]) for i in range(0, len(text), size)]
    for part, found in [*pieces, reader.finish()]:
        said += part
        calls += [(call.function.name, json.loads(call.function.arguments)) for call in found]
    return said, calls


CALL = '{"name": "add", "arguments": {"a": 1}}'
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
ADD = ("add", {"a": 1})


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("template", "text", "said", "calls"),
    [
        (QWEN, TAGGED, "", [ADD]),
        (QWEN, f"Sure.\n{TAGGED}\n{TAGGED}", "Sure.\n", [ADD, ADD]),
        (QWEN, "a < b <tool", "a < b <tool", []),
        (QWEN, TAGGED.replace("add", "sub"), TAGGED.replace("add", "sub"), []),
        (QWEN, f"<tool_call>\n{CALL}", "", [ADD]),  # the closing tag was an end token
        (QWEN, "<tool_call>{", "<tool_call>{", []),
        (QWEN, CALL, CALL, []),
        (LLAMA3, LLAMA_CALL, "", [ADD]),
        (LLAMA3, f" {LLAMA_CALL}", "", [ADD]),
        (LLAMA3, f"[{LLAMA_CALL}, {LLAMA_CALL}]", "", [ADD, ADD]),
        (LLAMA3, f"So: {LLAMA_CALL}", f"So: {LLAMA_CALL}", []),
        (PLAIN, CALL, "", [ADD]),
        (PLAIN, '{"a": 1}', '{"a": 1}', []),
        (PLAIN, '{"name": "add", "arguments": 3}', '{"name": "add", "arguments": 3}', []),
        (PLAIN, "Three.", "Three.", []),
        (PLAIN, '{"name": ["add"]}', '{"name": ["add"]}', []),
        (PLAIN, '{"name": {}, "arguments": {}}', '{"name": {}, "arguments": {}}', []),
        (PLAIN, '{"name": null}', '{"name": null}', []),
        (QWEN, "<tool_call>[[]]</tool_call>", "<tool_call>[[]]</tool_call>", []),
    ],
)
def test_calls_and_text(template: Template, text: str, said: str, calls: list, size: int) -> None:
    assert read(use(template), text, size) == (said, calls)


@pytest.mark.parametrize("depth", [101, 900, 5000])
def test_a_model_that_nests_without_end_calls_nothing(depth: int) -> None:
    text = '{"name": "add", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
    assert read(use(PLAIN), text, 1000) == (text, [])
    tagged = f"<tool_call>{text}</tool_call>"
    assert read(use(QWEN), tagged, 1000) == (tagged, [])


def test_text_streams_while_no_call_has_begun() -> None:
    assert use(QWEN).reader().push("Hello")[0] == "Hello"
    assert use(PLAIN).reader().push("Hello")[0] == "Hello"


def test_one_call_where_parallel_calls_are_off() -> None:
    tools = use(QWEN, parallel_tool_calls=False)
    assert read(tools, f"{TAGGED}\n{TAGGED}", 7)[1] == [ADD]


def test_tool_choice_none_reads_no_calls() -> None:
    tools = use(PLAIN, tool_choice="none")
    assert read(tools, CALL, 5) == (CALL, [])
    assert tools.in_template([{"role": "user", "content": "x"}])[1] is None
    assert tools.grammar() is None


def test_forms_by_template() -> None:
    names = [form.name if form else None for form in (
        form_of(QWEN.chat_template), form_of(LLAMA3.chat_template), form_of(PLAIN.chat_template),
        form_of("{{ tools }} [TOOL_CALLS]"), form_of("<tool_call><function=f>{{ tools }}"),
    )]  # fmt: skip
    assert names == ["qwen", "llama3", "json", None, None]
    with pytest.raises(InvalidRequestError, match="Qwen") as caught:
        use(Template("{{ tools }} [TOOL_CALLS]"))
    assert caught.value.param == "tools"
    use(Template("{{ tools }} [TOOL_CALLS]"), tools=None)  # nobody asked for them


def test_a_template_without_tools_is_told_in_words() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Count."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    shown, tools = use(PLAIN).in_template(messages)
    assert tools is None and [m["role"] for m in shown] == ["system", "assistant", "user"]
    assert shown[0]["content"].startswith("Count.") and '"name": "add"' in shown[0]["content"]
    assert json.loads(shown[1]["content"]) == {"name": "add", "arguments": {"a": 1}}
    assert "3" in shown[2]["content"]


def test_a_template_with_tools_gets_them_and_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    shown, tools = use(QWEN).in_template(messages)
    assert tools == [TOOL] and shown[0]["content"] == ""
    assert shown[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"$defs": [1]}, {"definitions": 3}])
def test_parameters_that_are_no_object(parameters: dict) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(InvalidRequestError, match="'f' must describe an object"):
        use(PLAIN, tools=[tool], tool_choice="required").grammar()


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
        {"tools": [TOOL, TOOL]},
    ],
)
def test_choices_that_name_nothing(options: dict) -> None:
    with pytest.raises(InvalidRequestError):
        use(QWEN, **options)
