"""What the Hopper forward takes, and with which tile: data and pure functions, no torch here.

Each tile came out best of those that ``bench/attention_gpu.py --prefill --sweep`` tries on an H200
(bench/records/attention_gpu_sweep.jsonl; figures of the final run, attention_gpu.jsonl, where the
tile ran at 8192 keys); what lost, and by how much, is in docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TILES",
    "ForwardTile",
    "chunk_tile",
    "forward_tile",
    "forward_tiles",
    "hopper_lacks",
    "is_in_rounds",
    "padded",
]

Releases = Literal["mbarrier", "hardware"]
FIRST_BARRIER, NUM_BARRIERS = 8, 16  # hardware barriers of a block; Triton's are the low ones


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """A program's tile is (64 * consumers) rows x keys; K and V have ``stages`` buffers each.

    ``registers``: a consumer thread's; the producer takes what they leave. ``turns``: consumers
    issue their products in turn, so that one's softmax lies over another's products.
    ``releases``: how a consumer gives a stage back, by an mbarrier, at which its four warps meet
    first, or by a hardware barrier. ``spare``: O leaves from memory of its own and not from Q's,
    so the next Q need not wait for it. ``lazy``: maxima follow only rises of more than 2**8, and
    O is rescaled only then. ``dense_from``: sequences of a dense batch take it from so many queries
    on; ragged and paged ones never do if that is not 0, and so have the same bits in any batch.
    """

    keys: int
    stages: int
    consumers: int
    registers: int
    turns: bool = True
    releases: Releases = "mbarrier"
    spare: bool = False
    lazy: bool = False
    dense_from: int = 0
    measured: float | None = None  # TFLOP/s on an H200, bfloat16, 8192 keys, heads x D = 2048

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def free_barriers(self) -> tuple[int, int]:
        """The first hardware barrier of K's stages and of V's; 0 where mbarriers do."""
        if self.releases == "mbarrier":
            return 0, 0
        first = FIRST_BARRIER + (self.consumers if self.turns else 0)
        assert first + 2 * self.stages <= NUM_BARRIERS
        return first, first + self.stages


def padded(head_dim: int) -> int:
    return max(64, 1 << (head_dim - 1).bit_length())


# By padded head_dim and by whether rows end at a staircase (causal, or a window's right side).
TILES: dict[tuple[int, bool], tuple[ForwardTile, ...]] = {
    (64, False): (ForwardTile(128, 2, 3, 160, releases="hardware", spare=True, measured=581),),
    (64, True): (
        ForwardTile(128, 2, 2, 240, releases="hardware", spare=True, measured=433),
        ForwardTile(
            128, 2, 3, 160, releases="hardware", spare=True, dense_from=4096, measured=507
        ),
    ),
    (128, False): (
        ForwardTile(128, 2, 2, 240, turns=False, releases="hardware", spare=True, measured=745),
    ),
    (128, True): (
        ForwardTile(128, 2, 2, 240, turns=False, releases="hardware", spare=True, measured=684),
    ),
    (256, False): (
        ForwardTile(64, 2, 2, 240, releases="hardware", measured=665),
        ForwardTile(64, 2, 2, 240, lazy=True, dense_from=1, measured=785),
    ),
    (256, True): (ForwardTile(64, 2, 2, 240, releases="hardware", measured=748),),
}  # fmt: skip


def forward_tiles(head_dim: int, *, has_right_edge: bool) -> tuple[ForwardTile, ...]:
    """The tile of ragged and paged sequences, then those of longer and longer dense ones."""
    return TILES[padded(head_dim), has_right_edge]


def forward_tile(
    head_dim: int, *, causal: bool, window: tuple[int, int], dense_q: int = 0
) -> ForwardTile:
    """``dense_q``: queries of each sequence of a dense batch, 0 if it is ragged."""
    tiles = forward_tiles(head_dim, has_right_edge=causal or window[1] >= 0)
    return [tile for tile in tiles if tile.dense_from <= dense_q][-1]


def chunk_tile(head_dim: int) -> ForwardTile:
    """Of a step's prompt chunks, causal rows over pages."""
    return forward_tile(head_dim, causal=True, window=(-1, -1))


def is_in_rounds(*, num_heads: int, num_q: int, num_programs: int) -> bool:
    """Whether dense tiles under a staircase are taken longest first over all ``num_heads`` of the
    batch, there and back, which leaves no program idle at the end; otherwise in pairs of a long
    and a short tile of one head, which keep fewer heads' K and V in use at a time. The former
    loses where they come from memory for less than two programs each, and at 2048 queries."""
    return num_q >= 4096 and 2 * num_heads <= num_programs


def hopper_lacks(
    q: Tensor, k: Tensor, v: Tensor, *, capability: tuple[int, int], release: str
) -> str | None:
    """What keeps such a call, q (B, S, H, D), k and v (B, S, G, D), from the kernel; None if
    nothing does. ``release`` is Triton's."""
    if capability != (9, 0):
        return f"the card is sm_{capability[0]}{capability[1]}, not sm_90"
    if tuple(int(part) for part in release.split(".")[:2]) < (3, 6):
        return f"Triton {release} is older than 3.6"
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        return f"q is {dtype}, not bfloat16 or float16"
    head_dim = q.shape[-1]
    if head_dim > 256 or head_dim % 8:
        return f"head_dim {head_dim} is not a multiple of 8 up to 256"
    for name, x in (("q", q), ("k", k), ("v", v)):
        problem = _no_boxes(x.shape, x.stride(), x.data_ptr(), x.element_size())
        if problem:
            return f"{name} {problem}"
    return None


def _no_boxes(
    shape: Sequence[int], strides: Sequence[int], address: int, itemsize: int
) -> str | None:
    """Why the copy engine cannot take boxes of such a tensor (B, S, H, D): its steps are whole
    multiples of 16 bytes below 2**40, its sizes 1 to 2**31."""
    if not all(0 < size < 2**31 for size in shape):
        return f"is of shape {tuple(shape)}"
    if strides[-1] != 1 and shape[-1] > 1:
        return f"has elements {strides[-1]} apart"
    if address % 16:
        return "does not begin at a multiple of 16 bytes"
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        step = stride * itemsize
        if size > 1 and (step % 16 or not 0 < step < 2**40):
            return f"has steps of {step} bytes, not a multiple of 16"
    return None
