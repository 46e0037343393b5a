"""The serving faults other engines have had, each as a kind, through HTTP."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server_process import Server, wait_until

BLOCK = 16
CONTEXT = 4096  # of the tiny model; the pool holds 64 blocks = 1024 tokens


def complete(server: Server, prompt: str | list[int] | list[str], **options) -> dict:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True} | options
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(server: Server, body: object, path: str = "/v1/completions") -> dict:
    """The error of a request that must get status 400, from a server that lives on."""
    reply = server.http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert len(reply.text) < 1000
    return reply.json()["error"]


def text_of(server: Server, prompt: str, **options) -> str:
    return complete(server, prompt, **options)["choices"][0]["text"]


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def streamed(server: Server, body: dict, path: str = "/v1/completions") -> list[dict]:
    with server.http.stream("POST", path, json=body | {"stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def wait_idle(server: Server) -> None:
    """Until nothing runs; then no request holds a block."""
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0


# -- prefix cache -------------------------------------------------------------------------------


def test_a_salt_keeps_prefixes_apart(server: Server) -> None:
    prompt = "salted " * 8
    hits = [cached(complete(server, prompt, cache_salt=salt)) for salt in ("a", "b", "a")]
    assert hits == [0, 0, 48]


def test_keys_that_all_collide_serve_nobody_elses_prefix(
    server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    """Both processes import this before anything else: every block then has the same key."""
    patch = "import stairs.cache.prefix as prefix\n"
    patch += "prefix.PrefixCache.__init__.__kwdefaults__['key_function'] = lambda *_: b'same'\n"
    (tmp_path / "sitecustomize.py").write_text(patch)
    colliding = Server(tiny_model, python_path=tmp_path).wait_ready()
    prompts = [letter * 40 for letter in "PQPQ"]
    answers = [complete(colliding, prompt) for prompt in prompts]
    assert colliding.stop() == 0
    assert [cached(answer) for answer in answers] == [0, 0, 0, 0]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["text"] == text_of(server, prompt, cache_salt="cold")


@pytest.mark.parametrize("length", [48, 500])  # three blocks; four chunks of 128
def test_twins_that_arrive_together_are_equal(server: Server, length: int) -> None:
    prompt = "twin" * (length // 4)
    alone = text_of(server, prompt, cache_salt="alone")
    both = complete(server, [prompt, prompt], cache_salt="together")
    assert [choice["text"] for choice in both["choices"]] == [alone, alone]


def test_a_fully_cached_prompt_recomputes_its_last_token(server: Server) -> None:
    prompt = "p" * (2 * BLOCK)
    first, second = (complete(server, prompt, cache_salt="full") for _ in range(2))
    assert cached(first) == 0 and cached(second) == BLOCK
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_preempted_answers_end_like_cold_ones(server: Server) -> None:
    """Four answers of 500 tokens want 128 blocks of 64: some are preempted, all come to the end."""
    shared = "s" * (2 * BLOCK)
    prompts = [shared + name for name in "abcd"]
    alone = [text_of(server, prompt, max_tokens=500) for prompt in prompts]
    before = server.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda p: text_of(server, p, max_tokens=500), prompts))
    assert server.metric("vllm:num_preemptions_total") > before
    assert together == alone
    wait_idle(server)


# -- prompts and limits -------------------------------------------------------------------------


def test_a_prompt_of_three_chunks_gives_one_token(server: Server) -> None:
    answer = complete(server, "c" * 300, max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_empty_prompt_is_refused(server: Server) -> None:
    for prompt in ("", [], [[]], [""]):
        assert refused(server, {"prompt": prompt})["param"].startswith("prompt")


def test_longer_than_the_context_is_refused_with_both_numbers(server: Server) -> None:
    for num in (CONTEXT, CONTEXT + 1):
        error = refused(server, {"prompt": "m" * num, "max_tokens": 1})
        assert error["code"] == "context_length_exceeded"
        assert str(num) in error["message"] and str(CONTEXT) in error["message"]
    error = refused(server, {"prompt": "m" * (CONTEXT - 5), "max_tokens": 10})
    assert error["param"] == "max_tokens" and "4091" in error["message"]


def test_what_never_fits_the_pool_is_refused(server: Server) -> None:
    error = refused(server, {"prompt": "m" * 1100, "max_tokens": 1})
    assert error["code"] == "context_length_exceeded" and "64" in error["message"]
    error = refused(server, {"prompt": "m" * 900, "max_tokens": 200})
    assert error["param"] == "max_tokens"


def test_without_max_tokens_the_pool_is_the_limit(server: Server) -> None:
    answer = complete(server, "l" * 900, max_tokens=None)
    assert answer["usage"]["completion_tokens"] == 64 * BLOCK + 1 - 900


def test_max_tokens_0_needs_echo(server: Server) -> None:
    assert refused(server, {"prompt": "a", "max_tokens": 0})["param"] == "max_tokens"
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}
    assert refused(server, body, "/v1/chat/completions")["param"] == "max_tokens"


# -- text ---------------------------------------------------------------------------------------


def say(server: Server, word: str, **options) -> dict:
    """The body of a chat that can only answer ``word`` in quotes, a byte a token."""
    schema = {"name": "word", "schema": {"enum": [word]}}
    wanted = {"type": "json_schema", "json_schema": schema}
    return {
        "messages": [{"role": "user", "content": "say"}],
        "response_format": wanted,
        "max_tokens": 40,
    } | options


def test_a_stop_string_across_tokens_never_leaks(server: Server) -> None:
    body = say(server, "alpha beta gamma delta", stop=["beta gamma"])
    chunks = streamed(server, body, "/v1/chat/completions")
    deltas = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert "".join(deltas) == '"alpha ' and all("b" not in delta for delta in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "beta gamma"
    whole = server.http.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == '"alpha '
    # What came after the stop string is not billed.
    assert whole["usage"]["completion_tokens"] == len('"alpha beta gamma')
    wait_idle(server)


def test_min_tokens_holds_back_every_end(server: Server) -> None:
    """EOS is forced by a bias, yet the fifth token is the first that may be it."""
    body = {"logit_bias": {"258": 100}, "min_tokens": 5, "ignore_eos": False, "max_tokens": 20}
    answer = complete(server, "end", **body)
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "stop"
    held = complete(server, "end", **body | {"stop": ["".join(map(chr, range(97, 98)))]})
    assert held["usage"]["completion_tokens"] >= 5


def test_a_character_split_over_tokens_comes_whole(server: Server) -> None:
    chunks = streamed(server, say(server, "a😀b"), "/v1/chat/completions")
    deltas = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert "😀" in deltas and "".join(deltas) == '"a😀b"'


def test_a_budget_that_ends_inside_a_character_loses_no_byte(server: Server) -> None:
    body = say(server, "a😀b", max_tokens=4)  # quote, a, two of the four bytes
    whole = server.http.post("/v1/chat/completions", json=body).json()
    text = whole["choices"][0]["message"]["content"]
    assert text == '"a\N{REPLACEMENT CHARACTER}'
    chunks = streamed(server, body, "/v1/chat/completions")
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text


# -- sampling -----------------------------------------------------------------------------------


def test_a_seed_holds_beside_an_unseeded_neighbour(server: Server) -> None:
    options = {"temperature": 1.0, "max_tokens": 12}
    alone = text_of(server, "seed", seed=7, **options)
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(text_of, server, "seed", seed=7, **options)
        unseeded = pool.submit(text_of, server, "seed", **options)
    assert beside.result() == alone
    assert unseeded.result() != text_of(server, "seed", **options)


def test_equal_request_ids_cross_nothing(server: Server) -> None:
    def ask(prompt: str) -> tuple[str, str]:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
        reply = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "same"})
        assert reply.headers["X-Request-Id"] == "same"
        return reply.json()["id"], reply.json()["choices"][0]["text"]

    alone = [ask(prompt)[1] for prompt in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        (id_1, text_1), (id_2, text_2) = pool.map(ask, ("one", "two"))
    assert id_1 != id_2 and [text_1, text_2] == alone


# -- hostile and unlucky clients ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_its_request(server: Server, stream: bool) -> None:
    body = {"prompt": "h" * 20, "max_tokens": 900, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
    wait_idle(server)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1


def test_a_normal_end_is_no_abort(server: Server) -> None:
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    complete(server, "normal")
    streamed(server, {"prompt": "normal", "max_tokens": 3})
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted


@pytest.mark.parametrize(
    "body", [b"[]", b'{"messages":', b"", b"null", b'{"messages": {}}', b"[" * 50_000, b"\xff\xfe"]
)
def test_a_body_that_is_no_request(server: Server, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    reply = server.http.post("/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code == 400 and reply.json()["error"]["param"]


def test_a_body_of_another_type_is_told_so(server: Server) -> None:
    reply = server.http.post("/v1/completions", content=b'{"prompt": "a"}')
    assert reply.status_code == 400 and "application/json" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a\\ud800"}',
        b'{"prompt": "a", "stop": ["\\ud800"]}',
        b'{"prompt": "a", "cache_salt": "\\ud800"}',
        b'{"prompt": "a", "\\ud800": 1}',
    ],
)
def test_half_a_surrogate_pair_is_no_text(server: Server, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    assert server.http.post("/v1/completions", content=body, headers=headers).status_code == 400


def test_broken_tool_arguments_are_named(server: Server) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    error = refused(server, {"messages": messages}, "/v1/chat/completions")
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


def test_a_large_body_is_refused_unread(server: Server) -> None:
    data = b'{"prompt": "' + b"x" * 300_000 + b'"}'

    def pieces():
        for start in range(0, len(data), 65536):
            yield data[start : start + 65536]

    headers = {"Content-Type": "application/json"}
    for content in (data, pieces()):  # with Content-Length, and chunked
        reply = server.http.post("/v1/completions", content=content, headers=headers)
        assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"


def test_lists_and_numbers_are_bounded(server: Server) -> None:
    for field, value in {
        "stop": ["a"] * 17,
        "n": 129,
        "logprobs": 21,
        "temperature": -1,
        "top_p": 1.5,
        "seed": 2**64,
        "logit_bias": {"x": 1},
        "presence_penalty": 3,
        "max_tokens": -1,
        "cache_salt": "",
        "best_of": 2,
        "prompt": [1.5],
    }.items():
        error = refused(server, {"prompt": "a", field: value})
        assert error["param"].startswith(field), (field, error)
    assert refused(server, {"prompt": [9999]})["param"] == "prompt"
    assert refused(server, {"prompt": "a", "n": 100})["param"] == "n"  # more than the queue


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [101, 700])  # one too many; as much as Python still reads
def test_objects_of_any_form_are_not_nested_without_end(server: Server, depth: int) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    function = {"name": "f", "parameters": nested(depth)}
    schema = {"name": "s", "schema": nested(depth)}
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps(nested(depth))}}
    called = {"role": "assistant", "tool_calls": [call]}
    for field, value in {
        "metadata": {"x": nested(depth)},
        "chat_template_kwargs": {"x": nested(depth)},
        "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "messages": [{"role": "user", "content": "a"}, called],
    }.items():
        error = refused(server, chat | {field: value}, "/v1/chat/completions")
        assert error["param"].startswith(field), error
        assert "100 deep" in error["message"]


def test_long_tools_and_arguments_are_refused_before_they_are_encoded(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    function = {"name": "f", "description": "d" * 150_000}
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps({"a": "x" * 150_000})}}
    for field, value in {
        "tools": [{"type": "function", "function": function}],
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}],
    }.items():
        error = refused(server, chat | {field: value}, "/v1/chat/completions")
        assert error["code"] == "context_length_exceeded" and "characters" in error["message"]


def test_extreme_numbers_give_answers_or_a_refusal(server: Server) -> None:
    greedy = text_of(server, "edge", max_tokens=4)
    for temperature in (1e-6, 1e-40, 1e-320):
        assert text_of(server, "edge", max_tokens=4, temperature=temperature) == greedy
    for field, value in {"top_p": 1e-320, "min_p": 1.0, "top_k": 1}.items():
        hot = {"temperature": 1.0, "max_tokens": 4, field: value}
        assert text_of(server, "edge", **hot) == greedy
    for seed in (2**64 - 1, -(2**63)):
        assert len(complete(server, "edge", seed=seed, n=3, temperature=1.0)["choices"]) == 3
    for value in (0.0, 1e-320, 101):
        assert refused(server, {"prompt": "a", "repetition_penalty": value})["param"] == (
            "repetition_penalty"
        )
    for ids in ([2**31], [-1], [10**30]):
        assert refused(server, {"prompt": ids})["param"].startswith("prompt")


def test_errors_echo_little_of_the_input(server: Server) -> None:
    reply = server.http.post("/v1/completions", json={"prompt": "a", "x" * 50_000: 1})
    assert reply.status_code == 400 and len(reply.text) < 600
    reply = server.http.post("/v1/completions", json={"prompt": "a", "model": "m" * 500})
    assert reply.status_code == 404 and len(reply.text) < 600


def test_a_chat_the_template_cannot_take(server: Server) -> None:
    body = {"messages": [{"role": "wizard", "content": "a"}]}
    assert refused(server, body, "/v1/chat/completions")["param"] == "messages[0].role"
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    body = {"messages": [{"role": "user", "content": image}]}
    assert refused(server, body, "/v1/chat/completions")["param"].startswith("messages[0].content")


def test_control_tokens_in_a_message_are_text(server: Server) -> None:
    def tokens(content: str) -> list[int]:
        body = {"messages": [{"role": "user", "content": content}]}
        return server.http.post("/tokenize", json=body).json()["tokens"]

    assert tokens("<|im_end|>").count(258) == tokens("a").count(258)


def test_the_queue_has_an_end(server: Server) -> None:
    """Four run, four wait, the ninth gets 429 and is told when to come back."""
    body = {"prompt": "q", "n": 4, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as first:
        lines = first.iter_lines()  # held: a dropped iterator would close the stream
        next(lines)
        with server.http.stream("POST", "/v1/completions", json=body) as second:
            assert second.status_code == 200
            reply = server.http.post("/v1/completions", json={"prompt": "one more"})
            assert reply.status_code == 429 and 1 <= int(reply.headers["Retry-After"]) <= 60
    wait_idle(server)
    complete(server, "and again")
