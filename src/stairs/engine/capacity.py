"""What a card's memory goes to: weights and a largest step that were measured, K/V for the rest.

The step is run as it will be: every sequence decoding at full context beside a full load of prompt
chunks, through the model, the logits and the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stairs.accounting import costs
from stairs.attention.meta import AttnMeta
from stairs.attention.work import Cutter
from stairs.cache.paged_kv import PagedKV
from stairs.config import DTYPE_BYTES, EngineConfig, ModelConfig, SamplingParams
from stairs.engine.sampling import sample
from stairs.engine.sequence import Sequence
from stairs.errors import ConfigError
from stairs.models.registry import Model

__all__ = ["Capacity", "make_pool", "measure_capacity", "use_growing_segments"]

# Left free beside the pool: the allocator's rounding, kernels loaded after the measurement, and
# attention's partial results where a step is cut in more pieces than the largest one.
MARGIN_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of one card. ``others``: contexts, libraries and other processes; ``pool`` may be cut
    below what is left by ``kv_cache_memory_bytes`` or the blocks asked for."""

    card: str
    total: int
    usable: int  # total x gpu_memory_utilization
    others: int
    weights: int
    step: int  # activations and workspaces of the largest step
    pool: int
    num_blocks: int
    block_size: int
    note: str = ""

    @property
    def in_use(self) -> int:
        """What the driver will report once the largest step has run."""
        return self.others + self.weights + self.step + self.pool

    def lines(self) -> list[str]:
        """The card, one line a part."""
        tokens = self.num_blocks * self.block_size
        parts = [
            ("weights", self.weights),
            ("largest step, measured", self.step),
            (f"K/V pool, {self.num_blocks} blocks = {tokens} tokens", self.pool),
            ("context, libraries, other processes", self.others),
        ]
        width = max(len(name) for name, _ in parts)
        head = f"{self.card}: {_gib(self.total)}, of which {_gib(self.usable)} may be used"
        rows = [f"  {name:<{width}}  {_gib(size):>10}" for name, size in parts]
        return [head, *rows, *([f"  {self.note}"] if self.note else [])]


def use_growing_segments() -> None:
    """Let torch's allocator grow its segments: steps of ever other sizes otherwise leave holes
    (8 GiB of them after 256 requests to a model of 152k words, 2026-11-29)."""
    setting = "expandable_segments:True"
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or getattr(torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None)
    if change is not None:
        change(setting)


def measure_capacity(
    model: Model,
    cutter: Cutter | None,
    *,
    model_config: ModelConfig,
    config: EngineConfig,
    device: torch.device,
) -> Capacity:
    """Run the largest step over a pool of one block, then size the pool from what is free.

    ``config`` is resolved. Raises ConfigError where the pool asked for, or a single block, does
    not fit beside the weights and the step.
    """
    torch.cuda.synchronize(device)
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        _run_largest_step(model, cutter, model_config=model_config, config=config, device=device)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"a step of {config.max_num_batched_tokens} prompt tokens and {config.max_num_seqs} "
            f"decodes does not fit beside {_gib(weights)} of weights",
            param="max_num_batched_tokens",
        ) from None
    step = torch.cuda.max_memory_allocated(device) - weights + MARGIN_BYTES
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    usable = int(total * config.gpu_memory_utilization)
    cache = config.cache
    per_token = costs.kv_bytes_per_token(model_config, DTYPE_BYTES[cache.dtype])
    block_bytes = cache.block_size * per_token
    room = usable - others - weights - step
    num_blocks = room // block_bytes if cache.num_blocks is None else cache.num_blocks
    if num_blocks < 1 or num_blocks * block_bytes > room:
        raise ConfigError(
            f"{max(num_blocks, 1)} K/V blocks take {_gib(max(num_blocks, 1) * block_bytes)}; "
            f"{_gib(max(room, 0))} are left of {_gib(usable)} (gpu_memory_utilization "
            f"{config.gpu_memory_utilization:g}) after {_gib(weights)} of weights, {_gib(step)} "
            f"for the largest step and {_gib(others)} in use by others",
            param="gpu_memory_utilization" if cache.num_blocks is None else "kv_cache_memory_bytes",
        )
    return Capacity(
        card=torch.cuda.get_device_name(device),
        total=total,
        usable=usable,
        others=others,
        weights=weights,
        step=step,
        pool=num_blocks * block_bytes,
        num_blocks=num_blocks,
        block_size=cache.block_size,
    )


def make_pool(
    num_blocks: int, model_config: ModelConfig, config: EngineConfig, device: torch.device
) -> PagedKV:
    """The K/V tensors of a model under a resolved ``config``."""
    return PagedKV(
        num_blocks,
        config.cache.block_size,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=getattr(torch, config.cache.dtype),
        device=device,
    )


@torch.inference_mode()
def _run_largest_step(
    model: Model,
    cutter: Cutter | None,
    *,
    model_config: ModelConfig,
    config: EngineConfig,
    device: torch.device,
) -> None:
    """All block tables name the one block there is, so that contexts cost no memory."""
    context = config.max_model_len
    assert context is not None
    kv = make_pool(1, model_config, config, device)
    for layer in kv.layers:
        layer.k.zero_()
        layer.v.zero_()
    prompts = max(1, -(-config.max_num_batched_tokens // context))
    num_q = np.full(prompts, min(config.max_num_batched_tokens, context), dtype=np.int64)
    num_q = np.concatenate((num_q, np.ones(config.max_num_seqs, dtype=np.int64)))
    num_kv = np.full(len(num_q), context, dtype=np.int64)
    num_tokens = int(num_q.sum())
    pages = costs.blocks_for(context, config.cache.block_size)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    meta = AttnMeta(
        cu_q=torch.tensor([0, *num_q.cumsum().tolist()], dtype=torch.int32, device=device),
        kv_len=torch.tensor(num_kv, dtype=torch.int32, device=device),
        block_table=torch.zeros((len(num_q), pages), dtype=torch.int32, device=device),
        slots=zeros,
        counts=torch.zeros((len(num_q), 3), dtype=torch.int64, device=device),
        work=cutter(num_q, num_kv) if cutter is not None else (),
        counting=cutter is None,
    )
    hidden = model.forward(zeros, zeros, kv.layers, meta)
    logits = model.logits(hidden[: config.max_num_seqs])
    sampling = SamplingParams(temperature=1.0, top_p=0.9, logprobs=5, frequency_penalty=0.1)
    rows = [_row(sampling) for _ in range(len(logits))]
    sample(logits, tuple(rows))


def _row(sampling: SamplingParams) -> Sequence:
    return Sequence(
        request=0,
        tokens=[0],
        sampling=sampling,
        max_tokens=1,
        stop_ids=frozenset(),
        seed=0,
        salt=None,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
