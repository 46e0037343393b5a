"""One greedy request run with and without each technique: what each saves, and on which axis.

Every run must give the same tokens, or this fails. Figures come from the engine's own records
(rows, counted pairs, times) and from ``accounting``'s formulas over the very steps it took
(FLOPs, bytes); what is predicted says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from numpy.typing import NDArray

from stairs.accounting import costs, traffic
from stairs.accounting.record import Phase
from stairs.accounting.table import Cell, Column, Table
from stairs.attention.choose import Choice, choose, score_bytes_held
from stairs.attention.devices import triton_supports
from stairs.config import DTYPE_BYTES, AttentionBackend, SamplingParams
from stairs.errors import StairsError
from stairs.llm import LLM
from stairs.models.registry import matrix_bytes_read

__all__ = ["TECHNIQUES", "DifferentTokensError", "Technique", "compare", "default_system_prompt"]

QUESTION = "What can you help me with?"
MIB = 1024 * 1024
_WHOLE_PROMPT = 1 << 16  # a chunk that no prompt here fills

Rows = NDArray[np.void]  # accounting.record.ROW, one a step


class DifferentTokensError(StairsError):
    """Two ways to compute the same request gave different tokens."""

    code = "different_tokens"


@dataclass(frozen=True, slots=True)
class Part:
    """Prefill or decode of one run. ``seconds``: to the first token, or for each later one;
    ``logits_rows``: of each step, 1 where it gave a token."""

    seconds: float
    rows: Rows
    logits_rows: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.logits_rows)


@dataclass(frozen=True, slots=True)
class Run:
    """``before``: seconds of work done before the request came; ``keeps_kv``: between tokens."""

    tokens: list[int]
    before: float
    prefill: Part
    decode: Part
    keeps_kv: bool


@dataclass(frozen=True, slots=True)
class Request:
    system: str
    user: str
    max_tokens: int

    def tokens(self, llm: LLM) -> list[int]:
        """Through the chat template, or as plain text where the model has none."""
        if not llm.tokenizer.has_chat_template:
            return llm.tokenizer.encode(f"{self.system}\n\n{self.user}")
        return llm.tokenizer.encode_chat([*self._head(), {"role": "user", "content": self.user}])

    def prefix(self, llm: LLM) -> str | list[dict[str, str]]:
        """What is known before the request: its system prompt, as ``LLM.pin`` takes it."""
        return self._head() if llm.tokenizer.has_chat_template else self.system

    def _head(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}]


@dataclass(frozen=True, slots=True)
class Technique:
    """``chunk`` None: a whole prompt in one step."""

    name: str
    run: Callable[[LLM, Request], Run]
    chunk: int | None = None
    chunks_per_step: int = 1
    backend: AttentionBackend = "auto"


def default_system_prompt() -> str:
    """The text of about 500 tokens that the example and the documents use."""
    return files("stairs.text").joinpath("system_prompt.txt").read_text(encoding="utf-8").strip()


# -- the runs -----------------------------------------------------------------------------------


def _with_cache(llm: LLM, request: Request) -> Run:
    """One request; K and V are kept, so each later token feeds one row."""
    return _generate(llm, request, before=0.0)


def _pinned(llm: LLM, request: Request) -> Run:
    """The system prompt's K and V are computed before the clock of the request starts."""
    begin = time.perf_counter()
    llm.pin("system", request.prefix(llm))
    return _generate(llm, request, before=time.perf_counter() - begin)


def _without_cache(llm: LLM, request: Request) -> Run:
    """Each token is a request of its own that feeds everything before it again."""
    tokens = request.tokens(llm)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    first = _num_records(llm)
    generated: list[int] = []
    seconds: list[float] = []
    rows: list[Rows] = []
    for _ in range(request.max_tokens):
        begin = time.perf_counter()
        (output,) = llm.generate([tokens + generated], params)
        seconds.append(time.perf_counter() - begin)
        generated += output.outputs[0].token_ids
        rows.append(_rows_since(llm, first + len(rows)))
    decode = Part(float(np.mean(seconds[1:])), np.concatenate(rows[1:]), [1] * len(rows[1:]))
    return Run(generated, 0.0, Part(seconds[0], rows[0], [1]), decode, keeps_kv=False)


