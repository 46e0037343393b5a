"""Saved prefixes: read back they change nothing; of anything else they are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from harness import DictSource, Tiny, generate, run_all
from stairs.config import SamplingParams
from stairs.engine.core import Engine
from stairs.engine.prefix_files import load_prefix, read_prefix_tokens, save_prefix
from stairs.errors import CheckpointError, InvalidRequestError

PREFIX = [(11 * i) % 200 for i in range(100)]
PROMPT = [*PREFIX, 1, 2, 3]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def pinned(engine: Engine) -> Engine:
    engine.add_prefix("system", PREFIX)
    run_all(engine)
    return engine


@pytest.fixture
def file(tiny_llama: Tiny, tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "system.safetensors"
    save_prefix(pinned(tiny_llama.engine()), "system", file=path)
    return path


def test_a_restart_reads_what_was_computed(tiny: Tiny, tmp_path: Path):
    """The matrix's rows with a prefix from disk: same tokens in float64, nothing recomputed."""
    alone = generate(tiny.engine(enable_prefix_caching=False), PROMPT, SAMPLING)
    path = tmp_path / "system.safetensors"
    save_prefix(pinned(tiny.engine()), "system", file=path)
    for chunk in (16, 128):
        engine = tiny.engine(prefill_chunk_size=chunk)
        generate(engine, [9] * 70, SAMPLING)  # its blocks are not the ones they were saved from
        tokens = read_prefix_tokens(path)
        pin = load_prefix(engine, "again", tokens, file=path)
        assert tokens == PREFIX and pin.num_pinned_tokens == 96
        request = engine.add(PROMPT, SAMPLING)
        sequence = engine.sequence(request)
        assert run_all(engine)[request] == alone
        assert sequence.num_cached_prompt == 96
        assert engine.pool.num_owned == 6


def refusal(engine: Engine, file: Path, tokens: list[int] = PREFIX) -> str:
    free = engine.pool.num_available
    with pytest.raises(CheckpointError) as caught:
        load_prefix(engine, "system", tokens, file=file)
    assert engine.pool.num_available == free and not engine.prefix.pins
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_model_is_refused(tiny_llama: Tiny, file: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = dict(tiny_llama.source.tensors)
    tensors[name] = tensors[name] + 1e-3
    trained = dataclasses.replace(tiny_llama, source=DictSource(tensors))
    assert "is of model" in refusal(trained.engine(), file)
    scaled = dataclasses.replace(tiny_llama.config, rope_theta=5e5)
    assert "is of model" in refusal(dataclasses.replace(tiny_llama, config=scaled).engine(), file)


def test_another_dtype_or_block_size_is_refused(tiny_llama: Tiny, file: Path):
    assert "is of dtype 'float64/float64'" in refusal(tiny_llama.engine(dtype="float32"), file)
    assert "is of block_size '16'" in refusal(tiny_llama.engine(block_size=32), file)


def test_other_tokens_are_refused(tiny_llama: Tiny, file: Path):
    assert "other tokens" in refusal(tiny_llama.engine(), file, [5, *PREFIX[1:]])
    assert "other tokens" in refusal(tiny_llama.engine(), file, PREFIX[:70])
    assert "other tokens" in refusal(tiny_llama.engine(), file, PREFIX + PREFIX)


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -1000])
def test_truncated_files_are_refused(tiny_llama: Tiny, file: Path, keep: int):
    file.write_bytes(file.read_bytes()[:keep])
    assert "cannot be read" in refusal(tiny_llama.engine(), file)


def test_missing_and_misshapen_parts_are_refused(tiny_llama: Tiny, file: Path):
    tensors = load_file(file)
    with safe_open(file, framework="pt") as saved:
        metadata = saved.metadata()
    save_file({n: t for n, t in tensors.items() if n != "v.2"}, file, metadata=metadata)
    assert "lacks v.2" in refusal(tiny_llama.engine(), file)
    save_file(tensors | {"v.2": tensors["v.2"][:-1].contiguous()}, file, metadata=metadata)
    assert "v.2 is" in refusal(tiny_llama.engine(), file)
    save_file(tensors, file)
    assert "is of format None" in refusal(tiny_llama.engine(), file)
    assert "cannot be read" in refusal(tiny_llama.engine(), file.with_name("nowhere"))


def test_a_full_pool_refuses_and_loses_nothing(tiny_llama: Tiny, file: Path):
    engine = tiny_llama.engine(num_blocks=24)
    engine.add([1] * 300, SamplingParams(max_tokens=1))
    engine.step()
    engine.pool.allocate(engine.pool.num_available - 3)
    assert "6 blocks are needed, 3 are free" in refusal(engine, file)


def test_what_cannot_be_pinned_is_the_callers_mistake(tiny_llama: Tiny, file: Path):
    engine = pinned(tiny_llama.engine())
    with pytest.raises(InvalidRequestError, match="already pinned"):
        load_prefix(engine, "system", PREFIX, file=file)
    with pytest.raises(InvalidRequestError, match="no pinned prefix is named 'x'"):
        save_prefix(engine, "x", file=file)


def test_a_failed_save_leaves_the_old_file(tiny_llama: Tiny, file: Path, monkeypatch):
    before = file.read_bytes()

    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("stairs.engine.prefix_files.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_prefix(pinned(tiny_llama.engine()), "system", file=file)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]
    assert torch.equal(load_file(file)["tokens"], torch.tensor(PREFIX, dtype=torch.int32))
