"""Templates render as transformers renders them, see plain data only, and fail in one line."""

from __future__ import annotations

from typing import Any

import pytest

from stairs.errors import ConfigError, InvalidRequestError
from stairs.text.chat import ChatTemplate, plain_messages

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. <&>'\" é 한"},
    {"role": "user", "content": " hi "},
    {"role": "assistant", "content": "yes", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
]
TEMPLATES = {
    "whitespace": "{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m.content | trim }}"
    "\n  {% endif %}\n{% endfor %}\nend",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "variables": "{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}"
    "{{ missing is defined }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers_renders_it(name: str):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = {"add_generation_prompt": True, "bos_token": "<s>"}
    theirs, _ = utils.render_jinja_template([MESSAGES], chat_template=TEMPLATES[name], **variables)
    ours = ChatTemplate(TEMPLATES[name]).render(MESSAGES, tools=None, documents=None, **variables)
    assert ours == theirs[0]


def test_a_template_refuses_in_its_own_words():
    template = ChatTemplate("{{ raise_exception('Only one\nsystem message!') }}")
    with pytest.raises(InvalidRequestError, match=r"refused the messages: Only one$"):
        template.render(MESSAGES)


def test_the_date():
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(MESSAGES).isdigit()


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{% set ns = namespace(x=1) %}{% set ns.__class__ = 1 %}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ messages[0].missing.key }}",
    "{{ 1 // 0 }}",
    "{{ messages + 1 }}",
    "{{ range(10 ** 9) | list }}",
])  # fmt: skip
def test_the_sandbox_holds(source: str):
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        ChatTemplate(source).render(plain_messages(MESSAGES, str))
    assert "\n" not in str(caught.value)


def test_a_broken_template_names_its_line():
    with pytest.raises(ConfigError, match="broken at line 2"):
        ChatTemplate("a\n{% for %}")


@pytest.mark.parametrize(("messages", "field"), [
    ([], "messages"),
    ("hi", "messages"),
    ({"role": "user"}, "messages"),
    (7, "messages"),
    (["hi"], r"messages\[0\]"),
    ([{"content": "hi"}], r"messages\[0\].role"),
    ([{"role": "a|>b", "content": "hi"}], r"messages\[0\].role"),
    ([{"role": "", "content": "hi"}], r"messages\[0\].role"),
    ([{"role": "user", "content": 7}], r"messages\[0\].content"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content"),
    ([{"role": "user", "content": "hi", "x": object()}], r"messages\[0\]"),
])  # fmt: skip
def test_wrong_messages_are_named(messages: Any, field: str):
    with pytest.raises(InvalidRequestError, match=field):
        plain_messages(messages, str)


def test_a_deep_nest_is_refused():
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested more than 64"):
        plain_messages([{"role": "user", "content": "", "x": deep}], str)


def test_text_parts_become_one_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain_messages([{"role": "user", "content": parts}], str.upper) == [
        {"ROLE": "USER", "CONTENT": "A\nB"}
    ]


def test_copies_are_plain():
    class Odd(str):
        secret = "no"

    copy = plain_messages([{"role": "user", "content": Odd("x"), "more": (1, Odd("y"))}], str)
    assert type(copy[0]["content"]) is str and type(copy[0]["more"]) is list
    assert type(copy[0]["more"][1]) is str
