"""What Prometheus reads at /metrics, under vLLM's names, and the log line people paste in issues.

Counters that the engine keeps start at zero in each of its processes; here they only grow. What
vLLM has no name for (bytes and pairs by records, restarts) is called ``stairs:``.
"""

from __future__ import annotations

import time
from collections import deque

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from stairs.cache.residency import Spans
from stairs.server import wire
from stairs.server.answers import Running

__all__ = ["Metrics"]

_SHORT = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_LONG = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 45, 60, 120, 240, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_RESIDENCY = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_FEW = (1, 2, 5, 10, 20, 50, 128)

_GAUGES = {
    "num_requests_running": "Answers that the engine computes in each step.",
    "num_requests_waiting": "Answers that wait for a place in the batch.",
    "kv_cache_usage_perc": "Share of the K/V blocks held by requests or pins; 1 is all.",
}
_COUNTERS = {
    "num_preemptions": "Answers that gave their blocks to an older one and are computed again.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens whose K/V the prefix cache held.",
    "prompt_tokens": "Prompt tokens of the requests that got a first token, cached ones included.",
    "generation_tokens": "Tokens generated.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the request's arrival to its first token.", _SHORT),
    "inter_token_latency_seconds": ("Between two tokens of an answer.", _SHORT),
    "request_time_per_output_token_seconds": ("Mean of an answer's token gaps.", _SHORT),
    "e2e_request_latency_seconds": ("From the request's arrival to its last token.", _LONG),
    "request_queue_time_seconds": ("From arrival to the first step.", _LONG),
    "request_prefill_time_seconds": ("From the first step to the first token.", _LONG),
    "request_decode_time_seconds": ("From the first token to the last.", _LONG),
    "request_inference_time_seconds": ("From the first step to the last token.", _LONG),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
    "request_params_n": ("Answers asked for.", _FEW),
    "request_params_max_tokens": ("max_tokens asked for; absent where it was not given.", _TOKENS),
    "iteration_tokens_total": ("Tokens fed in a step.", _STEP),
    "kv_block_lifetime_seconds": ("A cached K/V block's, from allocation to eviction.", _RESIDENCY),
    "kv_block_idle_before_evict_seconds": (
        "From its last use to a cached K/V block's eviction.",
        _RESIDENCY,
    ),
    "kv_block_reuse_gap_seconds": (
        "For which a K/V block lay idle before a prompt hit it.",
        _RESIDENCY,
    ),
}
# The engine's own running sums → counters, by the fields of wire.Stats.
_SUMS = {
    "preemptions": "num_preemptions",
    "prefix_queries": "prefix_cache_queries",
    "prefix_hits": "prefix_cache_hits",
    "kv_bytes_written": "kv_bytes_written",
    "kv_bytes_read": "kv_bytes_read",
    "pairs_predicted": "score_pairs_predicted",
    "pairs_counted": "score_pairs_counted",
}
_OURS = {
    "kv_bytes_written": "K/V bytes written, by records.",
    "kv_bytes_read": "K/V bytes that rows read at least once a step, by records.",
    "score_pairs_predicted": "Query-key pairs, from lengths.",
    "score_pairs_counted": "Query-key pairs that the attention loops visited.",
    "engine_restarts": "Engine processes that died while they were wanted.",
}


