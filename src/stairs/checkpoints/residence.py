"""How a model's matrices lie in memory: dense, packed as in the file, or both.

One decision, torch-free: ``models.weights`` asks it while it loads, and the planner before. In
float32 on a CPU a kernel makes the values of packed rows in registers, so nothing is unpacked;
where the processor lacks wide vectors a dense copy serves steps of many rows. Elsewhere matrices
are dense, or packed and unpacked a slice at a time where a dense copy may not be held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stairs.accounting.weights import HeldPart, HeldWeights
from stairs.checkpoints.layout import TensorSpec, our_name, tensor_specs
from stairs.config import DTYPE_BYTES, ModelConfig
from stairs.errors import CheckpointError
from stairs.text.json_file import parse_object

if TYPE_CHECKING:
    from stairs.checkpoints.gguf import GGUF
    from stairs.checkpoints.tensors import TensorSource

__all__ = [
    "KERNEL_TYPES",
    "Form",
    "Residence",
    "folder_types",
    "gguf_types",
    "held_weights",
    "is_small",
    "packed_bytes",
    "plain_types",
    "source_types",
]

Form = Literal["dense", "packed", "both"]
# Values and bytes of a block, in the gguf package's words: what the kernel of
# ``models.quantised_cpu`` reads. Written out, because that package loads numpy.
_BLOCKS: Mapping[str, tuple[int, int]] = {
    "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
KERNEL_TYPES = frozenset(_BLOCKS)
_PLAIN: Mapping[str, tuple[int, int]] = {"F32": (1, 4), "F64": (1, 8)}
_KERNEL_BLOCK = {"F16": 32, "BF16": 32}  # values it takes at once; of the others a block of theirs
_LEAST_OUTPUTS = 4
_MAX_HEADER_BYTES = 4 * 2**20
_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """What decides it. ``packed``: a dense copy of the weights may not be held; ``wide_vectors``:
    of the CPU, see ``accounting.hardware.has_wide_vectors``."""

    device: str  # cpu or cuda
    dtype: str
    packed: bool
    batch_invariant: bool
    wide_vectors: bool

    def in_registers(self, kind: str, shape: tuple[int, ...]) -> bool:
        """Whether the kernel multiplies rows (out, in) of this type as they lie."""
        if self.device != "cpu" or self.dtype != "float32" or kind not in KERNEL_TYPES:
            return False
        block = _KERNEL_BLOCK.get(kind) or _BLOCKS[kind][0]
        return shape[1] % block == 0 and shape[0] >= _LEAST_OUTPUTS

    def form(self, matrices: Sequence[tuple[str, tuple[int, ...]]], *, is_table: bool) -> Form:
        """Of matrices that are one product, by type and shape; F32 where rows are not as the file
        has them. A table of embeddings is gathered from, so it needs no copy, nor does a head
        that is the same table."""
        if not all(is_small(kind) for kind, _ in matrices):
            return "dense"
        in_registers = all(self.in_registers(kind, shape) for kind, shape in matrices)
        if not (self.packed or in_registers):
            return "dense"
        whole = is_table or self.packed or self.batch_invariant or self.wide_vectors
        return "packed" if whole else "both"


def is_small(kind: str) -> bool:
    """Whether a value takes fewer bytes than float32."""
    block, num_bytes = _block(kind)
    return num_bytes < 4 * block


def packed_bytes(kind: str, shape: tuple[int, ...]) -> int:
    block, num_bytes = _block(kind)
    return prod(shape) // block * num_bytes


def _block(kind: str) -> tuple[int, int]:
    known = _BLOCKS.get(kind) or _PLAIN.get(kind)
    if known is None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        known = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return known


def gguf_types(file: GGUF, config: ModelConfig) -> dict[str, str]:
    """The type of each matrix by its name here. A GGUF has them all (out, in)."""
    specs = list(_matrices(config))
    for spec in specs:
        if spec.gguf_name not in file.tensors:
            raise CheckpointError(f"{file.path.name} lacks tensor {spec.gguf_name!r}")
    return {spec.name: file.tensors[spec.gguf_name].type for spec in specs}


def plain_types(config: ModelConfig) -> dict[str, str]:
    """Of a checkpoint in the config's own dtype. Matrices that it has the other way round are
    turned when they are loaded, so they are dense."""
    kind = _TYPES[config.dtype]
    return {spec.name: "F32" if spec.transposed else kind for spec in _matrices(config)}


def folder_types(folder: Path, config: ModelConfig) -> dict[str, str]:
    """Of a folder's safetensors, by their headers; by the config where it has none, or one that
    no engine could load."""
    types, specs = plain_types(config), tensor_specs(config)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)
            header = parse_object(
                file.read(size), path.name, max_bytes=_MAX_HEADER_BYTES, max_values=300_000
            )
        for stored, row in header.items():
            name = our_name(stored, config)
            kind = str(row.get("dtype")) if isinstance(row, dict) else ""
            if name in types and kind in _TYPES.values():
                types[name] = "F32" if specs[name].transposed else kind
    return types


def source_types(source: TensorSource, config: ModelConfig) -> dict[str, str]:
    """Of an open checkpoint, by what it hands out packed."""
    packed = {spec.name: source.packed(spec.name) for spec in _matrices(config)}
    return {name: rows.type if rows is not None else "F32" for name, rows in packed.items()}


def held_weights(
    config: ModelConfig, types: Mapping[str, str], residence: Residence
) -> HeldWeights:
    """What an engine of that residence holds of a checkpoint whose matrices are of ``types``."""
    itemsize = DTYPE_BYTES[residence.dtype]
    parts: dict[str, HeldPart] = defaultdict(HeldPart)
    seen: set[tuple[str, Form]] = set()
    for part, specs in _products(config):
        # As rows (out, in); a matrix that the checkpoint itself has so is not "transposed" there.
        matrices = [
            (types[spec.name], spec.shape[::-1] if spec.transposed else spec.shape)
            for spec in specs
        ]
        form = residence.form(matrices, is_table=part in ("embedding", "positions"))
        for kind, shape in matrices:
            dense = prod(shape) * itemsize
            if form == "dense":
                parts[part] += HeldPart(dense=dense)
            else:
                copy = dense if form == "both" else 0
                parts[part] += HeldPart(packed=packed_bytes(kind, shape), copy=copy)
            seen.add((kind, form))
    vectors = (spec for spec in tensor_specs(config).values() if len(spec.shape) == 1)
    parts["vectors"] = HeldPart(dense=sum(prod(spec.shape) for spec in vectors) * itemsize)
    return HeldWeights(dict(parts), _in_words(seen, residence.dtype))


def _matrices(config: ModelConfig) -> Iterable[TensorSpec]:
    return (spec for spec in tensor_specs(config).values() if len(spec.shape) == 2)


# Matrices that a layer multiplies as one, and the part they belong to.
_PRODUCTS = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "gate_proj": "gate and up",
    "up_proj": "gate and up", "down_proj": "down",
    "attn.c_attn": "qkv", "attn.c_proj": "o", "mlp.c_fc": "up", "mlp.c_proj": "down",
    "embed_tokens": "embedding", "wte": "embedding", "wpe": "positions", "lm_head": "head",
}  # fmt: skip


def _products(config: ModelConfig) -> list[tuple[str, list[TensorSpec]]]:
    """The products in order: part, matrices under each other."""
    found: dict[tuple[str, str], list[TensorSpec]] = defaultdict(list)
    for spec in _matrices(config):
        words = spec.name.split(".")[:-1]
        part = _PRODUCTS.get(words[-1]) or _PRODUCTS[".".join(words[-2:])]
        layer = next((word for word in words if word.isdigit()), "")
        found[layer, part].append(spec)
    return [(part, specs) for (_, part), specs in found.items()]


def _in_words(seen: set[tuple[str, Form]], dtype: str) -> str:
    packed = sorted({kind for kind, form in seen if form != "dense"})
    if not packed:
        return f"matrices in {dtype}"
    words = f"matrices as in the file ({', '.join(packed)})"
    if any(form == "both" for _, form in seen):
        words += f" and a copy in {dtype} for steps of many rows, as this CPU lacks AVX-512"
    if any(form == "dense" for _, form in seen):
        words += f", others in {dtype}"
    return words
