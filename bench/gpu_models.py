"""Do whole models run on this card, and is its memory as we say? One JSON line a model.

`python bench/gpu_models.py [--smollm2 FILE] [--device cpu] [NAME ...]`: each model through `LLM`
(random prompts until 95 % of the K/V pool is in use at one time, the card's memory beside what
`nvidia-smi` counts), then all at once through `stairs serve`, 32 clients each. FILE is the default
model's GGUF; the others have seeded random weights of their public configs. Dies where memory
runs out, less of the pool is used, an answer is short, or the start-up card is over 5 % off.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import openai
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quoted import ROOT, commit, machine
from stairs import LLM, SamplingParams
from stairs.engine.core import Engine
from stairs.planner.catalogue import CATALOGUE

# The hub's name, and the K/V pool in GiB: small models would take minutes to fill 120 of them.
MODELS = {
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", 8),
    "gpt2": ("openai-community/gpt2", 6),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", 40),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", None),
}
MOST_SEQS = 256
SERVED_POOL = 4 * 2**30  # bytes of K/V: the servers share the card
ANSWER = 160  # tokens: the first request still runs when the last is admitted
CLIENTS = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(MODELS))
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--llm", action="store_true", help=argparse.SUPPRESS)  # one model, offline
    options = parser.parse_args()
    if options.llm:
        print(json.dumps(offline(options.names[0], options)))
        return
    records = {}
    for name in options.names:
        command = [sys.executable, *sys.argv[:1], "--llm", "--device", options.device, name]
        if options.smollm2:
            command += ["--smollm2", str(options.smollm2)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        records[name] = json.loads(done.stdout.splitlines()[-1])
    with ThreadPoolExecutor() as pool:
        servers = pool.map(functools.partial(served, options=options), records)
    for (name, figures), serving in zip(records.items(), servers, strict=True):
        record = {
            "bench": "gpu_models",
            "model": name,
            **figures,
            **serving,
            "commit": os.environ.get("STAIRS_COMMIT") or commit(),
            "machine": machine(),
            "date": date.today().isoformat(),
        }
        print(json.dumps(record), flush=True)


def model_of(name: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """The model's place and the flags that go with it."""
    if name == "smollm2-135m" and options.smollm2:
        return [str(options.smollm2)]
    (folder / "config.json").write_text(json.dumps(CATALOGUE[MODELS[name][0]]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return [str(folder), "dummy"]


def make_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def offline(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Fill the pool to 95 % with requests of every length, answer them all, look at the card."""
    pool = MODELS[name][1] if options.device == "cuda" else 1
    with tempfile.TemporaryDirectory() as folder:
        model, *load_format = model_of(name, options, Path(folder))
        llm = LLM(
            model,
            load_format=load_format[0] if load_format else "auto",
            device=options.device,
            max_num_seqs=MOST_SEQS if options.device == "cuda" else 64,
            max_num_batched_tokens=16384 if options.device == "cuda" else 2048,
            kv_cache_memory_bytes=pool * 2**30 if pool else None,
        )
    engine = llm.engine
    context = engine.config.max_model_len
    assert context is not None
    tokens, lengths, source = 0, [], random.Random(1)
    room = engine.pool.num_blocks * engine.config.cache.block_size
    longest = context - ANSWER
    while tokens < 1.1 * room or len(lengths) < MOST_SEQS:
        usual = room / MOST_SEQS * source.uniform(0.8, 1.6)
        length = int(min(longest, usual if len(lengths) % 16 else source.uniform(1, 200)))
        lengths.append(max(1, length))
        tokens += length + ANSWER
    # What the measured step does: the sampler's memory is a part of the card.
    sampling = SamplingParams(
        temperature=1.0, top_p=0.9, logprobs=5, frequency_penalty=0.1, max_tokens=ANSWER,
        ignore_eos=True,
    )  # fmt: skip
    began = time.perf_counter()
    for seed, length in enumerate(lengths):
        engine.add(make_prompt(seed, length), sampling)
    num_tokens, most_used = run(engine)
    figures: dict[str, object] = {
        "requests": len(lengths),
        "tokens_out": num_tokens,
        "tokens_in": sum(lengths),
        "offline_s": round(time.perf_counter() - began, 2),
        "pool_tokens": room,
        "pool_used": round(most_used, 3),
    }
    assert num_tokens == ANSWER * len(lengths), (num_tokens, len(lengths))
    assert most_used >= 0.95, most_used
    if engine.capacity is not None:
        ours, smi = engine.capacity.in_use, smi_bytes()
        figures |= {"card": engine.capacity.lines(), "card_gib": round(ours / 2**30, 2)}
        figures |= {"smi_gib": round(smi / 2**30, 2), "card_over_smi": round(ours / smi, 4)}
        assert abs(ours / smi - 1) <= 0.05, figures
    return figures


def run(engine: Engine) -> tuple[int, float]:
    """All requests to their end: tokens sampled, the largest share of the pool in use."""
    num_tokens, most = 0, 0
    while engine.has_work:
        num_tokens += sum(event.token is not None for event in engine.step())
        most = max(most, engine.pool.num_owned)
    return num_tokens, most / engine.pool.num_blocks


def smi_bytes() -> int:
    torch.cuda.synchronize()
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.check_output(command, text=True)) * 2**20


def served(name: str, *, options: argparse.Namespace) -> dict[str, object]:
    """128 completions over HTTP, 32 at a time, each with its own length of prompt."""
    with tempfile.TemporaryDirectory() as folder:
        model, *load_format = model_of(name, options, Path(folder))
        command = [sys.executable, "-c", "from stairs.cli import main; main()", "serve", model]
        command += ["--port", "0", "--served-model-name", name, "--device", options.device]
        command += ["--load-format", load_format[0]] if load_format else []
        command += ["--kv-cache-memory-bytes", str(SERVED_POOL)]
        began = time.perf_counter()
        server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        try:
            log = []
            for line in server.stderr:
                log.append(line)
                if ready := re.search(r"Ready: chat at (\S+),", line):
                    break
            else:
                sys.exit("the server ended:\n" + "".join(log))
            start = time.perf_counter() - began
            seconds = asyncio.run(ask(ready[1], name))
        finally:
            server.terminate()
            server.communicate()
    return {"serve_ready_s": round(start, 2), "served": 4 * CLIENTS, "served_s": round(seconds, 2)}


async def ask(url: str, name: str) -> float:
    """Seconds until all answers are whole."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
    free = asyncio.Semaphore(CLIENTS)

    async def one(seed: int) -> None:
        async with free:
            answer = await client.completions.create(
                model=name,
                prompt=make_prompt(seed, 1 + seed * 37 % 900),
                max_tokens=ANSWER,
                temperature=0.0,
                extra_body={"ignore_eos": True},
            )
        assert answer.usage is not None and answer.usage.completion_tokens == ANSWER, answer

    began = time.perf_counter()
    await asyncio.gather(*(one(seed) for seed in range(4 * CLIENTS)))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
