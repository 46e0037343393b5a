"""Eight visitors ask a library's help desk at once, and all share one system prompt.

The prompt's K/V are computed ahead and pinned. The eight requests then run in one batch: each
feeds only its own question, and their tokens stream together. `make run` runs this.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from importlib.resources import files
from pathlib import Path

from stairs import LLM, RequestOutput, SamplingParams

QUESTIONS = (
    "What are the opening hours?",
    "On what days is story time?",
    "How long is a reserved item held?",
    "What does printing in black and white cost?",
    "How many computers are there?",
    "Who can get a library card?",
    "What should I bring to get a card?",
    "Is the wireless internet free?",
)
ANSWER = SamplingParams(temperature=0, max_tokens=40)
MIB = 1024 * 1024


def stream(llm: LLM, conversations: list[list[dict[str, str]]]) -> list[RequestOutput]:
    """Show the answers as they grow: a line each, rewritten in place on a terminal; elsewhere each
    is printed when it is done."""
    live, num = sys.stdout.isatty(), len(conversations)
    texts, outputs = [""] * num, {}
    print("\n" * (num if live else 0), end="")
    for event in llm.stream(conversations, ANSWER):
        index = event.prompt_index
        texts[index] += event.delta
        outputs[index] = event.output
        head, text = f"  {index + 1}  ", " ".join(texts[index].split())
        if live:
            up, room = num - index, shutil.get_terminal_size().columns - len(head) - 1
            print(f"\033[{up}A\r\033[K{head}{text[-room:]}\033[{up}B\r", end="", flush=True)
        elif event.finish_reason:
            print(textwrap.fill(head + text, 96, subsequent_indent=" " * len(head)), flush=True)
    return [outputs[i] for i in range(num)]


def show_costs(outputs: list[RequestOutput], *, num_pinned_tokens: int) -> None:
    """One line a request; pairs are (query, key) in one head of one layer."""
    print(
        "    first   per  rows  rows            query-key pairs        K/V MiB\n"
        "    token token cached  fed chunks predicted   counted predicted allocated\n"
        "       ms    ms\n"
        "    ----- ----- ------ ---- ------ --------- --------- --------- ---------"
    )
    total = 0
    for number, output in enumerate(outputs, 1):
        m = output.metrics
        fed = m.prefill.new_tokens + m.decode.new_tokens
        pairs = m.prefill.pairs + m.decode.pairs
        counted = m.prefill.pairs_counted + m.decode.pairs_counted
        total += m.decode.kv_bytes_allocated
        print(
            f"  {number} {m.time_to_first_token * 1000:5.0f} {m.time_per_output_token * 1000:5.1f}"
            f" {output.num_cached_tokens:6} {fed:4} {m.prefill.chunks:6} {pairs:9,} {counted:9,}"
            f" {m.decode.kv_bytes_stored / MIB:9.2f} {m.decode.kv_bytes_allocated / MIB:9.2f}"
        )
    per_token = outputs[0].metrics.prefill.kv_bytes_written / outputs[0].metrics.prefill.new_tokens
    again = per_token * num_pinned_tokens * (len(outputs) - 1)
    print(
        f"  The cached rows stand in each line but are stored once: {(total - again) / MIB:.1f} "
        f"MiB for {len(outputs)},\n  against {total / MIB:.1f} MiB without sharing."
    )


def main() -> None:
    begin = time.perf_counter()
    llm = LLM("smollm2")
    llm.warm_up()
    print(f"smollm2 loaded in {time.perf_counter() - begin:.1f} s")

    text = files("stairs.text").joinpath("system_prompt.txt").read_text(encoding="utf-8")
    desk = {"role": "system", "content": text.strip()}
    begin = time.perf_counter()
    pin = llm.pin("desk", [desk])
    print(
        f"system prompt computed ahead in {time.perf_counter() - begin:.2f} s and pinned: "
        f"{pin.num_pinned_tokens} of its {pin.num_tokens} tokens, the whole blocks of 16"
    )

    print(f"{len(QUESTIONS)} visitors at once:")
    for number, question in enumerate(QUESTIONS, 1):
        print(f"  {number}  {question}")
    print()
    begin = time.perf_counter()
    conversations = [[desk, {"role": "user", "content": question}] for question in QUESTIONS]
    outputs = stream(llm, conversations)
    seconds = time.perf_counter() - begin
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.0f} a second\n")
    show_costs(outputs, num_pinned_tokens=pin.num_pinned_tokens)
    folder = "" if shutil.which("stairs") else f"{os.path.relpath(Path(sys.executable).parent)}/"
    print(
        "\nTry next:\n"
        f"  {folder}stairs compare smollm2   the same request with and without each technique\n"
        f"  {folder}stairs chat smollm2      talk with it\n"
        f"  {folder}python examples/why.py   eight questions, each answered by running it"
    )


if __name__ == "__main__":
    main()
