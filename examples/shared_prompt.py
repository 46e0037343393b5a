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
from stairs.accounting.table import Cell, Column, Table, show

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


def cost_table(outputs: list[RequestOutput], *, num_pinned_tokens: int) -> Table:
    """One line a request; pairs are (query, key) in one head of one layer."""
    columns = (
        Column("request"),
        Column("first token", "s", "time", "measured"),
        Column("per token", "s", "time", "measured"),
        Column("rows cached", "", "count", "counted"),
        Column("rows fed", "", "count", "counted"),
        Column("chunks", "", "count", "counted"),
        Column("pairs", "", "count", "predicted"),
        Column("pairs", "", "count", "counted"),
        Column("K/V", "B", "stored bytes", "predicted"),
        Column("K/V allocated", "B", "stored bytes", "counted"),
    )
    rows: list[list[Cell]] = []
    total = 0
    for number, output in enumerate(outputs, 1):
        m = output.metrics
        total += m.decode.kv_bytes_allocated
        rows.append(
            [
                str(number),
                m.time_to_first_token,
                m.time_per_output_token,
                output.num_cached_tokens,
                m.prefill.new_tokens + m.decode.new_tokens,
                m.prefill.chunks,
                m.prefill.pairs + m.decode.pairs,
                m.prefill.pairs_counted + m.decode.pairs_counted,
                m.decode.kv_bytes_stored,
                m.decode.kv_bytes_allocated,
            ]
        )
    per_token = outputs[0].metrics.prefill.kv_bytes_written / outputs[0].metrics.prefill.new_tokens
    again = per_token * num_pinned_tokens * (len(outputs) - 1)
    note = (
        f"The cached rows stand in each line but are stored once: {show(total - again, 'B')} for "
        f"{len(outputs)}, against {show(total, 'B')} without sharing."
    )
    return Table("What each request cost", columns, rows, [note])


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
    cost_table(outputs, num_pinned_tokens=pin.num_pinned_tokens).print(sys.stdout)
    folder = "" if shutil.which("stairs") else f"{os.path.relpath(Path(sys.executable).parent)}/"
    print(
        "\nTry next:\n"
        f"  {folder}stairs compare smollm2   the same request with and without each technique\n"
        f"  {folder}stairs chat smollm2      talk with it\n"
        f"  {folder}python examples/why.py   eight questions, each answered by running it"
    )


if __name__ == "__main__":
    main()
