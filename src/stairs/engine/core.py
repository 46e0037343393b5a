"""The engine: requests in as token ids, tokens out as events, one step at a time.

It knows nothing of text. One thread calls it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stairs.accounting import costs
from stairs.accounting.record import ROW, Ledger, Phase, StepRecord, Totals
from stairs.accounting.weights import HeldWeights
from stairs.attention.meta import AttnMeta
from stairs.attention.work import Cutter
from stairs.cache.blocks import BlockPool
from stairs.cache.paged_kv import PagedKV
from stairs.cache.prefix import Pin, PrefixCache
from stairs.config import EngineConfig, ModelConfig, SamplingParams
from stairs.engine.batch import Batch, StepBatch
from stairs.engine.capacity import Capacity
from stairs.engine.runner import Runner
from stairs.engine.sampling import sample, token_logprobs
from stairs.engine.scheduler import Scheduler, StepPlan
from stairs.engine.sequence import FinishReason, Sequence, Status, TokenEvent, TokenLogprobs
from stairs.errors import ContextLengthError, InvalidRequestError
from stairs.models.registry import Model

if TYPE_CHECKING:
    from stairs.engine.grammar import Grammars, GrammarState

__all__ = ["Engine"]


# Rows of a prompt whose logits are held at a time when their log probabilities are wanted.
SCORED_ROWS = 64


class Engine:
    """Scheduler, batch, model and cache, put together by ``engine.build.build_engine``."""

    def __init__(
        self,
        model: Model,
        kv: PagedKV,
        *,
        weights: HeldWeights,
        model_config: ModelConfig,
        config: EngineConfig,
        fingerprint: str,
        cutter: Cutter | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        assert config.cache.num_blocks is not None and config.max_model_len is not None
        self.weights = weights  # as they lie in memory, by the file's types
        self.model_config = model_config
        self.fingerprint = fingerprint  # of the weights: checkpoints.tensors
        self.config = config
        self.capacity = capacity  # of the card; None on a CPU
        self.max_model_len = config.max_model_len
        self.kv = kv
        self.pool = BlockPool(config.cache.num_blocks)
        self.prefix = PrefixCache(self.pool, config.cache.block_size)
        self.max_pinned_blocks = int(config.cache.num_blocks * config.cache.pin_memory_fraction)
        self.scheduler = Scheduler(config, self.pool, self.prefix)
        self.runner = Runner(model, kv)
        self.ledger = Ledger()
        self._batch = Batch(
            config.max_num_seqs,
            costs.blocks_for(self.max_model_len, config.cache.block_size),
            block_size=config.cache.block_size,
            device=kv.layers[0].k.device,
            cutter=cutter,
            batch_invariant=config.batch_invariant,
        )
        self._live: dict[int, list[Sequence]] = {}  # unfinished answers of each request
        self._seeds = random.Random(config.seed)
        self._prefixes: dict[int, tuple[str, tuple[int, ...]]] = {}  # being computed
        self.open_grammars: Callable[[], Grammars] | None = None  # vocabulary, on first use
        self._grammars: Grammars | None = None
        self._num_requests = 0
        self._num_steps = 0

    # -- requests ---------------------------------------------------------------------------

    def add(
        self,
        tokens: Tokens[int],
        sampling: SamplingParams,
        *,
        salt: str | None = None,
        grammar: str | None = None,
    ) -> int:
        """Queue a request; returns its number. ``salt`` keeps its prefix from other salts' users.
        ``grammar`` is what each answer must follow, for ``open_grammars`` to compile.

        With ``sampling.n`` > 1 all answers bear this number and tell themselves apart by index.

        Raises InvalidRequestError, or ContextLengthError for one that can never run to its end.
        """
        self._check_ids(tokens, "prompt")
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(tuple(sampling.logit_bias), "logit_bias")
        self._check_prompt(tokens)
        eos = () if sampling.ignore_eos else self.model_config.eos_token_ids
        max_tokens = self._max_tokens(len(tokens), sampling.max_tokens)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        answers = [
            Sequence(
                request=self._num_requests,
                tokens=list(tokens),
                sampling=sampling,
                max_tokens=max_tokens,
                stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
                seed=(seed + index) % 2**64,
                salt=salt,
                index=index,
            )
            for index in range(sampling.n)
        ]
        if grammar is not None:
            states = self._states(grammar, sampling)
            for answer, state in zip(answers, states, strict=True):
                answer.grammar = state
        answers[0].forks = tuple(answers[1:])
        return self._queue(answers)

    def _states(self, grammar: str, sampling: SamplingParams) -> list[GrammarState]:
        for name, value in (
            ("min_tokens", sampling.min_tokens),
            ("ignore_eos", sampling.ignore_eos),
        ):
            if value:
                raise InvalidRequestError(
                    f"{name} contradicts a grammar, which says itself where an answer ends",
                    param=name,
                )
        if self._grammars is None:
            assert self.open_grammars is not None, "nobody said where the vocabulary is"
            self._grammars = self.open_grammars()
        return self._grammars.states(grammar, sampling.n)

    def add_prefix(self, name: str, tokens: Tokens[int], *, salt: str | None = None) -> int:
        """Queue a prefix to be computed ahead; it is pinned as ``name`` when its event comes.

        Only whole blocks are kept: the tail of ``tokens`` is recomputed by every request.
        """
        num_blocks = self.check_prefix(name, tokens)
        sequence = Sequence(
            request=self._num_requests,
            tokens=list(tokens[: num_blocks * self.config.cache.block_size]),
            sampling=SamplingParams(),
            max_tokens=0,
            stop_ids=frozenset(),
            seed=0,
            salt=salt,
            prefill_only=True,
        )
        request = self._queue([sequence])
        self._prefixes[request] = name, tuple(tokens)
        return request

    def check_prefix(self, name: str, tokens: Tokens[int]) -> int:
        """Whether ``tokens`` can be pinned as ``name``; the number of blocks that would be held."""
        self._check_ids(tokens, "prompt")
        self._check_prompt(tokens)
        if name in {*self.prefix.pins, *(pending for pending, _ in self._prefixes.values())}:
            raise InvalidRequestError(f"prefix {name!r} is already pinned", param="name")
        if not self.config.cache.enable_prefix_caching:
            raise InvalidRequestError(
                "pinning needs the prefix cache; enable_prefix_caching is off", param="name"
            )
        size = self.config.cache.block_size
        num_blocks = len(tokens) // size
        if num_blocks == 0:
            raise InvalidRequestError(
                f"prefix {name!r} has {len(tokens)} tokens; the smallest that can be shared is one "
                f"block of {size}",
                param="prompt",
            )
        self._check_pin_fits(name, num_blocks)
        return num_blocks

    def unpin(self, name: str) -> Pin:
        return self.prefix.unpin(name)

    def abort(self, request: int, *, index: int | None = None) -> dict[Phase, Totals] | None:
        """Drop a request, or its answer ``index``; what has just ended by itself is ignored.

        Returns the request's costs if nothing of it is left.
        """
        live = self._live.get(request)
        if live is None:
            return None
        for sequence in [s for s in live if index is None or s.index == index]:
            live.remove(sequence)
            self.scheduler.abort(sequence)
        return self._close(request) if not live else None

    def sequence(self, request: int, *, index: int = 0) -> Sequence:
        """A live answer's state, for reading only."""
        return next(s for s in self._live[request] if s.index == index)

    def is_waiting(self, request: int) -> bool:
        """Whether it is queued and nothing of it runs or ran in the latest step."""
        live = self._live.get(request, ())
        return bool(live) and all(sequence.status is Status.WAITING for sequence in live)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def count_visits(self) -> None:
        """From now on GPU kernels count the pairs and bytes they visit; a CPU's always do."""
        self._batch.counting = True

    # -- a step -----------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Run one step over whatever is queued or running."""
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        if not plan.work:
            return []
        batch = self._batch.build(plan)
        with self.runner.stopwatch as forwarded:
            hidden = self.runner.forward(batch)
            logits = self.runner.logits(hidden[batch.logit_rows])
        self._score_prompts(batch, hidden)
        tokens, logprobs = sample(logits, batch.sampled)
        rows = self._rows(plan, batch)
        done = self.scheduler.commit(plan, tokens)
        self.kv.copy(done.copies)
        device_seconds = forwarded.seconds()
        self._num_steps += 1
        self.ledger.append(
            StepRecord(
                step=self._num_steps,
                rows=rows,
                host_seconds=time.perf_counter() - begin - device_seconds,
                device_seconds=device_seconds,
                num_preempted=len(plan.preempted),
                blocks_owned=self.pool.num_owned,
                blocks_cached=self.pool.num_cached,
            )
        )
        events = [self._pinned(sequence) for sequence in done.prefixes]
        for (sequence, token), scores in zip(done.tokens, logprobs, strict=True):
            events.append(self._event(sequence, token, scores))
        return events

    def _event(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        request, ended = sequence.request, sequence.finish_reason is not None
        if ended:
            self._live[request].remove(sequence)
        elif sequence.grammar is not None:
            sequence.grammar.advance(token)
        first = sequence.num_generated == 1 and sequence.index == 0
        wants_prompt = first and sequence.sampling.prompt_logprobs is not None
        return TokenEvent(
            request,
            token,
            sequence.finish_reason,
            sequence.num_cached_prompt,
            sequence.index,
            logprobs,
            sequence.prompt_logprobs if wants_prompt else None,
            self._close(request) if ended and not self._live[request] else None,
        )

    def _pinned(self, sequence: Sequence) -> TokenEvent:
        name, tokens = self._prefixes[sequence.request]
        self.prefix.pin(name, tokens, sequence.blocks, salt=sequence.salt)
        self.scheduler.release(sequence)
        totals = self._close(sequence.request)
        return TokenEvent(
            sequence.request, None, FinishReason.PREFIX, sequence.num_cached_prompt, costs=totals
        )

    def _close(self, request: int) -> dict[Phase, Totals]:
        del self._live[request]
        self._prefixes.pop(request, None)
        return self.ledger.close(request)

    def _score_prompts(self, batch: StepBatch, hidden: Tensor) -> None:
        for scored in batch.scored:
            sequence = scored.sequence
            for start in range(scored.start, scored.end, SCORED_ROWS):
                rows = hidden[start : min(start + SCORED_ROWS, scored.end)]
                first = len(sequence.prompt_logprobs) + 1
                tokens = torch.tensor(sequence.tokens[first : first + len(rows)]).to(rows.device)
                wanted = [sequence.sampling.prompt_logprobs] * len(rows)
                scores = token_logprobs(self.runner.logits(rows).float(), tokens, wanted)
                sequence.prompt_logprobs += [score for score in scores if score is not None]

    def _rows(self, plan: StepPlan, batch: StepBatch) -> NDArray[np.void]:
        """Predictions from lengths, beside what the kernels counted."""
        c = self.model_config
        rows = np.zeros(len(plan.work), dtype=ROW)
        counts = batch.meta.counts.cpu().numpy()
        size = self.config.cache.block_size
        per_token = costs.kv_bytes_per_token(c, self.kv.layers[0].k.element_size())
        for row, item in zip(rows, plan.work, strict=True):
            sequence = item.sequence
            context = sequence.num_computed + item.num_new
            first = sequence.num_computed == sequence.num_cached
            row["request"] = sequence.request
            row["phase"] = item.phase
            row["new_tokens"] = item.num_new
            row["context"] = context
            row["cached_tokens"] = sequence.num_cached if first else 0
            row["chunks"] = item.num_chunks
            row["pairs"] = costs.causal_pairs(item.num_new, context)
            row["kv_bytes_written"] = item.num_new * per_token
            row["kv_bytes_read"] = context * per_token
            row["kv_bytes_stored"] = costs.blocks_for(context, size) * size * per_token
            row["kv_bytes_allocated"] = len(sequence.blocks) * size * per_token
        pairs, rest = np.divmod(counts[:, AttnMeta.PAIRS], c.num_layers * c.num_heads)
        assert not rest.any(), "layers or heads disagree on the pairs they visited"
        rows["pairs_counted"] = pairs
        rows["kv_bytes_written_counted"] = counts[:, AttnMeta.KV_BYTES_WRITTEN]
        rows["kv_bytes_read_counted"] = counts[:, AttnMeta.KV_BYTES_READ]
        return rows

    # -- admission --------------------------------------------------------------------------

    def _queue(self, answers: list[Sequence]) -> int:
        request = answers[0].request
        self.scheduler.add(answers[0])  # its forks join when its prompt is computed
        self._live[request] = answers
        self._num_requests += 1
        return request

    def _check_ids(self, ids: Tokens[int], param: str) -> None:
        vocab_size = self.model_config.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise InvalidRequestError(
                f"token id {wrong} is outside the vocabulary of {vocab_size}", param=param
            )

    def _check_prompt(self, tokens: Tokens[int]) -> None:
        if not tokens:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if len(tokens) >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; the context holds {self.max_model_len} and "
                f"needs room for at least one more",
                param="prompt",
            )

    def _max_tokens(self, num_prompt: int, asked: int | None) -> int:
        if asked is not None:
            if num_prompt + asked > self.max_model_len:
                raise ContextLengthError(
                    f"prompt of {num_prompt} tokens plus max_tokens {asked} exceeds the context of "
                    f"{self.max_model_len}",
                    param="max_tokens",
                )
            return asked
        # The last token is never fed, so it needs no place in the pool.
        pool = self.scheduler.num_usable_blocks * self.config.cache.block_size + 1
        return max(min(self.max_model_len, pool) - num_prompt, 1)

    def _check_pin_fits(self, name: str, num_blocks: int) -> None:
        size = self.config.cache.block_size
        coming = sum(len(tokens) // size for _, tokens in self._prefixes.values())
        total = self.prefix.num_pinned_blocks + coming + num_blocks
        limit = self.max_pinned_blocks
        if total > limit:
            raise InvalidRequestError(
                f"prefix {name!r} needs {num_blocks} blocks; pinned prefixes would hold {total} of "
                f"at most {limit} (pin_memory_fraction of the pool)",
                param="name",
            )
        room = self.pool.num_blocks - self.scheduler.num_needed_blocks
        if total > room:
            raise InvalidRequestError(
                f"prefix {name!r} needs {num_blocks} blocks; a running request may need all but "
                f"{room} of the pool",
                param="name",
            )
