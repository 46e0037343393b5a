"""The command line as a user meets it: what goes where, how mistakes end, how Ctrl-C does."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import stairs
import stairs.compare
from stairs import LLM, SamplingParams
from stairs.cli import _stoppable, main
from tiny_folder import CONFIG, write_tiny_folder

ROOT = Path(__file__).parent.parent


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`stairs ARGUMENTS` in this process."""

    def stairs_command(*arguments: str | Path, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["stairs", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main()
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return stairs_command


def spawn(*arguments: str | Path) -> subprocess.Popen[bytes]:
    code = "from stairs.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"stairs {stairs.__version__}\n", "")
    help_text = run("--help").out
    for command in ("generate", "chat", "pull", "compare"):
        assert command in help_text


def test_generate_writes_the_text_and_nothing_else(run: Run, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    (output,) = LLM(str(folder)).generate(["Once upon"], params)
    options = ("--model", folder, "--temperature", "0", "--max-tokens", "12")
    expected = (0, output.outputs[0].text + "\n", "")
    assert run("generate", "Once upon", *options) == expected
    assert run("generate", *options, stdin=b"Once upon\n") == expected


def test_generate_options_reach_the_sampler(run: Run, folder: Path) -> None:
    options = ("--model", folder, "--max-tokens", "24")
    hot = ("--temperature", "5")
    seeded = [run("generate", "a", *options, *hot, "--seed", seed).out for seed in "778"]
    assert seeded[0] == seeded[1] != seeded[2]
    greedy = run("generate", "a", *options, "--temperature", "0").out
    assert run("generate", "a", *options, *hot, "--top-k", "1").out == greedy
    assert run("generate", "a", *options, *hot, "--top-p", "1e-9").out == greedy
    cut = greedy[6:8]
    stopped = run("generate", "a", *options, "--temperature", "0", "--stop", cut).out
    assert stopped == greedy[: greedy.index(cut)] + "\n"


def test_verbose_prints_each_part_on_stderr(run: Run, folder: Path) -> None:
    options = ("--model", folder, "--temperature", "0", "--max-tokens", "4")
    quiet = run("generate", "hello", *options)
    loud = run("generate", "hello", *options, "-v")
    assert (loud.code, loud.out) == (quiet.code, quiet.out)
    timed = re.findall(r"^(\S+(?: \S+)?) +[\d.]+ (?:s|ms)\b", loud.err, re.M)
    assert timed == [
        "import", "open", "weights", "warm-up", "prefill", "first token", "decode",
    ]  # fmt: skip


def test_chat_reads_lines_and_remembers(run: Run, folder: Path, tmp_path: Path) -> None:
    system = tmp_path / "system.txt"
    system.write_text("Be brief.\n")
    options = ("--system", system, "--temperature", "0", "--max-tokens", "5")
    done = run("chat", folder, *options, stdin=b"one\n\ntwo\n/new\none\n/exit\nnever\n")
    assert (done.code, done.err) == (0, "")

    llm = LLM(str(folder))
    params = SamplingParams(temperature=0, max_tokens=5)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    first = llm.chat(talk, params)[0].outputs[0].text
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    second = llm.chat(talk, params)[0].outputs[0].text
    assert done.out == f"{first}\n{second}\n{first}\n"


def test_chat_goes_on_after_a_message_that_is_too_long(run: Run, folder: Path) -> None:
    long = b"x" * 5000
    done = run("chat", folder, "--max-tokens", "3", stdin=b"hi\n" + long + b"\nhi\n")
    assert done.code == 0
    assert done.err.startswith("stairs: ") and "/new" in done.err
    assert done.err.count("\n") == 1


def test_ctrl_c_ends_an_answer_between_two_steps() -> None:
    closed = []

    def events() -> Iterator[int]:
        try:
            for i in range(10):
                if i == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                yield i
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGINT)
    with _stoppable(events()) as until_stopped:  # type: ignore[arg-type, var-annotated]
        assert list(until_stopped) == [0, 1, 2]
    assert closed and signal.getsignal(signal.SIGINT) is before


def test_pull_prints_where_the_model_lies(run: Run, folder: Path) -> None:
    assert run("pull", folder) == (0, f"{folder}\n", "")


def test_compare_prints_its_tables(run: Run, folder: Path, tmp_path: Path) -> None:
    system = tmp_path / "system.txt"
    system.write_text("Be brief. " * 20)
    done = run("compare", folder, "--system", system, "--max-tokens", "3")
    assert (done.code, done.err) == (0, "")
    assert "Prefill" in done.out and "Decode" in done.out
    assert done.out.splitlines()[-1].startswith("L²·D → L·D")


def test_compare_fails_loudly_when_tokens_differ(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object, **__: object) -> Iterator[str]:
        yield "one line"
        raise stairs.compare.DifferentTokensError("pinned gave [1], not [2]")

    monkeypatch.setattr(stairs.compare, "compare", wrong)
    assert run("compare", folder) == (1, "one line\n", "stairs: pinned gave [1], not [2]\n")


# -- mistakes -----------------------------------------------------------------------------------


def mistake(result: Result) -> str:
    """The one line a user gets, after checking that it is one."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("stairs: ") and result.err.count("\n") == 1
    assert "Traceback" not in result.err
    return result.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-tokens", "0"], "max_tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--top-k", "-2"], "top_k"),
        (["--max-tokens", "5000"], "4096"),
        (["--dtype", "int3"], "dtype"),
    ],
)
def test_a_wrong_option_is_named(run: Run, folder: Path, options: list[str], said: str) -> None:
    assert said in mistake(run("generate", "hi", "--model", folder, *options))


def test_wrong_prompts(run: Run, folder: Path) -> None:
    assert "empty" in mistake(run("generate", "", "--model", folder))
    assert "empty" in mistake(run("generate", "--model", folder, stdin=b""))
    assert "UTF-8" in mistake(run("generate", "--model", folder, stdin=b"\xff\xfe"))
    too_long = mistake(run("generate", "x" * 5000, "--model", folder))
    assert "5000" in too_long and "4096" in too_long


def test_wrong_models(run: Run, tmp_path: Path) -> None:
    assert "no-such-model" in mistake(run("generate", "hi", "--model", "./no-such-model.gguf"))

    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert "truncated" in mistake(run("generate", "hi", "--model", truncated))

    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(b"GGUF\x03\x00\x00\x00" + (2**40).to_bytes(8, "little") + bytes(8))
    assert "tensor" in mistake(run("generate", "hi", "--model", hostile))

    keyless = write_tiny_folder(tmp_path / "keyless")
    config = {key: value for key, value in CONFIG.items() if key != "num_attention_heads"}
    (keyless / "config.json").write_text(json.dumps(config))
    assert "num_attention_heads" in mistake(run("generate", "hi", "--model", keyless))


def test_a_wrong_file_or_command_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    for arguments in (["chat", "--system", str(tmp_path / "none")], ["comparr"], ["chat", "--no"]):
        done = run(*arguments)
        assert done.code == 2 and done.out == ""
        assert "Traceback" not in done.err


# -- signals and pipes --------------------------------------------------------------------------


def test_ctrl_c_is_quiet_and_130(folder: Path) -> None:
    process = spawn("generate", "hi", "--model", str(folder), "--max-tokens", "4000", "--seed", "1")
    assert process.stdout and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


def test_a_closed_pipe_is_quiet(folder: Path) -> None:
    process = spawn("generate", "hi", "--model", str(folder), "--max-tokens", "4000", "--seed", "1")
    assert process.stdout and process.stdout.read(1)
    process.stdout.close()
    assert process.stderr and process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) != 0