def _generate(llm: LLM, request: Request, *, before: float) -> Run:
    params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
    first = _num_records(llm)
    (output,) = llm.generate([request.tokens(llm)], params)
    rows = _rows_since(llm, first)
    metrics = output.metrics
    assert metrics.time_to_first_token is not None and metrics.time_per_output_token is not None
    chunks, steps = (rows[rows["phase"] == phase] for phase in (Phase.PREFILL, Phase.DECODE))
    return Run(
        output.outputs[0].token_ids,
        before,
        Part(metrics.time_to_first_token, chunks, [0] * (len(chunks) - 1) + [1]),
        Part(metrics.time_per_output_token, steps, [1] * len(steps)),
        keeps_kv=True,
    )


def _num_records(llm: LLM) -> int:
    return llm.engine.ledger.total.steps


def _rows_since(llm: LLM, first: int) -> Rows:
    """The rows of the steps after the ``first`` ones; only our request was in them."""
    new = _num_records(llm) - first
    return np.concatenate([record.rows for record in list(llm.engine.ledger.records)[-new:]])


TECHNIQUES = (
    Technique("no cache", _without_cache),
    Technique("KV cache", _with_cache),
    Technique("prompt pinned", _pinned),
    Technique("chunks of 128", _with_cache, chunk=128),
    Technique("4 × 128 a step", _with_cache, chunk=128, chunks_per_step=4),
    Technique("scores stored", _with_cache, backend="reference"),
    Technique("scores tiled", _with_cache),
)


def _open(model: str, technique: Technique) -> LLM:
    chunk = technique.chunk or _WHOLE_PROMPT
    llm = LLM(
        model,
        prefill_chunk_size=chunk,
        max_num_batched_tokens=chunk * technique.chunks_per_step,
        enable_prefix_caching=technique.run is _pinned,
        attention_backend=technique.backend,
    )
    llm.engine.count_visits()
    return llm


# -- what is shown ------------------------------------------------------------------------------

_BEFORE = "work before the request, ms"
_FIRST = "time to first token, ms"
_EACH = "time per token, ms"


def _figures(llm: LLM, technique: Technique, part: Part, run: Run) -> dict[str, Cell]:
    """What one part of a run took and cost, summed over its steps; a tiled kernel holds the
    scores of one tile."""
    rows, config = part.rows, llm.engine.model_config
    assert (rows["pairs"] == rows["pairs_counted"]).all(), "predicted pairs are not those counted"
    steps = [(int(row["new_tokens"]), int(row["context"])) for row in rows]
    is_prefill = part is run.prefill
    # In prefill what a prefix gave; in decode what each step found of the steps before it.
    found = rows["cached_tokens"] if is_prefill else rows["context"] - rows["new_tokens"]
    choice = _choice(llm, technique)
    trips = choice.trips
    macs = costs.step_macs(config, steps, logits_rows=part.num_tokens)
    moved = sum(_moved(llm, choice, *one) for one in zip(steps, part.logits_rows, strict=True))
    held = max(_scores_held(llm, choice, step) for step in steps)
    return {
        **({_BEFORE: run.before * 1000} if is_prefill else {}),
        (_FIRST if is_prefill else _EACH): part.seconds * 1000,
        "query rows fed": int(rows["new_tokens"].sum()),
        "K/V rows computed": int(rows["new_tokens"].sum()),
        "K/V rows reused": int(found.sum()) if run.keeps_kv or is_prefill else 0,
        "pairs (counted)": int(rows["pairs_counted"].sum()),
        "largest step, rows × keys": costs.largest_step(steps),
        "GFLOP": costs.flops(macs) / 1e9,
        "K/V stored, MiB": _stored(llm, steps[-1][1]) / MIB if run.keeps_kv else 0,
        "scores held, KiB": held / 1024,
        "moved, MiB (predicted)": moved / MIB,
        "memory trips": f"3: {', '.join(trips)}" if len(trips) > 1 else "1",
    }


