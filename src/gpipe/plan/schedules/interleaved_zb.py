"""Interleaved zero bubble: interleaved 1F1B whose backward is split."""

from gpipe.plan.program import Rows
from gpipe.plan.schedules.order import in_rounds, in_turn, one_for_one, round_sizes
from gpipe.plan.schedules.placement import Placement


def interleaved_zb(placement: Placement, micro_batches: int) -> Rows:
    """The rows of interleaved zero bubble: fewer forwards ahead than interleaved 1F1B, since I takes less than B.

    (K-1)F/v beside the work for K micro-batches held.
    """
    ranks = max(placement) + 1
    each, sizes = len(placement) // ranks, round_sizes(ranks, micro_batches)
    rows = []
    for r in range(ranks):
        stages = range(r, len(placement), ranks)
        ahead = (each - 1) * max(ranks, sizes[0]) + ranks - r
        cells = one_for_one(in_rounds(stages, sizes), in_rounds(stages[::-1], sizes), ahead, late=r)
        rows.append(in_turn(cells, micro_batches))
    return tuple(rows)