class Metrics:
    """One registry for one server; ``model`` is the label ``model_name`` of everything."""

    def __init__(self, model: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self._model = model

        def labelled(kind: type, name: str, text: str, **options: object) -> object:
            return kind(name, text, ["model_name"], registry=registry, **options).labels(model)

        self._gauges: dict[str, Gauge] = {
            name: labelled(Gauge, f"vllm:{name}", text)  # type: ignore[misc]
            for name, text in _GAUGES.items()
        }
        self._counters: dict[str, Counter] = {
            name: labelled(Counter, f"{prefix}:{name}", text)  # type: ignore[misc]
            for prefix, table in (("vllm", _COUNTERS), ("stairs", _OURS))
            for name, text in table.items()
        }
        self._histograms: dict[str, Histogram] = {
            name: labelled(Histogram, f"vllm:{name}", text, buckets=buckets)  # type: ignore[misc]
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._success = Counter(
            "vllm:request_success",
            "Answers by how they ended.",
            ["finished_reason", "model_name"],
            registry=registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(reason, model)
        self._http = Counter(
            "http_requests",
            "Requests answered.",
            ["method", "handler", "status"],
            registry=registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's arrival to the end of its answer, streams included.",
            ["method", "handler"],
            buckets=_LONG,
            registry=registry,
        )
        self._cache = Gauge(
            "vllm:cache_config_info",
            "The K/V pool, as labels.",
            ["model_name", "block_size", "num_gpu_blocks", "cache_dtype"],
            registry=registry,
        )
        self._observe_gap = self._histograms["inter_token_latency_seconds"].observe
        self._seen: dict[str, int] = {}  # the engine's sums at its latest report
        self._recent: deque[float] = deque([1.0], maxlen=32)
        self._line = _Line()
        self._new_tokens = 0

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def recent_seconds(self) -> float:
        """Mean duration of the latest requests."""
        return sum(self._recent) / len(self._recent)

    def log_line(self, now: float) -> str | None:
        """What happened since the last one; None where nothing did and nothing runs."""
        return self._line.take(now)

    # -- from the routes ----------------------------------------------------------------------

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        self._http.labels(method, handler, str(status)).inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    # -- from the bridge ----------------------------------------------------------------------

    def engine_loaded(self, info: wire.Ready) -> None:
        self._line.num_blocks = info.num_blocks
        self._cache.clear()
        self._cache.labels(
            self._model, str(info.block_size), str(info.num_blocks), info.kv_cache_dtype
        ).set(1)

    def engine_died(self, *, unexpected: bool) -> None:
        self._seen.clear()
        for gauge in self._gauges.values():
            gauge.set(0)
        if unexpected:
            self._counters["engine_restarts"].inc()

    def step(self, stats: wire.Stats) -> None:
        self._gauges["num_requests_running"].set(stats.running)
        self._gauges["num_requests_waiting"].set(stats.waiting)
        if self._line.num_blocks:
            self._gauges["kv_cache_usage_perc"].set(stats.blocks_owned / self._line.num_blocks)
        for field, name in _SUMS.items():
            total = getattr(stats, field)
            grown = total - self._seen.get(field, 0)
            if grown:
                self._counters[name].inc(grown)
                self._seen[field] = total
        if stats.step_tokens:
            self._histograms["iteration_tokens_total"].observe(stats.step_tokens)
        self._counters["generation_tokens"].inc(self._new_tokens)
        self._line.generated += self._new_tokens
        self._new_tokens = 0
        self._line.stats = stats

    def residency(self, spans: Spans) -> None:
        for name, values in (
            ("kv_block_lifetime_seconds", spans.lifetimes),
            ("kv_block_idle_before_evict_seconds", spans.idle_before_evict),
            ("kv_block_reuse_gap_seconds", spans.reuse_gaps),
        ):
            for value in values:
                self._histograms[name].observe(value)

    def token(self, one: Running, index: int, now: float) -> None:
        """A token of answer ``index`` arrived."""
        self._new_tokens += 1
        last = one.last_token.get(index)
        one.last_token[index] = now
        if last is not None:
            self._observe_gap(now - last)
        elif len(one.last_token) == 1:
            self._first_token(one)

    def _first_token(self, one: Running) -> None:
        metrics, prompt = one.output.metrics, one.prompt
        histograms = self._histograms
        histograms["time_to_first_token_seconds"].observe(metrics.time_to_first_token or 0.0)
        histograms["request_prompt_tokens"].observe(len(prompt.tokens))
        histograms["request_params_n"].observe(prompt.params.n)
        if prompt.params.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(prompt.params.max_tokens)
        if one.started is not None and metrics.first_token_time is not None:
            queued = one.started - metrics.arrival_time
            histograms["request_queue_time_seconds"].observe(max(queued, 0.0))
            prefill = metrics.first_token_time - one.started
            histograms["request_prefill_time_seconds"].observe(max(prefill, 0.0))
        self._counters["prompt_tokens"].inc(len(prompt.tokens))
        self._line.prompt += len(prompt.tokens)

    def ended(self, one: Running) -> None:
        """Its costs are known, so it is over, by itself or by an abort."""
        output, metrics = one.output, one.output.metrics
        for answer in output.outputs:
            self._success.labels(answer.finish_reason or "abort", self._model).inc()
        if not output.finished or metrics.finished_time is None:
            return
        histograms, finished = self._histograms, metrics.finished_time
        seconds = finished - metrics.arrival_time
        self._recent.append(seconds)
        histograms["e2e_request_latency_seconds"].observe(seconds)
        histograms["request_generation_tokens"].observe(metrics.num_generated)
        if metrics.first_token_time is not None:
            histograms["request_decode_time_seconds"].observe(finished - metrics.first_token_time)
        if one.started is not None:
            histograms["request_inference_time_seconds"].observe(finished - one.started)
        if metrics.time_per_output_token is not None:
            histograms["request_time_per_output_token_seconds"].observe(
                metrics.time_per_output_token
            )

    def failed(self, one: Running) -> None:
        """The engine died under it."""
        self._success.labels("error", self._model).inc(one.prompt.params.n)


class _Line:
    """Sums since the last log line, and the latest state."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.prompt = 0
        self.generated = 0
        self.stats: wire.Stats | None = None
        self._since = time.monotonic()

    def take(self, now: float) -> str | None:
        seconds, self._since = max(now - self._since, 1e-9), now
        stats, prompt, generated = self.stats, self.prompt, self.generated
        self.prompt = self.generated = 0
        if stats is None or not (prompt or generated or stats.running or stats.waiting):
            return None
        share = 100 * stats.blocks_owned / max(self.num_blocks, 1)
        hits = 100 * stats.prefix_hits / max(stats.prefix_queries, 1)
        return (
            f"{stats.running} running, {stats.waiting} waiting, K/V {share:.1f} % "
            f"({stats.blocks_pinned} blocks pinned), prefix hits {hits:.1f} %, "
            f"{prompt / seconds:.1f} prompt and {generated / seconds:.1f} answer tokens/s"
        )
