"""Interleaved zero bubble: interleaved 1F1B whose backward is split."""

from gpipe.plan.program import Rows
from gpipe.plan.schedules.order import in_rounds, in_turn, one_for_one, round_sizes
from gpipe.plan.schedules.placement import Placement


def interleaved_zb(placement: Placement, micro_batches: int) -> Rows:
    """The rows of interleaved zero bubble: fewer forwards ahead than interleaved 1F1B, since I takes less than B.

    ```text
    rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    rank 1  .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
    ```

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
