"""The real model behind the real server, through the clients people use."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import Server
from stairs.checkpoints.sources import ALIASES, find_local

MODEL = find_local(ALIASES["smollm2"])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MODEL is None, reason="the default model is not on this machine"),
]
ASK = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    assert MODEL is not None
    folder = tmp_path_factory.mktemp("real")
    options = ("--prefix-folder", str(folder), "--max-model-len", "1024", "--seed", "0")
    server = Server(Path(MODEL), *options).wait_ready()
    yield server
    assert server.stop() == 0


def test_the_official_client(real: Server) -> None:
    options = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 24}
    whole = real.openai.chat.completions.create(**options)
    assert "Paris" in whole.choices[0].message.content
    stream = real.openai.chat.completions.create(**options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == (
        whole.choices[0].message.content
    )


def test_a_schema_and_a_call(real: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = real.openai.chat.completions.create(
        model="tiny", messages=ASK, response_format=wanted, temperature=0, max_tokens=60
    )
    assert json.loads(answer.choices[0].message.content).keys() == {"city", "people"}
    tool = {"type": "function", "function": {"name": "find_city", "parameters": schema}}
    answer = real.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=[tool], tool_choice="required", max_tokens=80
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"city", "people"}


def test_langchain(real: Server) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are not ours
        langchain_openai = pytest.importorskip("langchain_openai")
        chat = langchain_openai.ChatOpenAI(
            model="tiny", base_url=f"{real.url}/v1", api_key="none", temperature=0, max_tokens=24,
            max_retries=0,
        )  # fmt: skip
        whole = chat.invoke([("system", "Be brief."), ("user", ASK[0]["content"])])
        assert "Paris" in whole.content
        assert whole.usage_metadata["output_tokens"] > 0
        streamed = list(chat.stream([("system", "Be brief."), ("user", ASK[0]["content"])]))
        assert "".join(chunk.content for chunk in streamed) == whole.content

        def add(a: int, b: int) -> int:
            """Add two integers."""
            return a + b

        answer = chat.bind_tools([add], tool_choice="required").invoke("What is 2 plus 3?")
        (call,) = answer.tool_calls
        assert call["name"] == "add" and call["args"].keys() == {"a", "b"}
