"""DualPipeV: a V on which forwards and backwards of two micro-batches meet (DeepSeek-AI, 2025)."""

from gpipe.schedule.program import Row, Rows
from gpipe.schedule.schedules.writing import OLDEST, Cell, Placement, in_turn


def dualpipe_v(placement: Placement, micro_batches: int) -> Rows | None:
    """The rows of DualPipeV, in its eight steps; None for fewer than 2K micro-batches.

    ```text
    rank 0  F0 F1 F2 f0 i0 w0 f1 F3 b1--- f2 B0--- b2--- f3 .. B1--- b3--- I2 W2 I3 W3
    rank 1  .. F0 f0 F1 f1 F2 b0--- f2 B0--- F3 b1--- f3 B1--- b2--- B2--- i3 I3 w3 W3
    ```

    (K-1)F/2 beside the work, F being a rank's forward, for K + 1/2 micro-batches held; few backwards are split.
    """
    ranks = len(placement) // 2
    if micro_batches < 2 * ranks:
        return None
    return tuple(_row(ranks, r, micro_batches) for r in range(ranks))


def _row(ranks: int, r: int, micro_batches: int) -> Row:
    down, up, after = r, 2 * ranks - 1 - r, ranks - 1 - r
    ending: list[Cell] = [("B", up), ("B", down)] * (r + 1)  # the second half of it is split
    ending[r + 1 :] = [("I", stage) for _, stage in ending[r + 1 :]]
    return in_turn(
        [
            *[("F", down)] * (2 * after),
            *[("F", down), ("F", up)] * (r + 1),
            *[("I", up), OLDEST, ("F", up)] * after,
            *[("F", down), ("B", up), ("F", up), ("B", down)] * (micro_batches - 2 * ranks + r + 1),
            *[("B", up), ("F", up), ("B", down)] * after,
            *ending,
            *[OLDEST, ("I", down)] * after,
            *[OLDEST] * (r + 1),
        ],
        micro_batches,
    )
