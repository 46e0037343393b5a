"""The repository keeps its word: API, imports, size, and what the README and the docs say."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import stairs
from stairs.cli import app

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "stairs"
MODULES = sorted(
    ".".join(("stairs", *path.relative_to(SOURCE).with_suffix("").parts))
    for path in SOURCE.rglob("*.py")
    if path.name != "__init__.py"
)
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KERNELS = re.compile(r"/((\w+_)?cpu|triton_\w+|hopper_(kernel|decode))\.py$")

TORCH_FREE_ROOMS = ("accounting", "planner", "text")
TORCH_FREE = [
    "stairs",
    "stairs.cli",
    "stairs.config",
    "stairs.errors",
    "stairs.cache.blocks",
    "stairs.cache.prefix",
    "stairs.checkpoints.configs",
    "stairs.engine.scheduler",
    "stairs.engine.sequence",
    "stairs.server.run",  # the HTTP process: all of server but engine_process
    *(name for name in MODULES if name.split(".")[1] in TORCH_FREE_ROOMS),
]


def test_the_public_names_are_those_of_all() -> None:
    namespace: dict[str, object] = {}
    exec("from stairs import *", namespace)
    public = {name for name in namespace if not name.startswith("__")}
    assert public == set(stairs.__all__)
    for name in stairs.__all__:
        assert getattr(stairs, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = stairs.Llm


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_offers_and_why(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__ and len(module.__doc__.splitlines()) <= 14, "a contract, in ten lines"
    for public in module.__all__:
        assert hasattr(module, public)


def test_torch_free_modules_load_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' loads torch'\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_files_and_functions_stay_short() -> None:
    too_long = []
    for folder in ("src", "scripts", "examples", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if KERNELS.search(name):
                continue
            text = path.read_text()
            if len(text.splitlines()) > 400:
                too_long.append(f"{name}: {len(text.splitlines())} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert node.end_lineno is not None
                    docstring = len((ast.get_docstring(node, clean=False) or "").splitlines())
                    lines = node.end_lineno - node.lineno + 1 - docstring
                    if lines > 60:
                        too_long.append(f"{name}: {node.name} has {lines} lines")
    assert not too_long


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == stairs.__version__
    assert f"## [{stairs.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


# -- what the documents say ---------------------------------------------------------------------


def code_blocks(path: Path, *languages: str) -> Iterator[str]:
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.M | re.S):
        if language in languages:
            yield body


def shell_lines() -> list[str]:
    """Every command of the README and the docs: lines of sh blocks, and `code` that is one."""
    lines = [
        line.removeprefix("$ ").split("  #")[0].strip()
        for path in DOCS
        for body in code_blocks(path, "sh")
        for line in body.splitlines()
    ]
    for path in DOCS:
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
        lines += re.findall(r"`((?:make|stairs|python) [^`]+)`", prose)
    return sorted({line for line in lines if line})


def test_make_targets_in_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {
        target for line in re.findall(r"^\.PHONY: (.*)$", makefile, re.M) for target in line.split()
    }
    named = {word for line in shell_lines() for word in re.findall(r"\bmake ([a-z]+)", line)}
    assert {"run", "test"} <= named <= targets


def test_stairs_commands_in_the_documents_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line for line in shell_lines() if re.search(r"\bstairs [a-z]", line)]
    assert lines
    for line in lines:
        name, *rest = line[re.search(r"\bstairs [a-z]", line).start() :].split()[1:]  # type: ignore[union-attr]
        assert name in commands, line
        known = {option for param in commands[name].params for option in param.opts}
        for option in rest:
            if option.startswith("-"):
                assert option.split("=")[0] in known, line


def test_python_files_in_the_documents_exist() -> None:
    for line in shell_lines():
        for name in re.findall(r"\b[\w/]+\.py\b", line):
            assert (ROOT / name).exists(), line


def test_python_in_the_documents_uses_what_is_there() -> None:
    blocks = [body for path in DOCS for body in code_blocks(path, "python")]
    assert blocks
    for body in blocks:
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), alias.name


def test_links_in_the_documents_lead_somewhere() -> None:
    for path in DOCS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_tree_in_the_readme_is_true() -> None:
    (tree,) = (body for body in code_blocks(ROOT / "README.md", "text") if "src/stairs/" in body)
    parent, named = ROOT, set()
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            parent = ROOT / name
        path = parent / name if line.startswith(" ") else parent
        assert path.exists(), line
        named.add(path)
    rooms = {
        path
        for path in SOURCE.iterdir()
        if (path.is_dir() and path.name != "__pycache__") or path.suffix == ".py"
    }
    assert rooms - {SOURCE / "__init__.py"} <= named


def test_quoted_output_is_what_was_recorded() -> None:
    block = re.compile(r"^```console\n\$ (.*)\n((?:.*\n)*?)```$", re.M)
    quoted = [match.groups() for path in DOCS for match in block.finditer(path.read_text())]
    assert quoted
    lines = (ROOT / "bench" / "records" / "quoted.jsonl").read_text().splitlines()
    newest = {record["command"]: record for record in map(json.loads, lines)}
    for command, output in quoted:
        assert output == newest[command]["output"], command
        assert newest[command]["commit"] and newest[command]["machine"] and newest[command]["date"]


def test_every_test_that_a_document_names_exists() -> None:
    """`tests/room/test_file.py` and `tests/room/test_file.py::test_name`."""
    named = {
        match.groups()
        for path in DOCS
        for match in re.finditer(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", path.read_text("utf-8"))
    }
    assert len(named) > 10
    for file, test in named:
        assert (ROOT / file).exists(), file
        if test:
            assert f"def {test}(" in (ROOT / file).read_text("utf-8"), f"{file}::{test}"
