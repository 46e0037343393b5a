"""How long does a step take on this CPU, and how well does the planner's time model say it?

Steps of two models are fitted, other steps of the same models and of a third one judge the fit;
a step's time is the median of several runs. One JSON line: the model and its errors.
`python bench/step_time.py` prints it (some minutes on two quiet cores), with `--update` it becomes
what `stairs plan` uses on a CPU, and a record.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from datetime import date

from quoted import ROOT, commit, machine
from stairs.accounting.hardware import DEVICES, host_cpu
from stairs.accounting.record import StepRecord
from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.checkpoints.dummy import DummyTensors
from stairs.checkpoints.planned import read_any_config
from stairs.config import CacheConfig, EngineConfig, SamplingParams
from stairs.engine.build import build_engine
from stairs.engine.core import Engine
from stairs.planner.catalogue import CATALOGUE
from stairs.planner.fitting import Fit, Sample, fit, samples_of
from stairs.planner.timing import FITTED_STEPS

RECORDS = ROOT / "bench" / "records" / "step_time.jsonl"
# (prompts, their length, answer): decodes of several batches and contexts, chunks at several ends.
FITTED = [
    (1, 30, 10),
    (4, 100, 8),
    (16, 40, 8),
    (1, 600, 8),
    (2, 700, 6),
    (1, 1500, 6),
    (8, 200, 6),
]
JUDGED = [(2, 60, 6), (6, 150, 6), (1, 900, 6), (3, 400, 6), (12, 90, 6)]
# Packed weights and dense ones, 30 layers and 12; then the first one's layers, dense.
SMOLLM2, GPT2 = "HuggingFaceTB/SmolLM2-135M-Instruct", "openai-community/gpt2"
MODELS, UNSEEN = ("smollm2", f"{GPT2} (dummy weights)"), f"{SMOLLM2} (dummy weights)"
RUNS = 3
MOST_ERROR = 0.25  # of a fit that is kept, in the median of the steps it did not see
Round = tuple[int, int, int]


def main(*, update: bool) -> None:
    if os.getloadavg()[0] > 0.5:
        print("other programs are running: times will be theirs too", file=sys.stderr)
    seen, judged = [], []
    for name in MODELS:
        engine = open_engine(name)
        seen += measure(engine, FITTED)
        judged += measure(engine, JUDGED)
    found = fit(seen, DEVICES["cpu"], held_out=judged)
    engine = open_engine(UNSEEN)
    unseen = fit(seen, DEVICES["cpu"], held_out=measure(engine, FITTED + JUDGED))
    record = describe(found, unseen)
    print(json.dumps(record))
    if update and found.median_error > MOST_ERROR:
        sys.exit(f"not kept: more than {MOST_ERROR:.0%} off in the median")
    if update:
        with RECORDS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        FITTED_STEPS.write_text(json.dumps(record, indent=2) + "\n")


def open_engine(name: str) -> Engine:
    """Without the prefix cache, so that each run of the same prompts is the same work."""
    config = EngineConfig(device="cpu", cache=CacheConfig(enable_prefix_caching=False))
    if name == "smollm2":
        checkpoint = open_checkpoint(name)
        engine = build_engine(checkpoint.config, checkpoint.tensors, config)
    else:
        model = read_any_config(CATALOGUE[name.split()[0]])
        engine = build_engine(model, DummyTensors(model), config)
    run(engine, [(2, 40, 4)])  # compiles and touches everything once
    return engine


def measure(engine: Engine, rounds: list[Round]) -> list[Sample]:
    """Each step with the median of its times over all runs."""
    runs = [steps(engine, rounds) for _ in range(RUNS)]
    assert len({tuple(sample.cost.flop for sample in one) for one in runs}) == 1
    return [
        Sample(same[0].cost, statistics.median(sample.seconds for sample in same))
        for same in zip(*runs, strict=True)
    ]


def steps(engine: Engine, rounds: list[Round]) -> list[Sample]:
    engine.ledger.records.clear()
    run(engine, rounds)
    records: list[StepRecord] = list(engine.ledger.records)
    return samples_of(
        records,
        engine.model_config,
        weights=engine.weights,
        dtype=engine.config.dtype,
        kv_dtype=engine.config.cache.dtype,
    )


def run(engine: Engine, rounds: list[Round]) -> None:
    source = random.Random(7)
    vocabulary = range(engine.model_config.vocab_size)
    for num, length, answer in rounds:
        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        for _ in range(num):
            prompt = source.choices(vocabulary, k=min(length, engine.max_model_len - answer - 1))
            engine.add(prompt, sampling)
        while engine.has_work:
            engine.step()


def describe(found: Fit, unseen: Fit) -> dict[str, object]:
    import torch

    return {
        "bench": "step_time",
        "models": list(MODELS),
        "step_ms": 1e3 * found.model.step,
        "sequence_ms": 1e3 * found.model.sequence,
        "layer_ms": 1e3 * found.model.layer,
        "slowdown": {" ".join(key): value for key, value in found.model.slowdown.items()},
        "error": found.error,
        "median_error": found.median_error,
        "ninth_error": found.ninth_error,
        "fitted": found.num_fitted,
        "held_out": found.num_held_out,
        "unseen": {
            "model": UNSEEN,
            "error": unseen.error,
            "median_error": unseen.median_error,
            "ninth_error": unseen.ninth_error,
            "steps": unseen.num_held_out,
        },
        "runs": RUNS,
        "clock": "wall",
        "cpu": host_cpu(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "commit": commit(),
        "machine": machine(),
        "date": date.today().isoformat(),
    }


if __name__ == "__main__":
    main(update="--update" in sys.argv[1:])
