"""Packed blocks to float32: the ``gguf`` package's own code for every type, over several threads.

Its numpy loops let go of the interpreter lock: two threads doubled Q8_0 and IQ2_XXS on 4096
columns; small tensors gain nothing and stay on one. Torch formulas of our own for Q4_1 and Q8_0
were three times as fast on an idle machine and ten times slower on a busy one, whose short
parallel regions wait for a thread that is not scheduled; they are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import torch

__all__ = ["QUANTISED", "SMALL", "dequantize"]

# Types that hold blocks, as the package can read them; the rest are plain numbers.
QUANTISED = frozenset(
    kind.name
    for kind, (block, _) in gguf.GGML_QUANT_SIZES.items()
    if block > 1 and kind in gguf.quants._type_traits
)
SMALL = QUANTISED | {"F16", "BF16"}  # fewer bytes than float32
_PLAIN: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
_JOB = 2**20  # weights a thread takes at once


def dequantize(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """(R, bytes of a row) uint8 to (R, columns): new for a block type, else a view of ``rows``."""
    if kind in _PLAIN:
        return rows.view(_PLAIN[kind])
    quant = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    packed = rows.numpy()
    dense = np.empty((len(packed), packed.shape[1] // block_bytes * block), np.float32)
    step = max(1, _JOB // dense.shape[1])

    def work(start: int) -> None:
        with np.errstate(all="ignore"):  # a file's scales may overflow; the values then say so
            dense[start : start + step] = gguf.dequantize(packed[start : start + step], quant)

    starts = range(0, len(packed), step)
    if len(starts) > 1:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(work, starts))
    else:
        work(0)
    return torch.from_numpy(dense)
