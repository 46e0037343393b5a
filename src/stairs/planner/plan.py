"""From a config and a question to a plan: what fits, what it costs, what to change.

``make_plan`` is pure arithmetic over the config, a device's row and (on a CPU) the memory that is
free; nothing of the model is loaded. ``evaluate`` is the part that targets ask again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stairs.accounting.hardware import Device, find_device
from stairs.config import EngineConfig, ModelConfig
from stairs.errors import ConfigError
from stairs.planner.memory import Memory, plan_memory, plan_weights, users_that_fit
from stairs.planner.options import PlanOptions
from stairs.planner.phases import Setting, time_per_token, time_to_first_token
from stairs.planner.timing import default_model, roofline

__all__ = ["BUDGETS", "Answer", "Budget", "Plan", "evaluate", "make_plan", "recommend_budget"]

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # in chunks


@dataclass(frozen=True, slots=True)
class Answer:
    """What targets are held against. ``users``: that fit, sharing the system prompt. ``ttft``:
    of a prompt that fills the context, its system prompt cached, beside the other users' decodes.
    ``tpot``: all users decoding with a chunk aboard. Seconds."""

    memory: Memory
    setting: Setting
    users_apart: int
    users: int
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Budget:
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    origin: str
    config: ModelConfig
    types: Mapping[str, str] | None
    options: PlanOptions
    answer: Answer
    budget: Budget


def make_plan(
    config: ModelConfig,
    options: PlanOptions,
    *,
    name: str,
    origin: str,
    types: Mapping[str, str] | None = None,
) -> Plan:
    """``types``: of a file's matrices, see ``checkpoints.residence``; None: the config's dtype."""
    answer = evaluate(config, options, types=types)
    budget = recommend_budget(answer.setting, options)
    return Plan(name, origin, config, types, options, answer, budget)


def evaluate(
    config: ModelConfig,
    options: PlanOptions,
    *,
    types: Mapping[str, str] | None = None,
    devices: int = 1,
) -> Answer:
    """``devices`` of a kind split weights, K/V and work evenly; what they say to each other is
    left out, so times are then a bound."""
    device = find_device(options.gpu)
    context = _context(config, options)
    dtype = _dtype(config, options, device)
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    asked = options.users or int(options.targets.get("users", 0))
    rows = max(asked, EngineConfig().max_num_seqs)
    setting = Setting(
        config=config,
        device=device,
        model=default_model(device, dtype),
        weights=plan_weights(config, types, device=device, dtype=dtype),
        dtype=dtype,
        kv_dtype=kv_dtype,
        context=context,
        shared=options.system_prompt_tokens,
        batch=1,
        budget=options.max_num_batched_tokens,
        chunk=options.prefill_chunk_size,
        block_size=options.block_size,
    )
    memory = plan_memory(
        config,
        device,
        weights=setting.weights,
        dtype=dtype,
        step_tokens=options.max_num_batched_tokens + rows,
        max_num_seqs=rows,
        utilization=options.gpu_memory_utilization,
        most_kv=rows * setting.kv_bytes(context),
        devices=devices,
    )
    apart, sharing = (
        users_that_fit(
            config,
            memory.pool_bytes,
            context=context,
            kv_itemsize=setting.kv_itemsize,
            block_size=options.block_size,
            shared=shared,
        )
        for shared in (0, options.system_prompt_tokens)
    )
    batch = max(1, min(asked or EngineConfig().max_num_seqs, sharing))
    setting = replace(setting, batch=batch)
    cached = setting.cached_prompt
    return Answer(
        memory=memory,
        setting=setting,
        users_apart=apart,
        users=sharing,
        ttft=time_to_first_token(setting, context, cached=cached, beside=batch - 1) / devices,
        tpot=time_per_token(setting, batch=batch, chunk=True) / devices,
    )


def _context(config: ModelConfig, options: PlanOptions) -> int:
    limit = config.max_position_embeddings
    context = options.max_model_len or limit
    if context > limit:
        raise ConfigError(
            f"max_model_len {context} exceeds the model's {limit} positions", param="max_model_len"
        )
    if options.system_prompt_tokens >= context:
        raise ConfigError(
            f"system_prompt_tokens {options.system_prompt_tokens} leaves nothing of "
            f"max_model_len {context}",
            param="system_prompt_tokens",
        )
    return context


def _dtype(config: ModelConfig, options: PlanOptions, device: Device) -> str:
    """auto: fp32 on a CPU, as the engine does; 16 bit on a GPU."""
    if options.dtype != "auto":
        return options.dtype
    if device.is_cpu:
        return "float32"
    return config.dtype if config.dtype in ("bfloat16", "float16") else "bfloat16"


def recommend_budget(setting: Setting, options: PlanOptions) -> Budget:
    """Prompt tokens a step: what a target asks, else the fewest that hide reading the weights."""
    sizes = [setting.chunk * n for n in BUDGETS if setting.chunk * n < 2 * setting.context]
    sizes = sizes or [setting.chunk]
    cached, beside = setting.cached_prompt, setting.batch - 1
    if "ttft" in options.targets:
        for size in sizes:
            ttft = time_to_first_token(
                replace(setting, budget=size), setting.context, cached=cached, beside=beside
            )
            if ttft <= options.targets["ttft"]:
                return Budget(size, "the smallest whose first token meets the target")
    elif "tpot" in options.targets:
        fitting = [
            size
            for size in sizes
            if time_per_token(replace(setting, budget=size), batch=setting.batch, chunk=True)
            <= options.targets["tpot"]
        ]
        if fitting:
            return Budget(fitting[-1], "the largest that keeps the time per token on target")
    for size in sizes:
        cost = setting.step([(min(size, setting.context), setting.context)], logits_rows=1)
        if roofline(cost, setting.device, "linear")[0] == "compute":
            reason = (
                "the fewest prompt tokens whose arithmetic hides reading the weights: fewer would "
                "read them as often for less work, more only delay the others' next token"
            )
            return Budget(size, reason)
    return Budget(sizes[-1], "no step that fits the context hides reading the weights: the largest")