def _table(title: str, columns: dict[str, dict[str, Cell]], notes: tuple[str, ...] = ()) -> Table:
    """One column a technique: twelve figures of seven runs fit a page that way round."""
    names = next(iter(columns.values()))
    heads = [Column("")] + [Column(technique) for technique in columns]
    rows = [[name, *(figures[name] for figures in columns.values())] for name in names]
    return Table(title, heads, rows, notes)


def _choice(llm: LLM, technique: Technique) -> Choice:
    pool, config = llm.engine.kv.layers[0].k, llm.engine.model_config
    on_gpu = pool.device.type == "cuda"
    dtype = getattr(torch, llm.engine.config.dtype)
    return choose(
        backend=technique.backend,
        device=pool.device.type,
        group_size=config.group_size,
        num_threads=torch.get_num_threads(),
        triton_lacks=triton_supports(pool.device, dtype, config.head_dim) if on_gpu else None,
    )


def _stored(llm: LLM, context: int) -> int:
    cache = llm.engine.config.cache
    return costs.kv_pool_bytes(
        llm.engine.model_config,
        [context],
        DTYPE_BYTES[cache.dtype],
        block_size=cache.block_size,
    )


def _scores_held(llm: LLM, choice: Choice, step: tuple[int, int]) -> int:
    return score_bytes_held(
        choice,
        rows=step[0],
        keys=step[1],
        heads=llm.engine.model_config.num_heads,
        itemsize=DTYPE_BYTES[llm.engine.config.dtype],
    )


def _moved(llm: LLM, choice: Choice, step: tuple[int, int], logits_rows: int) -> int:
    config, itemsize = llm.engine.config, DTYPE_BYTES[llm.engine.config.dtype]
    materialised = choice.implementation == "reference"
    parts = traffic.step_moved_bytes(
        llm.engine.model_config,
        [step],
        logits_rows=logits_rows,
        weights=llm.engine.weights,
        itemsize=itemsize,
        kv_itemsize=DTYPE_BYTES[config.cache.dtype],
        score_kernels=traffic.STANDARD_KERNELS if materialised else (),
    )
    # Which of them a step of so many rows reads, only the model itself knows.
    model = llm.engine.runner.model
    parts |= matrix_bytes_read(model, num_rows=step[0], logits_rows=logits_rows)
    return sum(parts.values())


_NOTES = (
    "Pairs: (query, key) under the mask, one head of one layer; counted by the kernels, and equal "
    "to the formula. Reused: from the pinned prefix in prefill, from earlier steps in decode. "
    "Largest step: the rectangle that one inference carries. Moved: each operand of each kernel "
    "once, stored scores on each of their trips. Decode sums over its tokens, times apart.",
)
_LAST_LINE = "L²·D → L·D (KV cache), 128 × 4 = 512 (prefill), three trips → one (FlashAttention)"


def compare(
    model: str, *, system: str | None = None, user: str = QUESTION, max_tokens: int = 12
) -> Iterator[str | Table]:
    """Lines and tables for a reader, as they become known.

    Raises DifferentTokensError at the first run whose tokens are not those of the first one.
    """
    request = Request(default_system_prompt() if system is None else system, user, max_tokens)
    prefill: dict[str, dict[str, Cell]] = {}
    decode: dict[str, dict[str, Cell]] = {}
    tokens: list[int] | None = None
    for technique in TECHNIQUES:
        llm = _open(model, technique)
        llm.warm_up()
        run = technique.run(llm, request)
        if tokens is None:
            tokens = run.tokens
            answer = " ".join(llm.tokenizer.decode(tokens).split())
            yield f"{model}: one greedy request, {max_tokens} tokens, {len(TECHNIQUES)} ways"
            yield f"  question  {user}\n  answer    {answer} ..."
        if run.tokens != tokens:
            raise DifferentTokensError(f"{technique.name} gave {run.tokens}, not {tokens}")
        prefill[technique.name] = _figures(llm, technique, run.prefill, run)
        decode[technique.name] = _figures(llm, technique, run.decode, run)
    yield _table("Prefill: the whole prompt, up to the first token", prefill)
    yield _table(f"Decode: the {max_tokens - 1} tokens after the first", decode, _NOTES)
    yield f"All {len(TECHNIQUES)} ways gave the same {max_tokens} tokens."
    yield _LAST_LINE
