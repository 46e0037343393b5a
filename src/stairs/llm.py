"""Text in, text out, offline, in this process: vLLM's shape of call and of result.

llm = LLM("smollm2")
llm.pin("support", [{"role": "system", "content": "You are ..."}])
for output in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64)):
    print(output.outputs[0].text, output.num_cached_tokens)
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from stairs.accounting.record import Phase, Totals
from stairs.cache.prefix import Pin
from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.config import AttentionBackend, CacheConfig, DeviceName, EngineConfig, SamplingParams
from stairs.engine.build import build_engine
from stairs.engine.prefix_files import load_prefix, read_prefix_tokens, save_prefix
from stairs.engine.sequence import TokenEvent
from stairs.errors import InvalidRequestError
from stairs.outputs import GrowingOutput, RequestMetrics, RequestOutput, StreamEvent

__all__ = ["LLM"]

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt_token_ids": [...]}
Conversation = Sequence[Message]


class LLM:
    """A model with its tokenizer and an engine in this process.

    ``model`` is an alias (``smollm2``), a ``.gguf`` file, a folder or a hub id; the options carry
    vLLM's names and are described in ``stairs.config``. One thread at a time may call it.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        prefill_chunk_size: int = 128,
        block_size: int = 16,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        attention_backend: AttentionBackend = "auto",
        device: DeviceName = "auto",
        gpu_memory_utilization: float = 0.9,
        batch_invariant: bool = False,
        load_format: str = "auto",
        revision: str | None = None,
        seed: int | None = None,
    ) -> None:
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            prefill_chunk_size=prefill_chunk_size,
            max_num_batched_tokens=max_num_batched_tokens,
            dtype=dtype,
            attention_backend=attention_backend,
            device=device,
            gpu_memory_utilization=gpu_memory_utilization,
            batch_invariant=batch_invariant,
            seed=seed,
            cache=CacheConfig(
                block_size=block_size,
                num_blocks=num_gpu_blocks_override,
                memory_bytes=kv_cache_memory_bytes,
                dtype=kv_cache_dtype,
                enable_prefix_caching=enable_prefix_caching,
            ),
        )
        began = time.perf_counter()
        self.checkpoint = open_checkpoint(model, revision=revision, load_format=load_format)
        self.tokenizer = self.checkpoint.tokenizer()
        opened = time.perf_counter()
        self.engine = build_engine(self.checkpoint.config, self.checkpoint.tensors, config)
        self.load_seconds = {"open": opened - began, "weights": time.perf_counter() - opened}
        self._requests: dict[int, GrowingOutput] = {}

    def warm_up(self) -> None:
        """One step of one token, so that kernels are compiled and threads run before a request's
        clock starts. It stands in the ledger like any other step."""
        self.generate([[0]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))

    # -- generation -------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; all run together. Results come in the order of ``prompts``."""
        return self._collect(self._encode_prompts(prompts), sampling_params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered through the model's chat template."""
        encoded = self._encode_chats(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._collect(encoded, sampling_params)

    def stream(
        self,
        inputs: Prompt | Conversation | Sequence[Prompt] | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamEvent, None, None]:
        """Like ``generate`` or ``chat`` (by what is passed), one event a token as they come.

        Requests are checked before this returns. Closing the iterator aborts what still runs.
        """
        encode = self._encode_chats if _is_chat(inputs) else self._encode_prompts
        encoded = encode(inputs)
        return self._run(self._add(encoded, sampling_params))

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's own metadata recommends, with ``changes``."""
        defaults = self.checkpoint.generation
        recommended = {
            name: value
            for name in ("temperature", "top_p", "top_k")
            if (value := getattr(defaults, name)) is not None
        }
        return SamplingParams(**(recommended | changes))

    # -- prefixes ---------------------------------------------------------------------------

    def pin(self, name: str, prompt: Prompt | Conversation, *, salt: str | None = None) -> Pin:
        """Compute a prefix's K/V ahead and hold it as ``name`` until ``unpin``.

        A conversation is rendered through the chat template, up to where the next message would
        begin. Any later prompt that starts with the same tokens reuses it, named or not.
        """
        tokens = (
            self.tokenizer.encode_chat_prefix(cast(Conversation, prompt))
            if _is_chat(prompt)
            else self._encode(prompt)[1]
        )
        request = self.engine.add_prefix(name, tokens, salt=salt)
        while all(event.request != request for event in self._step()):
            pass
        return self.engine.prefix.pins[name]

    def unpin(self, name: str) -> None:
        self.engine.unpin(name)

    def save_prefix(self, name: str, file: str | Path) -> None:
        """Write a pinned prefix's tokens and K/V to a safetensors file."""
        save_prefix(self.engine, name, file=Path(file))

    def load_prefix(self, name: str, file: str | Path, *, salt: str | None = None) -> Pin:
        """Pin what ``save_prefix`` wrote, without computing it. Raises CheckpointError with the
        reason for a file of another model, dtype or block size, or a damaged one."""
        path = Path(file)
        tokens = read_prefix_tokens(path)
        return load_prefix(self.engine, name, tokens, file=path, salt=salt)

    @property
    def pins(self) -> Mapping[str, Pin]:
        return self.engine.prefix.pins

    # -- inside -----------------------------------------------------------------------------

    def _encode_prompts(self, prompts: Any) -> list[tuple[str | None, list[int]]]:
        single = isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int))
        return [self._encode(prompt) for prompt in ([prompts] if single else prompts)]

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return None, list(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise InvalidRequestError(
                    'a prompt given as a dict needs "prompt" or "prompt_token_ids"', param="prompt"
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt) if prompt else []
        return None, list(prompt)

    def _encode_chats(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[tuple[str | None, list[int]]]:
        single = not messages or isinstance(messages[0], Mapping)
        options = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        return [
            (None, self.tokenizer.encode_chat(conversation, **options))
            for conversation in ([messages] if single else messages)
        ]

    def _add(
        self,
        encoded: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> dict[int, GrowingOutput]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(encoded)
        if len(sampling_params) != len(encoded):
            raise InvalidRequestError(
                f"{len(encoded)} prompts but {len(sampling_params)} sampling_params",
                param="sampling_params",
            )
        added: dict[int, GrowingOutput] = {}
        try:
            for (text, tokens), params in zip(encoded, sampling_params, strict=True):
                arrival = time.monotonic()
                number = self.engine.add(tokens, params)
                output = RequestOutput(str(number), text, tokens, [], RequestMetrics(arrival))
                added[number] = GrowingOutput(
                    output,
                    params,
                    self.tokenizer,
                    prompt_index=len(added),
                    end_answer=partial(self._end_answer, number),
                )
        except Exception:
            # All or none: a bad prompt in a list must not leave the others running.
            for number in added:
                self.engine.abort(number)
            raise
        self._requests |= added
        return added

    def _end_answer(self, number: int, index: int) -> dict[Phase, Totals] | None:
        return self.engine.abort(number, index=index)

    def _collect(
        self,
        encoded: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        requests = self._add(encoded, sampling_params)
        for _ in self._run(requests):
            pass
        return [request.output for request in requests.values()]

    def _run(self, requests: Mapping[int, GrowingOutput]) -> Generator[StreamEvent, None, None]:
        """Step until ``requests`` are done. Events of other iterators' requests wait for them."""
        try:
            while True:
                for request in requests.values():
                    while request.ready:
                        yield request.ready.pop(0)
                if all(request.output.finished for request in requests.values()):
                    return
                self._step()
        finally:
            for number in requests:
                if self._requests.pop(number, None) is not None:
                    self.engine.abort(number)

    def _step(self) -> list[TokenEvent]:
        events = self.engine.step()
        for event in events:
            request = self._requests.get(event.request)
            if request is not None and event.token is not None:
                request.take(event, event.token)
                if request.output.finished:
                    del self._requests[event.request]
        return events


def _is_chat(inputs: Any) -> bool:
    """A conversation, or a list of them: messages are mappings with a role."""
    if isinstance(inputs, str | Mapping) or not inputs:
        return False
    first = inputs[0]
    if isinstance(first, Sequence) and not isinstance(first, str) and first:
        first = first[0]
    return isinstance(first, Mapping) and "role" in first
