"""The routes beside generation: text, state, metrics, pages."""

from __future__ import annotations

import re
import time

import stairs
from server_process import Server, wait_until
from stairs.server import wire
from stairs.server.app import PAGE
from stairs.server.metrics import Metrics

VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "iteration_tokens_total_bucket",
    "kv_block_lifetime_seconds_bucket",
    "kv_block_idle_before_evict_seconds_bucket",
    "kv_block_reuse_gap_seconds_bucket",
    "cache_config_info",
]


def test_tokens_there_and_back(server: Server) -> None:
    text = "Ünïcode 😀 text"
    reply = server.http.post("/tokenize", json={"prompt": text}).json()
    assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == 4096
    back = server.http.post("/detokenize", json={"tokens": reply["tokens"]}).json()
    assert back == {"prompt": text}
    wrong = server.http.post("/detokenize", json={"tokens": [260]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tokens"


def test_a_chat_is_tokenized_as_it_is_answered(server: Server) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a"}]
    count = server.http.post("/tokenize", json={"messages": messages}).json()["count"]
    body = {"messages": messages, "max_tokens": 1}
    usage = server.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == count


def test_boards_made_for_vllm_find_their_names(server: Server) -> None:
    body = {"prompt": "m" * 20, "max_tokens": 4, "ignore_eos": True}
    names = ("prompt_tokens_total", "generation_tokens_total")
    before = [server.metric(f"vllm:{name}") for name in names]
    assert server.http.post("/v1/completions", json=body).status_code == 200
    after = [server.metric(f"vllm:{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [20, 4]
    page = server.http.get("/metrics").text
    for name in VLLM_NAMES:
        assert re.search(rf'^vllm:{name}\{{.*model_name="tiny"', page, re.M), name
    predicted = server.metric("stairs:score_pairs_predicted_total")
    assert predicted == server.metric("stairs:score_pairs_counted_total") > 0


def test_blocks_that_are_hit_again_or_evicted_are_observed(server: Server) -> None:
    names = ("lifetime", "idle_before_evict", "reuse_gap")
    before = [server.metric(f"vllm:kv_block_{name}_seconds_count") for name in names]
    for prompt in ("reused" * 8, "reused" * 8, *(letter * 700 for letter in "abcd")):
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "residency"}
        assert server.http.post("/v1/completions", json=body).status_code == 200
    after = [server.metric(f"vllm:kv_block_{name}_seconds_count") for name in names]
    assert all(b > a for a, b in zip(before, after, strict=True))
    lifetime, idle = (server.metric(f"vllm:kv_block_{name}_seconds_sum") for name in names[:2])
    assert lifetime > idle > 0


def test_a_client_cannot_grow_the_metrics_by_naming_methods(server: Server) -> None:
    for method in ("BREW", "WHEN", "PROPFIND"):
        assert server.http.request(method, "/health").status_code == 405
        assert server.http.request(method, "/nowhere").status_code == 404
    page = server.http.get("/metrics").text
    assert 'http_requests_total{handler="/health",method="any",status="405"}' in page
    assert not re.search("BREW|WHEN|PROPFIND|nowhere", page)
    assert server.metric("http_request_duration_seconds_count", handler="/health") > 0


def test_a_path_forges_no_line_of_the_log(server: Server) -> None:
    server.http.get("/no%0A12:00:00 error: forged")
    server.http.get("/version")
    wait_until(lambda: any("/version" in line for line in server.log))
    (line,) = (line for line in server.log if "forged" in line)
    assert "GET /no%0A12:00:00%20error:%20forged 404" in line


def test_the_log_line_says_what_runs_and_is_silent_when_nothing_does() -> None:
    metrics = Metrics("tiny")
    now = time.monotonic()
    assert metrics.log_line(now) is None
    metrics.engine_loaded(wire.Ready(4096, 4, 16, 64, 256, "float32", "float32", 1.0))
    stats = wire.Stats(2, 1, 16, 8, 4, 0, 200, 50, 3, 0, 0, 0, 0)
    metrics.step(stats)
    line = metrics.log_line(now + 10)
    assert line is not None and line.startswith("2 running, 1 waiting, K/V 25.0 % (4 blocks")
    assert "prefix hits 25.0 %" in line


def test_counters_only_grow_when_the_engine_starts_anew() -> None:
    metrics = Metrics("tiny")
    hits = "vllm:prefix_cache_hits_total"

    def step(num: int) -> float:
        metrics.step(wire.Stats(0, 0, 0, 0, 0, 0, num, num, 0, 0, 0, 0, 0))
        return float(re.findall(rf"^{hits}{{.*}} (.*)$", metrics.page().decode(), re.M)[0])

    assert step(5) == 5 and step(8) == 8
    metrics.engine_died(unexpected=True)
    assert step(3) == 11


def test_version_and_state(server: Server) -> None:
    assert server.http.get("/version").json() == {"version": stairs.__version__}
    assert server.http.get("/health").json() == {"status": "ready", "reason": None}
    assert server.http.get("/nowhere").json()["error"]["code"] is None
    assert server.http.get("/v1/chat/completions").status_code == 405


def test_pages_come_from_here_alone(server: Server) -> None:
    for path in ("/", "/docs", "/page.css", "/page.js", "/docs.js", "/favicon.svg"):
        reply = server.http.get(path)
        assert reply.status_code == 200 and reply.content
        assert reply.headers["content-security-policy"] == "default-src 'self'"
    for file in PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "//cdn" not in text


def test_the_api_describes_what_it_takes(server: Server) -> None:
    described = server.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/prefixes"} <= described["paths"].keys()
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "cache_salt", "min_p", "response_format", "tools"} <= fields.keys()
    for path in described["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"] and "400" in operation["responses"]
