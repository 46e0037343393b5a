"""Damage model files at random and open them: only our own errors, never a large allocation.

    python tests/checkpoints/fuzz.py [SECONDS] [SEED]

Runs with its address space capped at what it uses plus 100 MB, so that an allocation beyond that
raises MemoryError, which is a finding like any other. Prints the seed that repeats a finding.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "src")]

from checkpoints.model_files import (  # noqa: E402
    CONFIG_JSON,
    METADATA,
    seeded_tensors,
    write_folder,
    write_tiny_gguf,
)
from stairs.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from stairs.checkpoints.gguf_tensors import GGUFTensors  # noqa: E402, F401 - torch, before the cap
from stairs.checkpoints.safetensors import SafetensorsFolder  # noqa: E402, F401
from stairs.errors import StairsError  # noqa: E402
from stairs.text.vocabulary import backend_from_gguf  # noqa: E402

SPARE_BYTES = 100 * 2**20
NUMBERS = (0, 1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
VALUES = (
    None, True, False, 0, -1, 1, 3, 2**40, 10**400, 0.0, -1.5, 1e308, "", "x", "llama", [], [0], {},
    [[]], {"rope_type": "llama3"}, {"rope_type": "yarn", "factor": 1e-9}, ["full_attention"],
    "∞" * 50,
)  # fmt: skip
TOKENS = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(93))]
VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [-float(i) for i in range(96)],
    "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 93],
    "tokenizer.chat_template": "{{ messages }}",
}


def damage(data: bytes, rng: random.Random, *, header: int) -> bytes:
    """A few bytes, numbers or ranges changed, most often within the header."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(min(header, len(changed)) if rng.random() < 0.9 else len(changed))
        kind = rng.randrange(6)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            width = rng.choice((4, 8))
            number = rng.choice(NUMBERS) % 2 ** (8 * width)
            changed[at : at + width] = number.to_bytes(width, "little")
        elif kind == 3:
            del changed[at : at + rng.choice((1, 4, 8, 100))]
        elif kind == 4:
            changed[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
        else:
            del changed[at:]
        if not changed:
            return b""
    return bytes(changed)


def damage_json(raw: dict, rng: random.Random) -> bytes:
    """Values and keys exchanged, then perhaps bytes."""
    changed = dict(raw)
    for _ in range(rng.choice((1, 1, 2, 5))):
        key = rng.choice([*changed, "rope_scaling", "head_dim", "layer_types", "generation"])
        if rng.random() < 0.2:
            changed.pop(key, None)
        else:
            changed[key] = rng.choice(VALUES)
    text = json.dumps(changed).encode()
    return damage(text, rng, header=len(text)) if rng.random() < 0.3 else text


def targets(folder: Path) -> dict[str, Callable[[random.Random], Path]]:
    """Each writes one damaged checkpoint below ``folder`` and returns its path."""
    whole = folder / "whole"
    whole.mkdir()
    gguf = write_tiny_gguf(whole / "m.gguf", metadata=METADATA | VOCABULARY).read_bytes()
    one = write_folder(folder / "one", seeded_tensors())
    several = write_folder(folder / "several", seeded_tensors(), num_files=2)
    for path in (one, several):
        backend_from_gguf(VOCABULARY).save(str(path / "tokenizer.json"))
    tokenizer_json = (one / "tokenizer.json").read_bytes()
    single = (one / "model.safetensors").read_bytes()
    header = 8 + struct.unpack_from("<Q", single)[0]
    index = several / "model.safetensors.index.json"
    index_json = json.loads(index.read_text())

    def damaged_gguf(rng: random.Random) -> Path:
        path = folder / "damaged.gguf"
        path.write_bytes(damage(gguf, rng, header=5_000))
        return path

    def damaged_safetensors(rng: random.Random) -> Path:
        (one / "model.safetensors").write_bytes(damage(single, rng, header=header))
        (one / "config.json").write_text(json.dumps(CONFIG_JSON))
        return one

    def damaged_config(rng: random.Random) -> Path:
        (one / "model.safetensors").write_bytes(single)
        (one / "config.json").write_bytes(damage_json(CONFIG_JSON, rng))
        (one / "generation_config.json").write_bytes(damage_json({"eos_token_id": 2}, rng))
        return one

    def damaged_index(rng: random.Random) -> Path:
        changed = index_json | {"weight_map": dict(index_json["weight_map"])}
        for key in rng.sample(sorted(changed["weight_map"]), 2):
            changed["weight_map"][key] = rng.choice((*VALUES, "../x.safetensors", "y.safetensors"))
        index.write_bytes(
            json.dumps(changed).encode() if rng.random() < 0.5 else damage_json(index_json, rng)
        )
        return several

    def damaged_tokenizer(rng: random.Random) -> Path:
        path = folder / "tokenizer"
        write_folder(path, {})
        (path / "model.safetensors").write_bytes(single)
        (path / "tokenizer.json").write_bytes(
            damage(tokenizer_json, rng, header=2_000)
            if rng.random() < 0.5
            else damage_json(json.loads(tokenizer_json), rng)
        )
        (path / "tokenizer_config.json").write_bytes(damage_json({"bos_token": "<s>"}, rng))
        return path

    return {
        "gguf": damaged_gguf,
        "safetensors": damaged_safetensors,
        "config.json": damaged_config,
        "index": damaged_index,
        "tokenizer.json": damaged_tokenizer,
    }


def open_all(path: Path) -> None:
    """Open every part; what is damaged only in its weights opens, as it should."""
    import torch

    checkpoint = open_checkpoint(str(path))
    for name in sorted(checkpoint.tensors.names())[:3]:
        checkpoint.tensors.load(name, torch.float32)
    tokenizer = checkpoint.tokenizer()
    tokenizer.decode(tokenizer.encode("t1 t2 </s>"))


def cap_memory() -> None:
    status = Path("/proc/self/statm").read_text().split()
    in_use = int(status[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + SPARE_BYTES,) * 2)


def main(seconds: float, seed: int) -> int:
    counts: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        makers = targets(Path(scratch))
        for make in makers.values():  # libraries load what they load lazily before the cap
            with_errors(lambda make=make: open_all(make(random.Random(0))))
        cap_memory()
        end, case = time.monotonic() + seconds, seed
        while time.monotonic() < end:
            name = list(makers)[case % len(makers)]
            path = makers[name](random.Random(case))
            finding = with_errors(lambda path=path: open_all(path))
            tally = counts.setdefault(name, [0, 0])
            tally[0] += 1
            tally[1] += finding is None
            if isinstance(finding, str):
                print(f"{name}, seed {case}: {finding}")
                return 1
            case += 1
    for name, (tried, opened) in sorted(counts.items()):
        print(f"{name}: {tried} tried, {opened} opened, the others refused by name")
    return 0


def with_errors(work: Callable[[], None]) -> str | StairsError | None:
    """None where it opened, our error where it was refused, a text for anything else."""
    try:
        work()
    except StairsError as error:
        message = str(error)
        return error if "\n" not in message and 5 < len(message) < 600 else f"unclear: {error!r}"
    except BaseException as error:
        import traceback

        return "".join(traceback.format_exception(error)[-3:])
    return None


if __name__ == "__main__":
    arguments = [*sys.argv[1:], "5", "0"]
    sys.exit(main(float(arguments[0]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
