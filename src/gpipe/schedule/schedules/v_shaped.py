"""Defines V-shaped schedules: ZB-V, V-Half and V-Min (Qi et al., 2024), and DualPipeV (DeepSeek-AI, 2025).

Each rank has two stages. The first half of the stages goes from the first rank to the last rank, and the second half
goes back. So the first rank has the first and the last stage. The docstrings state the idle time of each rank: the
step time minus its work.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from gpipe.schedule.program import Table
from gpipe.schedule.schedules.writing import OLDEST, Cell, Placement, Rows

Block: TypeAlias = tuple[int, int, int, int]
"""The time slots of the four actions F, f, I and i of one micro-batch on a rank."""
PERIOD = 6  # time slots between micro-batches, one for each action of a rank


def zb_v(placement: Placement, micro_batches: int) -> Table:
    """Returns the table of ZB-V: no rank is idle after its first action.

    ```text
    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
    rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
    ```

    The idle time is (K-1)F/2, where F is the forward of a rank. A rank holds at most K micro-batches (section 4.2).
    """
    ranks = len(placement) // 2
    each = max(micro_batches, 2 * ranks - 1)  # a full row; micro-batches that do not exist are left out

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
    """Returns a table. `cells` returns the actions of a rank from the numbers of its first and its second stage."""
    return Rows(ranks, lambda r: cells(r, 2 * ranks - 1 - r), micro_batches)


def v_half(placement: Placement, micro_batches: int) -> Table:
    """Returns the table of V-Half: half the memory of 1F1B, with (K+2)//2 micro-batches held (appendix).

    ```text
    rank 0  F0 .. .. f0 F1 i0 w0 f1 F2 .. I0 i1 W0 f2 w1 F3 I1 i2 W1 f3 w2 .. I2 i3 W2 w3 .. I3 W3
    rank 1  .. F0 f0 .. .. F1 f1 i0 w0 I0 W0 F2 f2 i1 w1 I1 W1 F3 f3 i2 w2 I2 W2 .. i3 w3 I3 W3 ..
    ```

    The idle time is 7/2 K - 2 slots if K is even, and 7/2 (K-1) if it is odd. A slot is F, I or W of a stage.
    """
    k = len(placement) // 2
    late = 3 if k % 2 == 0 else 0
    return _repeated(
        lambda r: (2 * r, 3 * k - 2 - r, 3 * k + late + 2 * r - 1, 6 * k + late - 2 - r), k, micro_batches
    )


def v_min(placement: Placement, micro_batches: int) -> Table:
    """Returns the table of V-Min: a third of the memory of 1F1B, with (K+4)//3 micro-batches held (appendix).

    ```text
    rank 0  F0 .. .. f0 i0 w0 F1 I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2 F3 I2 W2 f3 i3 w3 .. I3 W3
    rank 1  .. F0 f0 .. .. i0 I0 F1 f1 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 F3 f3 w2 W2 i3 I3 w3 W3
    ```

    The idle time is 4K-3 slots if K is divisible by 3, otherwise 4K-5. A slot is F, I or W of a stage.
    """
    k = len(placement) // 2
    late = 2 if k % 3 == 0 else 0
    return _repeated(lambda r: (r, 2 * k - 1 - r, 2 * k + late + r, 4 * k + late - 1 - r), k, micro_batches)


def _repeated(block: Callable[[int], Block], ranks: int, micro_batches: int) -> Table:
    """Returns a table that repeats the block of each rank for every micro-batch. W actions fill the free slots."""

    def cells(down: int, up: int) -> Iterable[Cell]:
        cycle: list[Cell] = [("F", down), ("F", up), ("I", up), ("I", down)]
        places = zip(block(down), cycle, strict=True)
        cell_of = {slot + PERIOD * m: cell for slot, cell in places for m in range(micro_batches)}
        return [*(cell_of.get(slot, OLDEST) for slot in range(max(cell_of) + 1)), *[OLDEST] * (2 * micro_batches)]

    return _down_and_up(cells, ranks, micro_batches)


def dualpipe_v(placement: Placement, micro_batches: int) -> Table | None:
    """Returns the table of DualPipeV, in its eight steps; None for fewer than 2K micro-batches.

    Pairs the forward of one micro-batch with the backward of a different micro-batch.

    ```text
    rank 0  F0 F1 F2 f0 i0 w0 f1 F3 b1--- f2 B0--- b2--- f3 .. B1--- b3--- I2 W2 I3 W3
    rank 1  .. F0 f0 F1 f1 F2 b0--- f2 B0--- F3 b1--- f3 B1--- b2--- B2--- i3 I3 w3 W3
    ```

    The idle time is (K-1)F/2, where F is the forward of a rank. A rank holds at most K + 1/2 micro-batches. Few
    backwards are split.
    """
    ranks = len(placement) // 2

    def cells(down: int, up: int) -> list[Cell]:
        after = ranks - 1 - down
        ending: list[Cell] = [("B", up), ("B", down)] * (down + 1)  # the second half is split, see the next line
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
