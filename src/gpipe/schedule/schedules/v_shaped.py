"""Schedules on a V: ZB-V, V-Half and V-Min (Qi et al., 2024), and DualPipeV (DeepSeek-AI, 2025)."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from gpipe.schedule.program import Table
from gpipe.schedule.schedules.writing import OLDEST, Cell, Placement, Rows

Block: TypeAlias = tuple[int, int, int, int]
"""When a rank does its two F and its two I of a micro-batch: in the order in which the micro-batch comes to it."""
PERIOD = 6  # slots from one micro-batch to the next: as many as a rank has actions


def zb_v(placement: Placement, micro_batches: int) -> Table:
    """The table of ZB-V: the first rank holds the first and the last stage, and no rank is idle once it has begun.

    ```text
    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
    rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
    ```

    (K-1)F/2 beside the work, F being a rank's forward, for K micro-batches held (section 4.2).
    """
    ranks = len(placement) // 2
    each = max(micro_batches, 2 * ranks - 1)  # the row of so many, of which those that there are stay

    def cells(down: int, up: int) -> list[Cell]:
        forward_up: list[Cell] = [("F", up), ("I", up), ("W", up)]
        both: list[Cell] = [("F", down), ("I", down), ("W", down), *forward_up]
        return [
            *[("F", down)] * (2 * (ranks - down) - 1),
            *[("F", up), ("F", down)] * down,
            *forward_up * (ranks - down),
            *both * (each - ranks),
            *[("I", down), ("I", up)] * down,
            *[("I", down), ("W", down)] * (ranks - down),
            *[("W", up)] * down,
            *[("W", down)] * down,
        ]

    return _down_and_up(cells, ranks, micro_batches)


def _down_and_up(cells: Callable[[int, int], Iterable[Cell]], ranks: int, micro_batches: int) -> Table:
    """The row of each rank r, of its cells by its two stages: r on the way down, and on the way up."""
    return Rows(ranks, lambda r: cells(r, 2 * ranks - 1 - r), micro_batches)


def v_half(placement: Placement, micro_batches: int) -> Table:
    """The table of V-Half: half the memory of 1F1B, (K+2)//2 micro-batches held (appendix).

    ```text
    rank 0  F0 .. .. f0 F1 i0 w0 f1 F2 .. I0 i1 W0 f2 w1 F3 I1 i2 W1 f3 w2 .. I2 i3 W2 w3 .. I3 W3
    rank 1  .. F0 f0 .. .. F1 f1 i0 w0 I0 W0 F2 f2 i1 w1 I1 W1 F3 f3 i2 w2 I2 W2 .. i3 w3 I3 W3 ..
    ```

    7/2 K - 2 slots beside the work where K is even, 7/2 (K-1) where it is odd, a slot being F, I or W of a stage.
    """
    k = len(placement) // 2
    late = 3 if k % 2 == 0 else 0
    return _repeated(
        lambda r: (2 * r, 3 * k - 2 - r, 3 * k + late + 2 * r - 1, 6 * k + late - 2 - r), k, micro_batches
    )


def v_min(placement: Placement, micro_batches: int) -> Table:
    """The table of V-Min: a third of the memory of 1F1B, (K+4)//3 micro-batches held (appendix).

    ```text
    rank 0  F0 .. .. f0 i0 w0 F1 I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2 F3 I2 W2 f3 i3 w3 .. I3 W3
    rank 1  .. F0 f0 .. .. i0 I0 F1 f1 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 F3 f3 w2 W2 i3 I3 w3 W3
    ```

    4K-3 slots beside the work where 3 divides K, else 4K-5, a slot being F, I or W of a stage.
    """
    k = len(placement) // 2
    late = 2 if k % 3 == 0 else 0
    return _repeated(lambda r: (r, 2 * k - 1 - r, 2 * k + late + r, 4 * k + late - 1 - r), k, micro_batches)


def _repeated(block: Callable[[int], Block], ranks: int, micro_batches: int) -> Table:
    """The block of each rank, repeated for every micro-batch; W, the oldest first, where a slot is free."""

    def cells(down: int, up: int) -> Iterable[Cell]:
        cycle: list[Cell] = [("F", down), ("F", up), ("I", up), ("I", down)]
        places = zip(block(down), cycle, strict=True)
        at = {slot + PERIOD * m: cell for slot, cell in places for m in range(micro_batches)}
        return [*(at.get(slot, OLDEST) for slot in range(max(at) + 1)), *[OLDEST] * (2 * micro_batches)]

    return _down_and_up(cells, ranks, micro_batches)


def dualpipe_v(placement: Placement, micro_batches: int) -> Table | None:
    """The table of DualPipeV, in its eight steps; None for fewer than 2K micro-batches.

    Forwards and backwards of two micro-batches meet on it.

    ```text
    rank 0  F0 F1 F2 f0 i0 w0 f1 F3 b1--- f2 B0--- b2--- f3 .. B1--- b3--- I2 W2 I3 W3
    rank 1  .. F0 f0 F1 f1 F2 b0--- f2 B0--- F3 b1--- f3 B1--- b2--- B2--- i3 I3 w3 W3
    ```

    (K-1)F/2 beside the work, F being a rank's forward, for K + 1/2 micro-batches held; few backwards are split.
    """
    ranks = len(placement) // 2

    def cells(down: int, up: int) -> list[Cell]:
        after = ranks - 1 - down
        ending: list[Cell] = [("B", up), ("B", down)] * (down + 1)  # the second half of it is split
        ending[down + 1 :] = [("I", stage) for _, stage in ending[down + 1 :]]
        return [
            *[("F", down)] * (2 * after),
            *[("F", down), ("F", up)] * (down + 1),
            *[("I", up), OLDEST, ("F", up)] * after,
            *[("F", down), ("B", up), ("F", up), ("B", down)] * (micro_batches - 2 * ranks + down + 1),
            *[("B", up), ("F", up), ("B", down)] * after,
            *ending,
            *[OLDEST, ("I", down)] * after,
            *[OLDEST] * (down + 1),
        ]

    return None if micro_batches < 2 * ranks else _down_and_up(cells, ranks, micro_batches)
