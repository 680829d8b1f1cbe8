"""ZB-V: zero bubble on a V of stages, with the memory of 1F1B (Qi et al., 2024)."""

from gpipe.plan.program import Row, Rows
from gpipe.plan.schedules.order import Cell, in_turn
from gpipe.plan.schedules.placement import Placement


def zb_v(placement: Placement, micro_batches: int) -> Rows:
    """The rows of ZB-V: the first rank holds the first and the last stage, and no rank is idle once it has begun.

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
