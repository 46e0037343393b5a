"""How fast is the default model on this CPU, beside llama.cpp and transformers? One JSON line a
figure: tokens a second of a prefill of 512, of one stream, of eight; then a step part by part.

    python bench/cpu.py [--gguf FILE] [--threads 2] [--llama-cpp-python PYTHON] [--cpu-time]

Each side is a process of its own with the model loaded; they work in turn, round after round, and
the figures are medians. PYTHON is an interpreter that can import llama_cpp; without it that side
is left out. Prompts are random ids, other ones each round, so that no cache answers. With
--cpu-time clocks are the process's own, for one thread on a machine that others use too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFILL = 512
PROMPT, ANSWER = 64, 48  # of the streams
VOCABULARY = 49152
CPU_TIME = False
ROOT = Path(__file__).resolve().parent.parent


class Stairs:
    def __init__(self, gguf: str, threads: int, *, batch_invariant: bool = False) -> None:
        import torch

        from stairs.checkpoints.checkpoint import open_checkpoint
        from stairs.config import CacheConfig, EngineConfig
        from stairs.engine.build import build_engine

        torch.set_num_threads(threads)
        checkpoint = open_checkpoint(gguf)
        cache = CacheConfig(num_blocks=512, enable_prefix_caching=False)
        config = EngineConfig(device="cpu", cache=cache, batch_invariant=batch_invariant)
        self.engine = build_engine(checkpoint.config, checkpoint.tensors, config)

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
        from stairs.config import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        begin = time.perf_counter()
        requests = [self.engine.add(prompt, sampling) for prompt in prompts]
        began: set[int] = set()
        while len(began) < len(requests):
            began |= {event.request for event in self.engine.step()}
        first = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return first - begin, time.perf_counter() - first


class LlamaCpp:
    """One context; the sequences of a run decode in one batch."""

    def __init__(self, gguf: str, threads: int) -> None:
        self.lib = lib = importlib.import_module("llama_cpp")
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(gguf.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8192, 512, 512, 8
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, params)
        self.batch = lib.llama_batch_init(512, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Feed (token, position, sequence, wants logits); the likeliest next tokens."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self.lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        logits = [
            self.lib.llama_get_logits_ith(self.context, i) for i, row in enumerate(rows) if row[3]
        ]
        return [int(np.ctypeslib.as_array(row, (VOCABULARY,)).argmax()) for row in logits]

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        begin = time.perf_counter()
        rows = [
            (token, i, s, i + 1 == len(prompt))
            for s, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        tokens = self._decode(rows)
        first = time.perf_counter()
        length = len(prompts[0])
        for i in range(num_tokens - 1):
            tokens = self._decode([(t, length + i, s, True) for s, t in enumerate(tokens)])
        return first - begin, time.perf_counter() - first


class Transformers:
    def __init__(self, gguf: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        path = Path(gguf)
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
        import torch

        with torch.inference_mode():
            begin = time.perf_counter()
            out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1].argmax(dim=-1)
            first = time.perf_counter()
            for _ in range(num_tokens - 1):
                out = self.model(tokens[:, None], past_key_values=out.past_key_values)
                tokens = out.logits[:, -1].argmax(dim=-1)
        return first - begin, time.perf_counter() - first


SIDES: dict[str, Callable[[str, int], Any]] = {
    "stairs": Stairs,
    "stairs --batch-invariant": lambda gguf, threads: Stairs(gguf, threads, batch_invariant=True),
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}
# Sequences, tokens of each prompt, tokens of each answer.
TASKS = {"prefill of 512": (1, PREFILL, 1), "one stream": (1, PROMPT, ANSWER),
         "eight streams": (8, PROMPT, ANSWER)}  # fmt: skip


def serve_side(name: str, gguf: str, threads: int) -> None:
    """Answer lines [task, seed] on stdin with tokens a second, until they end."""
    side = SIDES[name](gguf, threads)
    for task in ("one stream", "eight streams", "prefill of 512"):
        perform(side, task, 0)  # compiles, and touches every page
    print("ready", flush=True)
    for line in sys.stdin:
        print(perform(side, *json.loads(line)), flush=True)


def perform(side: Any, task: str, seed: int) -> float:
    num, length, answer = TASKS[task]
    source = random.Random(seed)
    prompts = [source.choices(range(VOCABULARY), k=length) for _ in range(num)]
    prefill, decode = side.run(prompts, answer)
    return length / prefill if answer == 1 else num * (answer - 1) / decode


def compare(gguf: str, threads: int, rounds: int, llama_cpp: str | None) -> None:
    workers: dict[str, subprocess.Popen[str]] = {}
    clock = ["--cpu-time"] if CPU_TIME else []
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'bench'}"
    for name in SIDES:
        python = llama_cpp if name == "llama.cpp" else sys.executable
        if python is None:
            continue
        command = [python, __file__, "--side", name, "--gguf", gguf, "--threads", str(threads)]
        command += clock
        workers[name] = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert ask(workers[name]) == "ready", f"{name} did not start"
    for task in TASKS:
        found: dict[str, list[float]] = {name: [] for name in workers}
        for seed in range(1, rounds + 1):
            for name, worker in workers.items():
                found[name].append(float(ask(worker, [task, seed])))
        medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
        ratios = {n: round(medians["stairs"] / v, 2) for n, v in medians.items() if n != "stairs"}
        report(what=task, threads=threads, rounds=rounds, tokens_per_s=medians, stairs_over=ratios)
    for worker in workers.values():
        assert worker.stdin
        worker.stdin.close()
        worker.wait()


def ask(worker: subprocess.Popen[str], question: list[Any] | None = None) -> str:
    assert worker.stdin and worker.stdout
    if question is not None:
        worker.stdin.write(json.dumps(question) + "\n")
        worker.stdin.flush()
    return worker.stdout.readline().strip()


def anatomy(gguf: str, threads: int) -> None:
    """Medians of a decode step, µs by part, of one stream and of eight."""
    side = Stairs(gguf, threads)
    spent = clocked(side.engine)
    for num in (1, 8):
        steps: list[dict[str, float]] = []
        perform(side, "one stream" if num == 1 else "eight streams", 0)
        prompts = [random.Random(i).choices(range(VOCABULARY), k=PROMPT) for i in range(num)]
        step = side.engine.step

        def stepped(step: Callable[[], Any] = step, steps: list[dict[str, float]] = steps) -> Any:
            spent.clear()
            begin = time.perf_counter()
            events = step()
            whole = time.perf_counter() - begin
            steps.append({**spent, "the rest": whole - sum(spent.values()), "step": whole})
            return events

        side.engine.step = stepped  # type: ignore[method-assign]
        side.run(prompts, ANSWER)
        side.engine.step = step  # type: ignore[method-assign]
        decodes = steps[2:]
        parts = {
            p: round(1e6 * statistics.median(s.get(p, 0) for s in decodes)) for p in decodes[0]
        }
        report(what="decode step, us by part", threads=threads, streams=num, us=parts)


def clocked(engine: Any) -> dict[str, float]:
    """Seconds by part of what the engine does from now on; a clock around each costs 0.3 us."""
    from stairs.engine import core
    from stairs.models import llama

    spent: dict[str, float] = {}

    def clock(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **options)
            spent[part] = spent.get(part, 0) + time.perf_counter() - begin
            return result

        return timed

    model = engine.runner.model
    model.embedding = clock("embedding, angles", model.embedding)
    model.rotary = clock("embedding, angles", model.rotary)
    llama.attend_rotated = clock("attention", llama.attend_rotated)  # type: ignore[attr-defined]
    model.between = [clock("between attentions", between) for between in model.between]
    model.head = clock("head", model.head)
    core.sample = clock("sampling", core.sample)  # type: ignore[attr-defined]
    engine._batch.build = clock("batch", engine._batch.build)
    engine.scheduler.schedule = clock("scheduling", engine.scheduler.schedule)
    engine.scheduler.commit = clock("scheduling", engine.scheduler.commit)
    engine._rows = clock("records", engine._rows)
    engine.ledger.append = clock("records", engine.ledger.append)
    return spent


def report(**figures: object) -> None:
    from datetime import date

    from quoted import commit, machine

    where = {"commit": commit(), "machine": machine(), "date": date.today().isoformat()}
    seconds = "of the process" if CPU_TIME else "of the clock"
    print(json.dumps({"bench": "cpu", **figures, "seconds": seconds, **where}), flush=True)


def default_gguf() -> str:
    from stairs.checkpoints.checkpoint import open_checkpoint

    return str(open_checkpoint("smollm2").path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", help="of a Llama model with a vocabulary of 49152")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--llama-cpp-python", help="an interpreter that can import llama_cpp")
    parser.add_argument("--cpu-time", action="store_true", help="with --threads 1")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cpu_time:
        CPU_TIME, time.perf_counter = True, time.process_time
    gguf = asked.gguf or default_gguf()
    if asked.side:
        serve_side(asked.side, gguf, asked.threads)
    else:
        compare(gguf, asked.threads, asked.rounds, asked.llama_cpp_python)
        anatomy(gguf, asked.threads)
