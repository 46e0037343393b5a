"""Answers held to a grammar: over bytes, so that every text can be written."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from harness import Tiny, run_all
from stairs.config import SamplingParams
from stairs.engine.core import Engine
from stairs.engine.grammar import Grammars, check_grammar
from stairs.errors import InvalidRequestError
from stairs.server.schemas import ChatRequest
from stairs.server.tools import ToolUse, json_grammar
from stairs.text.tokenizer import Tokenizer

EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 10, "maximum": 99},
        "b": {"enum": ["x", "y"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Ids 0 and 1 are control tokens, then the bytes, as far as the tiny model has ids."""
    alphabet = sorted(
        pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 126, c != "Ġ", c)
    )
    names = ["<s>", "</s>", *alphabet]
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, named_tokens={"bos_token": "<s>"}, add_bos=False)


@pytest.fixture
def engine(tiny_llama: Tiny, tokenizer: Tokenizer) -> Engine:
    engine = tiny_llama.engine(num_blocks=64)
    vocab_size = engine.model_config.vocab_size
    engine.open_grammars = lambda: Grammars(tokenizer, vocab_size, [EOS])
    return engine


def sampling(**options) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 100, "seed": 1} | options)


def test_every_answer_keeps_the_schema_and_then_ends(engine: Engine, tokenizer: Tokenizer) -> None:
    numbers = [
        engine.add([5, 6, 7], sampling(seed=seed), grammar=json_grammar(SCHEMA))
        for seed in range(5)
    ]
    answers = run_all(engine)
    texts = {tokenizer.decode(answers[number]) for number in numbers}
    assert len(texts) > 1
    for text in texts:
        value = json.loads(text)
        assert 10 <= value["a"] <= 99 and value["b"] in ("x", "y")
    assert all(answers[number][-1] == EOS for number in numbers)


def test_rows_without_a_grammar_are_as_they_were(engine: Engine, tiny_llama: Tiny) -> None:
    alone = tiny_llama.engine(num_blocks=64)
    number = alone.add([5, 6, 7], sampling())
    expected = run_all(alone)[number]
    engine.add([9, 8], sampling(), grammar=json_grammar(SCHEMA))
    number = engine.add([5, 6, 7], sampling())
    assert run_all(engine)[number] == expected


def test_a_bias_cannot_bring_back_what_the_grammar_forbids(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    (letter,) = tokenizer.encode("z")
    number = engine.add(
        [5], sampling(logit_bias={letter: 100.0}), grammar=json_grammar({"enum": ["ab"]})
    )
    assert tokenizer.decode(run_all(engine)[number]) == '"ab"'


def test_siblings_and_preempted_answers_keep_their_own_place(
    tiny_llama: Tiny, tokenizer: Tokenizer
) -> None:
    engine = tiny_llama.engine(num_blocks=6, block_size=16, prefill_chunk_size=16)
    vocab_size = engine.model_config.vocab_size
    engine.open_grammars = lambda: Grammars(tokenizer, vocab_size, [EOS])
    schema = {"type": "string", "minLength": 40, "maxLength": 44, "pattern": "^[a-z]*$"}
    engine.add([5] * 20, sampling(n=3, max_tokens=60), grammar=json_grammar(schema))
    texts: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            texts.setdefault(event.index, []).append(event.token or 0)
    assert engine.scheduler.num_preemptions > 0
    assert len(texts) == 3
    for tokens in texts.values():
        assert re.fullmatch(r'"[a-z]{40,44}"', tokenizer.decode(tokens))


@pytest.mark.parametrize("options", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_what_contradicts_a_grammar_is_refused(engine: Engine, options: dict) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        engine.add([5], sampling(**options), grammar=json_grammar(SCHEMA))
    assert not engine.has_work


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"type": "string", "pattern": "("},
        {"$ref": "http://elsewhere/schema"},
        {"type": "object", "unevaluatedProperties": 3},
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(schema: dict) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_grammar(json_grammar(schema), param="response_format")
    assert caught.value.param == "response_format" and len(str(caught.value)) < 300


@pytest.mark.parametrize("source", ["<tool_call>{{ tools }}", "{{ tools }} <|python_tag|>", "-"])
@pytest.mark.parametrize("strict", [True, False])
def test_grammars_of_tools_compile_and_hold(
    source: str, strict: bool, tokenizer: Tokenizer
) -> None:
    class Template:
        chat_template = source

    function = {"name": "f", "parameters": SCHEMA, "strict": strict}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": function}],
    }
    grammars = Grammars(tokenizer, 258, [EOS])

    def accepts(choice: str, text: str) -> bool:
        request = ChatRequest.model_validate(body | {"tool_choice": choice})
        grammar = ToolUse.of(request, Template()).grammar()  # type: ignore[arg-type]
        if grammar is None:
            return True
        check_grammar(grammar, param="tools")
        (state,) = grammars.states(grammar, 1)
        for token in [*tokenizer.encode(text), EOS]:
            if state.forbidden()[token]:
                return False
            state.advance(token)
        return True

    key = "parameters" if "python" in source else "arguments"
    good = f'{{"name": "f", "{key}": {{"a": 12, "b": "x"}}}}'
    bad = good.replace("12", "1")
    if "tool_call" in source:
        good, bad = (f"<tool_call>\n{call}\n</tool_call>" for call in (good, bad))
    assert accepts("required", good) and not accepts("required", bad)
    assert not accepts("required", "No.")
    assert accepts("auto", good) and accepts("auto", "No.")
    assert accepts("auto", bad) is not strict


def test_definitions_inside_a_tools_parameters_are_found() -> None:
    class Template:
        chat_template = "-"

    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/P"}},
    }
    functions = [
        {"name": name, "parameters": {
            "type": "object", "properties": {"at": {"$ref": f"#/{word}/P"}}, word: {"P": point}
        }}
        for name, word in (("f", "$defs"), ("g", "definitions"))
    ]  # fmt: skip
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": "required",
    }
    grammar = ToolUse.of(ChatRequest.model_validate(body), Template()).grammar()  # type: ignore[arg-type]
    assert grammar is not None
    check_grammar(grammar, param="tools")


def test_a_grammar_too_large_to_compile_between_two_steps_is_refused() -> None:
    schema = {"enum": [f"value {i}" for i in range(20_000)]}
    with pytest.raises(InvalidRequestError, match="120000"):
        check_grammar(json_grammar(schema), param="response_format")


def test_a_vocabulary_that_cannot_write_what_must_come_ends_the_answer(engine: Engine) -> None:
    number = engine.add([5], sampling(), grammar=json_grammar({"enum": ["a\N{SNOWMAN}"]}))
    answer = run_all(engine)[number]
    assert answer[-1] == EOS and len(answer) < 10
