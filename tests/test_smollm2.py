"""The default model itself: against transformers' own loading of the same file, and against
itself over eight ways to compute the same tokens, in float32."""

from __future__ import annotations

import pytest
import torch

from harness import capture_logits, prompt_logits, run_all
from stairs.checkpoints.checkpoint import Checkpoint, open_checkpoint
from stairs.config import CacheConfig, EngineConfig, SamplingParams
from stairs.engine.build import build_engine
from stairs.engine.core import Engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_threads")]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nName three uses of a paper clip.<|im_end|>\n<|im_start|>assistant\n",
    "A recurrence: 1, 1, 2, 3, 5, 8, 13,",
    "Über den Wolken — 中文, émigré, \t tabs and  spaces: ",
)
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Two logits closer than this may change places: the sum order differs, the pairs do not.
NEAR_TIE = 1e-3


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def shared_engine(checkpoint: Checkpoint) -> Engine:
    return engine_of(checkpoint)


def engine_of(checkpoint: Checkpoint, **options) -> Engine:
    cache = CacheConfig(
        num_blocks=512, enable_prefix_caching=options.pop("enable_prefix_caching", True)
    )
    return build_engine(checkpoint.config, checkpoint.tensors, EngineConfig(cache=cache, **options))


def assert_same_tokens(ours: list[int], theirs: list[int], logits: list[torch.Tensor]) -> None:
    """Equal up to the first near tie, which is printed; ``logits`` are those that gave ``ours``."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            gap = float(logits[i][a] - logits[i][b])
            print(f"near tie at token {i}: {a} over {b} by {gap:.1e}")
            assert 0 <= gap < NEAR_TIE, f"token {i} differs: {a} for {b}, logits {gap} apart"
            return


def test_logits_and_greedy_tokens_are_transformers_own(checkpoint, reference, shared_engine):
    tokenizer = checkpoint.tokenizer()
    seen = capture_logits(shared_engine)
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt)
        request = shared_engine.add(tokens, GREEDY)
        ours = run_all(shared_engine)[request]
        # Their logits after our tokens: the same greedy answer, by induction, in one pass.
        with torch.no_grad():
            theirs = reference(torch.tensor([tokens + ours])).logits[0, len(tokens) - 1 : -1]
        steps = torch.stack([seen[request, len(tokens) + i] for i in range(NUM_TOKENS)])
        assert (steps - theirs).abs().max() / theirs.abs().max() <= 1e-4
        assert_same_tokens(ours, theirs.argmax(dim=-1).tolist(), list(steps))


def test_every_position_of_a_prompt(checkpoint, reference):
    tokens = checkpoint.tokenizer().encode(" ".join(PROMPTS) * 4)
    ours = prompt_logits(engine_of(checkpoint, enable_prefix_caching=False), tokens)
    with torch.no_grad():
        theirs = reference(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() / theirs.abs().max() <= 1e-4


# -- eight ways -----------------------------------------------------------------------------

SYSTEM = "You answer questions about bicycles, briefly and with care. " * 24
QUESTION = "How often should a chain be cleaned, and with what? Answer in two sentences."
WAYS = {
    "without a cache": {"enable_prefix_caching": False, "attention_backend": "reference"},
    "cached": {"enable_prefix_caching": False},
    "chunks of 16": {"prefill_chunk_size": 16, "max_num_batched_tokens": 16},
    "chunks of 512": {"prefill_chunk_size": 512},
    "whole prompt": {"prefill_chunk_size": 1024, "max_num_batched_tokens": 1024},
    "with seven others": {},
    "prefix pinned": {},
    "preempted": {},
}
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def run_way(checkpoint: Checkpoint, name: str) -> tuple[list[int], list[torch.Tensor]]:
    tokens = checkpoint.tokenizer().encode(SYSTEM + QUESTION)
    engine = engine_of(checkpoint, **WAYS[name])
    seen = capture_logits(engine)
    if name == "without a cache":
        answer, rows = list(tokens), []
        for _ in range(SHORT.max_tokens):
            one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            request = engine.add(answer, one)
            answer += run_all(engine)[request]
            rows.append(seen[request, len(answer) - 1])
        return answer[len(tokens) :], rows
    if name == "prefix pinned":
        engine.add_prefix("system", checkpoint.tokenizer().encode(SYSTEM))
        run_all(engine)
    if name == "with seven others":
        for i in range(7):
            engine.add(tokens[: 30 + 20 * i], SHORT)
    request = engine.add(tokens, SHORT)
    sequence = engine.sequence(request)

    def preempt(step: int) -> None:
        if name == "preempted" and sequence.num_generated == 3 and sequence.num_preemptions == 0:
            engine.scheduler.preempt_newest()

    answer = run_all(engine, before_step=preempt)[request]
    assert (sequence.num_preemptions > 0) == (name == "preempted")
    hits = ("prefix pinned", "with seven others")  # the others begin with the same text
    assert (sequence.num_cached_prompt > 0) == (name in hits)
    total = engine.ledger.total
    assert (total.pairs, total.kv_bytes_read) == (total.pairs_counted, total.kv_bytes_read_counted)
    return answer, [seen[request, len(tokens) + i] for i in range(SHORT.max_tokens)]


@pytest.fixture(scope="module")
def without_cache(checkpoint: Checkpoint) -> tuple[list[int], list[torch.Tensor]]:
    return run_way(checkpoint, "without a cache")


@pytest.mark.parametrize("name", [name for name in WAYS if name != "without a cache"])
def test_eight_ways_to_one_answer(checkpoint, without_cache, name):
    wanted, wanted_logits = without_cache
    answer, logits = run_way(checkpoint, name)
    for i, (ours, theirs) in enumerate(zip(logits, wanted_logits, strict=True)):
        assert (ours - theirs).abs().max() / theirs.abs().max() <= 1e-4
        if answer[i] != wanted[i]:
            break  # what follows continues another text
    assert_same_tokens(answer, wanted, logits)
