"""V-Half and V-Min: a block of four actions, repeated for every micro-batch, on a V (Qi et al., 2024)."""

from collections.abc import Callable
from typing import TypeAlias

from gpipe.schedule.program import Row, Rows
from gpipe.schedule.schedules.writing import OLDEST, Cell, Placement, in_turn

Block: TypeAlias = tuple[int, int, int, int]
"""When a rank does its two F and its two I of a micro-batch: in the order in which the micro-batch comes to it."""
PERIOD = 6
"""Slots from one micro-batch to the next: as many as a rank has actions."""


def v_half(placement: Placement, micro_batches: int) -> Rows:
    """The rows of V-Half: half the memory of 1F1B, (K+2)//2 micro-batches held (appendix).

    ```text
    rank 0  F0 .. .. f0 F1 i0 w0 f1 F2 .. I0 i1 W0 f2 w1 F3 I1 i2 W1 f3 w2 .. I2 i3 W2 w3 .. I3 W3
    rank 1  .. F0 f0 .. .. F1 f1 i0 w0 I0 W0 F2 f2 i1 w1 I1 W1 F3 f3 i2 w2 I2 W2 .. i3 w3 I3 W3 ..
    ```

    7/2 K - 2 slots beside the work where K is even, 7/2 (K-1) where it is odd, a slot being F, I or W of a stage.
    """
    ranks = len(placement) // 2
    shift = 3 if ranks % 2 == 0 else 0
    return _repeated(
        lambda r: (2 * r, 3 * ranks - 2 - r, 3 * ranks + shift + 2 * r - 1, 6 * ranks + shift - 2 - r),
        ranks,
        micro_batches,
    )


def v_min(placement: Placement, micro_batches: int) -> Rows:
    """The rows of V-Min: a third of the memory of 1F1B, (K+4)//3 micro-batches held (appendix).

    ```text
    rank 0  F0 .. .. f0 i0 w0 F1 I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2 F3 I2 W2 f3 i3 w3 .. I3 W3
    rank 1  .. F0 f0 .. .. i0 I0 F1 f1 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 F3 f3 w2 W2 i3 I3 w3 W3
    ```

    4K-3 slots beside the work where 3 divides K, else 4K-5, a slot being F, I or W of a stage.
    """
    ranks = len(placement) // 2
    shift = 2 if ranks % 3 == 0 else 0
    return _repeated(
        lambda r: (r, 2 * ranks - 1 - r, 2 * ranks + shift + r, 4 * ranks + shift - 1 - r), ranks, micro_batches
    )


def _repeated(block: Callable[[int], Block], ranks: int, micro_batches: int) -> Rows:
    """The block of each rank, repeated; W, the oldest first, where a slot is free."""
    return tuple(_row(block(r), (r, 2 * ranks - 1 - r), micro_batches) for r in range(ranks))


def _row(block: Block, stages: tuple[int, int], micro_batches: int) -> Row:
    down, up = stages
    cells: tuple[Cell, ...] = (("F", down), ("F", up), ("I", up), ("I", down))
    at = {slot + PERIOD * m: cell for slot, cell in zip(block, cells, strict=True) for m in range(micro_batches)}
    last = max(at) + 1
    slots = (at.get(slot, OLDEST) for slot in range(last))
    return in_turn((*slots, *[OLDEST] * (2 * micro_batches)), micro_batches)
