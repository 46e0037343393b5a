"""One request inside the engine: its tokens, its blocks, and how far it has come.

    tokens   [ prompt ......................... | generated ... ]
             0          num_cached    num_computed          len(tokens)
             [ reused K/V | written K/V          | to be fed    )

A sequence is in prefill while ``num_computed < prefill_end`` (all tokens it had when it was last
admitted: after a preemption the generated ones are recomputed too), else in decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from stairs.accounting.record import Phase, Totals
from stairs.cache.prefix import Entry
from stairs.config import SamplingParams

if TYPE_CHECKING:
    from stairs.engine.grammar import GrammarState

__all__ = ["FinishReason", "Sequence", "Status", "TokenEvent", "TokenLogprobs"]


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    PREFIX = "prefix"  # a prefill-only sequence whose K/V are all written


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probability of ``token``, its rank (1 is the likeliest), and the likeliest."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of answer ``index`` of a request.

    ``finish_reason`` stands on an answer's last token, ``costs`` (sums of records by phase) on the
    request's last, ``prompt_logprobs`` (of tokens 1, 2, ...) on its first. A prefix computed ahead
    ends with a single event without a token.
    """

    request: int
    token: int | None
    finish_reason: FinishReason | None
    num_cached_tokens: int  # prompt tokens whose K/V the prefix cache held on arrival
    index: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    costs: dict[Phase, Totals] | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer of a request. ``forks`` are its siblings that share its prompt: they come to
    life when the prompt is computed, on the same blocks but for a copy of the last, partial one."""

    request: int
    tokens: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    salt: str | None = None
    index: int = 0  # of the answer among the request's n
    forks: tuple[Sequence, ...] = ()
    prefill_only: bool = False  # a prefix computed ahead: nothing is sampled
    grammar: GrammarState | None = None  # what may come next

    num_prompt_tokens: int = field(init=False)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    blocks: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)  # published blocks, one per full block
    num_computed: int = 0
    num_cached: int = 0  # of the last admission
    num_cached_prompt: int = 0  # of the first one: what the user is told
    prefill_end: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of tokens 1, 2, ...

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.prefill_end = len(self.tokens)

    @property
    def phase(self) -> Phase:
        return Phase.PREFILL if self.num_computed < self.prefill_end else Phase.DECODE

    @property
    def order(self) -> tuple[int, int]:
        """Age: lower is older."""
        return self.request, self.index

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def max_computed(self) -> int:
        """Most K/V rows it can ever hold: the last token it generates is never fed."""
        return self.num_prompt_tokens + max(self.max_tokens - 1, 0)
