"""How well does the planner's time model fit this machine? One JSON line: its coefficients and
its error on steps that the fit did not see. `python bench/step_time.py [MODEL]`"""

from __future__ import annotations

import json
import random
import sys
from datetime import date

from quoted import commit, machine
from stairs.accounting.hardware import DEVICES
from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.config import EngineConfig, SamplingParams
from stairs.engine.build import build_engine
from stairs.engine.core import Engine
from stairs.planner.fitting import fit, samples_of

# (prompts, their length, answer): decodes of several batches and contexts, chunks at several ends.
ROUNDS = [(1, 30, 16), (4, 100, 12), (16, 40, 12), (1, 600, 12), (2, 700, 8), (1, 1500, 8)]


def main(model: str) -> None:
    checkpoint = open_checkpoint(model)
    config = EngineConfig(max_model_len=min(4096, checkpoint.config.context_length))
    engine = build_engine(checkpoint.config, checkpoint.tensors, config)
    run(engine, [(2, 40, 4)])  # compiles and touches everything once
    engine.ledger.records.clear()
    run(engine, ROUNDS)
    samples = samples_of(
        engine.ledger.records,
        engine.model_config,
        dtype=engine.config.dtype,
        kv_dtype=engine.config.cache.dtype,
    )
    found = fit(samples, DEVICES["cpu"])
    record = {
        "bench": "step_time",
        "model": model,
        "step_ms": 1e3 * found.model.step,
        "sequence_ms": 1e3 * found.model.sequence,
        "slowdown": {" ".join(key): value for key, value in found.model.slowdown.items()},
        "error": found.error,
        "fitted": found.num_fitted,
        "held_out": found.num_held_out,
        "commit": commit(),
        "machine": machine(),
        "date": date.today().isoformat(),
    }
    print(json.dumps(record))


def run(engine: Engine, rounds: list[tuple[int, int, int]]) -> None:
    source = random.Random(7)
    vocabulary = range(engine.model_config.vocab_size)
    for num, length, answer in rounds:
        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        for _ in range(num):
            engine.add(source.choices(vocabulary, k=length), sampling)
        while engine.has_work:
            engine.step()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "smollm2")
