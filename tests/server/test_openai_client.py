"""The official client against the real server: what it reads is what OpenAI's would give."""

from __future__ import annotations

import json

import openai
import pytest

from server_process import Server

SAY = [{"role": "user", "content": "abc"}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.openai


def chat(client: openai.OpenAI, **options):
    options = {"temperature": 0, "max_tokens": 8} | options
    return client.chat.completions.create(model="tiny", messages=SAY, **options)


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion" and answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.prompt_tokens_details.cached_tokens % 16 == 0


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=20)
    chunks = list(chat(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 20 and not chunks[-1].choices
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_without_include_usage_no_chunk_speaks_of_it(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert all(chunk.choices and "usage" not in chunk.model_fields_set for chunk in chunks)


def test_n_answers_bill_the_prompt_once(client: openai.OpenAI) -> None:
    options = {"n": 3, "seed": 1, "temperature": 1.0, "max_tokens": 6}
    first, again = chat(client, **options), chat(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.completion_tokens == 18
    assert first.usage.prompt_tokens == chat(client).usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in chat(client, **options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs.content
    assert len(found) == 8
    for token in found:
        assert len(token.top_logprobs) == 3
        # Greedy: what was taken is the likeliest.
        assert token.top_logprobs[0].logprob == token.logprob <= 0
        assert token.top_logprobs[0].token == token.token
        ordered = [top.logprob for top in token.top_logprobs]
        assert ordered == sorted(ordered, reverse=True)
    assert bytes(b for t in found for b in t.bytes).decode(errors="replace") == (
        answer.choices[0].message.content
    )
    streamed = [
        token
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert [t.token for t in streamed] == [t.token for t in found]


def test_json_schema_is_kept_whatever_the_model_would_say(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "grey"]}, "rain": {"type": "boolean"}},
        "required": ["sky", "rain"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    for seed in range(3):
        answer = chat(
            client, response_format=wanted, max_tokens=60, temperature=1.5, seed=seed, n=2
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            value = json.loads(choice.message.content)
            assert value["sky"] in ("blue", "grey") and isinstance(value["rain"], bool)


def test_json_object(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=200, seed=3)
    assert answer.choices[0].message.content.startswith("{")


def test_a_forced_tool_call(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    options = {"tools": [tool], "tool_choice": "required", "max_tokens": 80}
    answer = chat(client, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    chunks = [c.choices[0] for c in chat(client, **options, stream=True) if c.choices]
    (delta,) = (d for chunk in chunks for d in chunk.delta.tool_calls or ())
    assert (delta.index, delta.function.name) == (0, "weather")
    assert delta.function.arguments == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_completions_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    text = "x" * 40  # two and a half blocks
    options = {"model": "tiny", "temperature": 0, "max_tokens": 3, "echo": True, "logprobs": 2}
    cold = client.completions.create(prompt=text, **options).choices[0]
    warm = client.completions.create(prompt=text, **options).choices[0]
    assert cold.text.startswith(text)
    for choice in (cold, warm):
        assert len(choice.logprobs.tokens) == 43
        assert choice.logprobs.token_logprobs[0] is None
        assert None not in choice.logprobs.token_logprobs[1:]
        assert choice.logprobs.text_offset[:3] == [0, 1, 2]
    assert cold.logprobs.token_logprobs == pytest.approx(warm.logprobs.token_logprobs, abs=1e-4)
    scored = client.completions.create(prompt=text, **options | {"max_tokens": 0})
    assert scored.choices[0].text == text and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.tokens == cold.logprobs.tokens[:40]


def test_several_prompts_come_back_in_order(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "temperature": 0, "max_tokens": 4}
    alone = [
        client.completions.create(prompt=prompt, **options).choices[0].text
        for prompt in ("ab", "cd")
    ]
    both = client.completions.create(prompt=["ab", "cd"], n=2, temperature=0, model="tiny",
                                     max_tokens=4)  # fmt: skip
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [alone[0]] * 2 + [alone[1]] * 2
    ids = client.completions.create(prompt=[[97, 98], [99, 100]], **options)
    assert [choice.text for choice in ids.choices] != ["", ""]
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=["ab", "cd"], **options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="use tiny"):
        client.chat.completions.create(model="other", messages=SAY)
