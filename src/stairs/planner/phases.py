"""The phases of a model's life on a device: what each asks for, and how long it takes.

``Setting`` is a plan's question with every "auto" answered; all that a phase needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stairs.accounting import costs
from stairs.accounting.hardware import Device
from stairs.accounting.traffic import activation_values
from stairs.accounting.weights import HeldWeights, dense_weights, parameter_count
from stairs.config import DTYPE_BYTES, ModelConfig
from stairs.planner.memory import activation_peak, peak_bytes
from stairs.planner.timing import KV_DTYPE_BYTES, Group, StepCost, TimeModel, roofline, step_cost

__all__ = ["Phase", "Setting", "phases", "time_per_token", "time_to_first_token"]

# Adam in mixed precision (Rajbhandari et al. 2020, ZeRO): gradients in the weights' dtype, and
# a master copy, momentum and variance in fp32.
_OPTIMIZER_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``context``: tokens of a full sequence; ``shared``: of them, the system prompt's;
    ``batch``: sequences that decode together; ``budget``: prompt tokens a step."""

    config: ModelConfig
    device: Device
    model: TimeModel
    weights: HeldWeights
    dtype: str
    kv_dtype: str
    context: int
    shared: int
    batch: int
    budget: int
    chunk: int
    block_size: int

    @property
    def cached_prompt(self) -> int:
        """Tokens of a full prompt that the shared system prompt saves."""
        return costs.prefix_hit(self.shared, self.context, block_size=self.block_size)

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_itemsize(self) -> int:
        return KV_DTYPE_BYTES[self.kv_dtype]

    def step(self, work: costs.Work, *, logits_rows: int) -> StepCost:
        return step_cost(
            self.config,
            work,
            logits_rows=logits_rows,
            weights=self.weights,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
        )

    def seconds(self, work: costs.Work, *, logits_rows: int) -> float:
        return self.model.seconds(self.step(work, logits_rows=logits_rows), self.device)

    def kv_bytes(self, tokens: int) -> int:
        return costs.kv_sequence_bytes(
            self.config, tokens, self.kv_itemsize, block_size=self.block_size
        )

    def activations(self, tokens: int, logits_rows: int) -> int:
        return peak_bytes(
            activation_peak(
                self.config, tokens=tokens, logits_rows=logits_rows, itemsize=self.itemsize
            )
        )


@dataclass(frozen=True, slots=True)
class Phase:
    """One row: FLOPs and the largest step (score cells of one head of one layer) are exact;
    stored and moved bytes and time are predictions."""

    name: str
    cost: StepCost
    stored: int
    largest_step: int
    seconds: float
    sides: dict[str, str]


def phases(setting: Setting) -> list[Phase]:
    """A training step, a prefill in one step, the last chunk, and decodes alone and mixed."""
    s = setting
    new, context = chunk_steps(s, s.context)[-1]
    decodes = [(1, s.context)] * s.batch
    rows = [
        _phase(s, "prefill at once", [(s.context, s.context)], logits_rows=1),
        _phase(s, f"last chunk of {new}", [(new, context)], logits_rows=1),
        _phase(s, "decode, 1 user", [(1, s.context)], logits_rows=1),
    ]
    users = "1 user" if s.batch == 1 else f"{s.batch} users"
    if s.batch > 1:
        rows.append(_phase(s, f"decode, {users}", decodes, logits_rows=s.batch))
    mixed = [*decodes, (new, context)]
    name = f"decode, {users}, and a chunk"
    return [training_step(s), *rows, _phase(s, name, mixed, logits_rows=s.batch)]


def _phase(setting: Setting, name: str, work: costs.Work, *, logits_rows: int) -> Phase:
    cost = setting.step(work, logits_rows=logits_rows)
    tokens = sum(new for new, _ in work)
    stored = sum(setting.kv_bytes(context) for _, context in work)
    stored += setting.activations(tokens, logits_rows)
    return _row(setting, name, cost, stored, work)


def _row(setting: Setting, name: str, cost: StepCost, stored: int, work: costs.Work) -> Phase:
    return Phase(
        name=name,
        cost=cost,
        stored=stored,
        largest_step=sum(costs.square_pairs(new, context) for new, context in work),
        seconds=setting.model.seconds(cost, setting.device),
        sides={group: roofline(cost, setting.device, group)[0] for group in cost.groups},
    )


def training_step(setting: Setting) -> Phase:
    """One sequence of ``context`` tokens forward and backward, every row with logits.

    Backward is twice the forward's FLOP and traffic (a product for each of its two operands).
    Stored: weights, gradients, Adam's state, every activation a kernel wrote, and no scores, which
    tiled attention recomputes. Moved, besides: gradients written, Adam's state read and written.
    """
    dense = dense_weights(setting.config, setting.itemsize)
    s = replace(setting, weights=dense)  # nobody trains packed ones
    forward = s.step([(s.context, s.context)], logits_rows=s.context)
    weights = dense.total
    state = parameter_count(s.config) * _OPTIMIZER_BYTES
    groups = {
        name: Group(3 * group.flop, 3 * group.moved, group.rows)
        for name, group in forward.groups.items()
    }
    linear = groups["linear"]
    groups["linear"] = Group(linear.flop, linear.moved + 2 * weights + 2 * state, linear.rows)
    cost = StepCost(groups, 1, 3 * s.config.num_layers, s.dtype)
    # A kernel's output is read at least once again: about half of what moves is kept.
    kept = s.context * activation_values(s.config) * s.itemsize // 2
    kept += s.context * s.config.vocab_size * (s.itemsize + 4)
    stored = 2 * weights + state + kept
    return _row(s, f"training step, 1 x {s.context}", cost, stored, [(s.context, s.context)])


def chunk_steps(setting: Setting, prompt: int, *, cached: int = 0) -> list[tuple[int, int]]:
    """The steps in which a prompt that is alone in its queue is fed."""
    return costs.prefill_steps(
        prompt,
        chunk=setting.chunk,
        cached=cached,
        chunks_per_step=setting.budget // setting.chunk,
    )


def time_to_first_token(
    setting: Setting, prompt: int, *, cached: int = 0, beside: int = 0
) -> float:
    """Seconds from arrival to the first token: the steps that feed the prompt, while ``beside``
    others decode at full context in each. Queueing behind other prompts comes on top."""
    others = [(1, setting.context)] * beside
    steps = chunk_steps(setting, prompt, cached=cached)
    return sum(
        setting.seconds([step, *others], logits_rows=beside + (step is steps[-1])) for step in steps
    )


def time_per_token(setting: Setting, *, batch: int, chunk: bool) -> float:
    """Seconds of a step that ``batch`` sequences at full context decode in, with or without the
    last, costliest chunk of a prompt aboard: (total - TTFT) / (n - 1), not total / n."""
    work = [(1, setting.context)] * batch
    if chunk:
        work.append(chunk_steps(setting, setting.context)[-1])
    return setting.seconds(work, logits_rows=batch)
