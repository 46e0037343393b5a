"""The command line: one function a command, its imports inside so that `--help` is instant.

Answers go to stdout, everything else to stderr. A user's mistake is one line and exit code 2, any
other failure 1, Ctrl-C 130 without a word. No traceback reaches a user.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import stairs
from stairs.config import SamplingParams
from stairs.errors import InvalidRequestError, StairsError
from stairs.server.command import serve

if TYPE_CHECKING:
    from stairs.llm import LLM
    from stairs.outputs import StreamEvent

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve decoder language models with exact attention.",
)

Model = Annotated[
    str, typer.Argument(help="An alias (smollm2), a .gguf file, a folder or a hub id.")
]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="As for the other commands.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this share.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens; 0: all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
KVDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="As --dtype, for K and V.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Context in tokens; default: the model's.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print each part's time.")]
SystemFile = Annotated[
    Path | None,
    typer.Option("--system", exists=True, dir_okay=False, help="A file with the system prompt."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"stairs {stairs.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Default: what stands on stdin.")] = None,
    model: ModelOption = "smollm2",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    verbose: Verbose = False,
) -> None:
    """Continue PROMPT. Only the new text goes to stdout."""
    clock = Clock(verbose=verbose)
    text = _stdin() if prompt is None else prompt
    if not text:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    sampling = _given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
    )
    llm = _load(model, clock, dtype=dtype, revision=revision)
    _write(llm.stream([text], llm.default_sampling_params(**sampling)), clock)


@app.command()
def chat(
    model: Model = "smollm2",
    system: SystemFile = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    verbose: Verbose = False,
) -> None:
    """Talk with MODEL. Ctrl-C stops an answer; /new forgets the talk; /exit ends it."""
    clock = Clock(verbose=verbose)
    sampling = _given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    llm = _load(model, clock, dtype=dtype, revision=revision)
    params = llm.default_sampling_params(**sampling)
    start = [{"role": "system", "content": _read(system)}] if system else []
    talk = list(start)
    for line in _lines(prompt="> "):
        if line == "/exit":
            return
        if line == "/new":
            talk = list(start)
            continue
        talk.append({"role": "user", "content": line})
        try:
            with _stoppable(llm.stream([talk], params)) as events:
                answer = _write(events, clock)
            talk.append({"role": "assistant", "content": answer})
        except InvalidRequestError as error:  # most likely the talk outgrew the context
            talk.pop()
            print(f"stairs: {error} (/new starts over)", file=sys.stderr)


@app.command()
def pull(model: Model = "smollm2", revision: Revision = None) -> None:
    """Fetch MODEL if it is not here yet and print where it lies."""
    from stairs.checkpoints.sources import resolve

    print(resolve(model, revision=revision))


@app.command()
def compare(
    model: Model = "smollm2",
    system: SystemFile = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 12,
) -> None:
    """One greedy request with and without each technique: what each of them saves, and where."""
    from stairs.accounting.table import Table
    from stairs.compare import compare as compare_techniques

    text = _read(system) if system else None
    for part in compare_techniques(model, system=text, max_tokens=max_tokens):
        if isinstance(part, Table):
            print()
            part.print(sys.stdout)
            print()
        else:
            print(part, flush=True)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="config.json, a .gguf, a folder, a hub id or a built-in name.")
    ],
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, l40s, 4090, cpu, ...")] = "auto",
    max_model_len: MaxModelLen = None,
    users: Annotated[int | None, typer.Option(help="Users at once; default: up to 64.")] = None,
    system_prompt_tokens: Annotated[int, typer.Option(help="Shared by all users.")] = 0,
    dtype: Dtype = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As --dtype, or fp8, int8.")] = "auto",
    max_num_batched_tokens: Annotated[int, typer.Option(help="Prompt tokens a step.")] = 512,
    block_size: Annotated[int, typer.Option(help="Tokens of a K/V block.")] = 16,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share we may use.")] = 0.9,
    target: Annotated[
        list[str] | None, typer.Option(help="ttft=0.5s, tpot=30ms or users=200; repeatable.")
    ] = None,
    revision: Revision = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Print the pictures as SVG.")] = False,
) -> None:
    """What fits and what it costs, before a byte of MODEL is loaded."""
    from stairs.planner import command
    from stairs.planner.options import PlanOptions, parse_targets

    if json and svg:
        raise InvalidRequestError("--json and --svg exclude each other", param="svg")
    options = PlanOptions(
        gpu=gpu,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        users=users,
        system_prompt_tokens=system_prompt_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        targets=parse_targets(target or ()),
    )
    planned = command.plan_model(model, options, revision=revision)
    if json or svg:
        print(command.plan_as_json(planned) if json else command.plan_as_svg(planned), end="")
    else:
        command.print_plan(planned, sys.stdout)


app.command()(serve)


@app.command()
def env() -> None:
    """Print what a bug report needs: versions, machine, devices, variables."""
    from stairs.environment import describe

    print(describe())


@app.command()
def verify(
    model: Model = "smollm2",
    dtype: Dtype = "auto",
    kv_cache_dtype: KVDtype = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a few requests on MODEL and hold what was planned against what was counted."""
    from stairs.llm import LLM
    from stairs.planner.verify import standard_rounds
    from stairs.planner.verify import verify as verify_engine

    llm = LLM(model, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    rounds, pinned = standard_rounds(llm.engine.model_config.vocab_size, llm.engine.max_model_len)
    verdict = verify_engine(llm.engine, rounds, pinned=pinned)
    if json:
        from stairs.accounting.table import dumps

        print(dumps([verdict.table()]))
    else:
        verdict.table().print(sys.stdout)
    if not verdict.holds:
        raise typer.Exit(1)


# -- what the commands share --------------------------------------------------------------------


class Clock:
    """With ``verbose``, prints each part's time on stderr; the first began with the process."""

    def __init__(self, *, verbose: bool) -> None:
        self.verbose = verbose
        self.began = self.last = time.perf_counter() - _process_age()

    def part(self, name: str, seconds: float | None = None) -> None:
        """What ended now, or took ``seconds`` since the part before it."""
        end = time.perf_counter() if seconds is None else self.last + seconds
        self.say(f"{name:12} {end - self.last:7.3f} s")
        self.last = end

    def say(self, line: str) -> None:
        if self.verbose:
            print(line, file=sys.stderr, flush=True)


def _process_age() -> float:
    """Seconds since this process started, where the system tells (Linux), else 0."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")")[-1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def _load(model: str, clock: Clock, **options: Any) -> LLM:
    from stairs.llm import LLM

    clock.part("import")
    llm = LLM(model, **options)
    for name, seconds in llm.load_seconds.items():
        clock.part(name, seconds)
    llm.warm_up()
    clock.part("warm-up")
    if clock.verbose:
        from stairs.planner.cards import startup_table

        engine = llm.engine
        card = startup_table(engine.model_config, engine.config, name=model, weights=engine.weights)
        card.print(sys.stderr, units="both")
    return llm


def _given(**options: Any) -> dict[str, Any]:
    """The sampling options that were given, checked before a model is loaded for them."""
    chosen = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**chosen)
    return {"max_tokens": None} | chosen


def _write(events: Iterable[StreamEvent], clock: Clock) -> str:
    """Write the text as it comes and a newline at its end; returns the text."""
    clock.last = time.perf_counter()
    pieces: list[str] = []
    for event in events:
        if not pieces:
            clock.part("prefill")
            clock.say(f"first token  {clock.last - clock.began:7.3f} s after the start")
        pieces.append(event.delta)
        print(event.delta, end="", flush=True)
    print(flush=True)
    if len(pieces) > 1:
        each = (time.perf_counter() - clock.last) / (len(pieces) - 1)
        clock.say(f"decode       {each * 1000:7.1f} ms a token, {len(pieces)} tokens")
    return "".join(pieces)


@contextmanager
def _stoppable(
    events: Generator[StreamEvent, None, None],
) -> Iterator[Iterable[StreamEvent]]:
    """``events`` until Ctrl-C: it takes effect between two steps, never inside one."""
    stopped = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield takewhile(lambda _: not stopped.is_set(), events)
    finally:
        signal.signal(signal.SIGINT, before)
        events.close()


def _lines(*, prompt: str) -> Iterator[str]:
    """What the user types, line by line, without the empty ones; ends at end of file."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in _stdin().splitlines() if line.strip())
        return
    import readline  # noqa: F401 - gives input() a history and editing

    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def _stdin() -> str:
    if sys.stdin.isatty():
        raise InvalidRequestError("give a prompt, as an argument or on stdin", param="prompt")
    return _decode(sys.stdin.buffer.read(), "stdin").removesuffix("\n")


def _read(file: Path) -> str:
    try:
        return _decode(file.read_bytes(), str(file)).strip()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {file}: {error.strerror}", param="system") from None


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{source} is not UTF-8 text", param="prompt") from None


def main() -> None:
    try:
        app(prog_name="stairs")
    except StairsError as error:
        print(f"stairs: {error}", file=sys.stderr)
        sys.exit(2 if error.status < 500 else 1)
    except KeyboardInterrupt:
        sys.exit(130)
