"""What the Hopper forward takes, and with which tile: data and pure functions, no torch here.

No row of ``TILES`` has run on a card yet: ``measured`` is None, and ``auto`` takes only rows that
have a figure. The first of each list is what an explicit call takes; ``bench/attention_gpu.py
--sweep`` times them all, so that one hour on a card can fill the column in and reorder the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TILES", "ForwardTile", "forward_tile", "forward_tiles", "hopper_lacks", "padded"]

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
    O is rescaled only then. ``rounds``: under a staircase rows are taken longest first over all
    heads, there and back, and not in pairs of a long and a short tile of one head.
    """

    keys: int
    stages: int
    consumers: int
    registers: int
    turns: bool = True
    releases: Releases = "mbarrier"
    spare: bool = False
    lazy: bool = False
    rounds: bool = False
    measured: float | None = None  # TFLOP/s on an H200 in bfloat16 at 8192 keys

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


# By padded head_dim and by whether rows end at a staircase (causal, or a window's right side). The
# first is what came out best in a first sweep on an H200.
TILES: dict[tuple[int, bool], tuple[ForwardTile, ...]] = {
    (64, False): (
        ForwardTile(128, 2, 3, 160, releases="hardware", spare=True),
        ForwardTile(128, 2, 3, 160, releases="hardware", spare=True, lazy=True),
        ForwardTile(128, 2, 3, 160, spare=True),
        ForwardTile(128, 3, 3, 160, turns=False, spare=True),
    ),
    (64, True): (
        ForwardTile(128, 2, 2, 240, releases="hardware", spare=True),
        ForwardTile(128, 2, 2, 240, releases="hardware", spare=True, rounds=True),
        ForwardTile(128, 2, 3, 160, releases="hardware", spare=True),
        ForwardTile(128, 2, 3, 160, releases="hardware", spare=True, rounds=True),
        ForwardTile(128, 2, 3, 160, turns=False, releases="hardware", spare=True),
        ForwardTile(128, 2, 3, 160, turns=False, releases="hardware", spare=True, rounds=True),
        ForwardTile(128, 3, 2, 240, releases="hardware", spare=True, rounds=True),
    ),
    (128, False): (
        ForwardTile(128, 2, 2, 240, releases="hardware", spare=True),
        ForwardTile(128, 2, 2, 240, releases="hardware", spare=True, lazy=True),
        ForwardTile(128, 2, 2, 240, turns=False, releases="hardware", spare=True),
        ForwardTile(128, 2, 2, 240, turns=False, releases="hardware", spare=True, lazy=True),
    ),
    (128, True): (
        ForwardTile(128, 2, 2, 240, releases="hardware", spare=True),
        ForwardTile(128, 2, 2, 240, releases="hardware", spare=True, rounds=True),
        ForwardTile(128, 2, 2, 240, releases="hardware", spare=True, lazy=True, rounds=True),
        ForwardTile(128, 2, 2, 240, turns=False, releases="hardware", spare=True),
        ForwardTile(128, 2, 2, 240, turns=False, releases="hardware", spare=True, rounds=True),
        ForwardTile(128, 2, 2, 240, turns=False, releases="hardware", spare=True, lazy=True),
        ForwardTile(128, 2, 2, 240, spare=True, rounds=True),
    ),
    (256, False): (
        ForwardTile(64, 2, 2, 240, turns=False),
        ForwardTile(64, 2, 2, 240, turns=False, lazy=True),
        ForwardTile(64, 2, 2, 240),
        ForwardTile(64, 2, 2, 240, lazy=True),
        ForwardTile(64, 2, 2, 240, releases="hardware"),
        ForwardTile(64, 2, 2, 240, turns=False, releases="hardware"),
    ),
    (256, True): (
        ForwardTile(64, 2, 2, 240),
        ForwardTile(64, 2, 2, 240, lazy=True),
        ForwardTile(64, 2, 2, 240, rounds=True),
        ForwardTile(64, 2, 2, 240, lazy=True, rounds=True),
        ForwardTile(64, 2, 2, 240, releases="hardware", rounds=True),
        ForwardTile(64, 2, 2, 240, releases="hardware", lazy=True, rounds=True),
        ForwardTile(64, 2, 2, 240, turns=False, releases="hardware", lazy=True, rounds=True),
    ),
}


def forward_tiles(head_dim: int, *, has_right_edge: bool) -> tuple[ForwardTile, ...]:
    """Candidates, the one to take first. No shape but head_dim decides, and so the same sequence
    has the same bits alone and among others."""
    return TILES[padded(head_dim), has_right_edge]


def forward_tile(head_dim: int, *, causal: bool, window: tuple[int, int]) -> ForwardTile:
    return forward_tiles(head_dim, has_right_edge=causal or window[1] >= 0)[0]


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
