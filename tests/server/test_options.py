from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stairs.cli import app
from stairs.config import EngineConfig
from stairs.errors import ConfigError
from stairs.server.options import ServeOptions, load_options


def test_a_flag_beats_the_environment_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nmax-queue = 2\nmax_num_seqs = 3\nprefix = ["a=b", "c=d"]\n')
    environment = {"STAIRS_PORT": "10", "STAIRS_MAX_QUEUE": "20", "STAIRS_API_KEY": "x, y"}
    options = load_options({"port": 100}, environment, file=file)
    assert (options.port, options.max_queue, options.max_num_seqs) == (100, 20, 3)
    assert options.prefix == ("a=b", "c=d") and options.api_key == ("x", "y")
    assert options.block_size == ServeOptions().block_size


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot = 1", "'prot'"),
        ("port = '1'", "port must be a int"),
        ("port = true", "port must be a int"),
        ("prefix = [1]", "prefix must be a tuple"),
        ("port = ", "--config"),
        ("log-level = 'loud'", "--log-level"),
        ("port = 99999", "--port"),
        ("prefix = 'a'", "--prefix"),
        ("prefix-raw = '=b'", "--prefix-raw"),
        ("api-key = ''", "--api-key"),
        ("attention-backend = 'x'", "--attention-backend"),
        ("device = 'tpu'", "--device"),
    ],
)
def test_a_wrong_file_is_told_by_its_key(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_options({}, {}, file=file)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("STAIRS_PORT", "x"), ("STAIRS_ENABLE_PREFIX_CACHING", "maybe"), ("STAIRS_MAX_QUEUE", "-1")],
)
def test_a_wrong_variable_is_told_by_its_name(variable: str, value: str) -> None:
    wrong = variable if value != "-1" else "--max-queue"
    with pytest.raises(ConfigError, match=wrong):
        load_options({}, {variable: value})


def test_values_of_variables() -> None:
    options = load_options(
        {}, {"STAIRS_ENABLE_PREFIX_CACHING": "no", "STAIRS_DRAIN_TIMEOUT": "1.5"}
    )
    assert options.enable_prefix_caching is False and options.drain_timeout == 1.5


def test_every_option_is_a_flag_and_reaches_the_engine() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {option for parameter in command.params for option in parameter.opts}
    for option in fields(ServeOptions):
        name = option.name.replace("_", "-")
        assert f"--{name}" in flags or option.name == "model"
    engine = ServeOptions(max_num_seqs=3, block_size=32, num_gpu_blocks_override=9, seed=4).engine
    assert (engine.max_num_seqs, engine.cache.block_size) == (3, 32)
    assert (engine.cache.num_blocks, engine.seed) == (9, 4)


def test_no_option_of_the_engine_is_missing() -> None:
    """Whatever an engine can be told, a server can: with another value than the default."""
    other = {
        field.name: not field.default if isinstance(field.default, bool) else 1
        for field in fields(EngineConfig)
        if isinstance(field.default, bool)
    }
    assert other  # booleans are told by their names alone
    for name, value in other.items():
        assert getattr(ServeOptions(**{name: value}).engine, name) is value
    options = ServeOptions(device="cpu", gpu_memory_utilization=0.5, pin_memory_fraction=0.1)
    assert (options.engine.device, options.engine.gpu_memory_utilization) == ("cpu", 0.5)
    assert options.engine.cache.pin_memory_fraction == 0.1


def test_a_missing_file_is_one_line() -> None:
    result = CliRunner().invoke(app, ["serve", "--config", "/nowhere.toml"])
    assert isinstance(result.exception, ConfigError)
    assert "/nowhere.toml" in str(result.exception)
