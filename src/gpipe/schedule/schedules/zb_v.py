"""ZB-V: zero bubble on a V of stages, with the memory of 1F1B (Qi et al., 2024)."""

from gpipe.schedule.program import Row, Rows
from gpipe.schedule.schedules.writing import Cell, Placement, in_turn


def zb_v(placement: Placement, micro_batches: int) -> Rows:
    """The rows of ZB-V: the first rank holds the first and the last stage, and no rank is idle once it has begun.

    ```text
    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
    rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
    ```

    (K-1)F/2 beside the work, F being a rank's forward, for K micro-batches held (section 4.2).
    """
    ranks = len(placement) // 2
    return tuple(_row(ranks, r, micro_batches) for r in range(ranks))


def _row(ranks: int, r: int, micro_batches: int) -> Row:
    down, up = r, 2 * ranks - 1 - r
    forward_up: list[Cell] = [("F", up), ("I", up), ("W", up)]
    both: list[Cell] = [("F", down), ("I", down), ("W", down), *forward_up]
    each = max(micro_batches, 2 * ranks - 1)  # the row of so many, of which those that there are stay
    return in_turn(
        [
            *[("F", down)] * (2 * (ranks - r) - 1),
            *[("F", up), ("F", down)] * r,
            *forward_up * (ranks - r),
            *both * (each - ranks),
            *[("I", down), ("I", up)] * r,
            *[("I", down), ("W", down)] * (ranks - r),
            *[("W", up)] * each,
            *[("W", down)] * each,
        ],
        micro_batches,
    )
