"""Interleaved 1F1B: several stages on each rank, so that fill and drain are those of a stage (Megatron-LM)."""

from gpipe.plan.program import Rows
from gpipe.plan.schedules.order import in_rounds, in_turn, one_for_one, round_sizes
from gpipe.plan.schedules.placement import Placement


def interleaved(placement: Placement, micro_batches: int) -> Rows:
    """The rows of interleaved 1F1B: rounds of K micro-batches go through the v stages of a rank in turn.

    ```text
    rank 0  F0 F1 f0 f1 F2 .. b0--- F3 b1--- f2 B0--- f3 B1--- .. b2--- .. b3--- B2--- B3---
    rank 1  .. F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .. ..
    ```

    (K-1)(F+B) of one stage beside the work, which is 1/v of fill-drain's, for K + (K-1)/v of a rank's activations
    (Narayanan et al., 2021, section 2.2). Where K does not divide M, rounds
    are longer, as long as fill and drain, and hold more.
    """
    ranks = max(placement) + 1
    each, sizes = len(placement) // ranks, round_sizes(ranks, micro_batches)
    rows = []
    for r in range(ranks):
        stages = range(r, len(placement), ranks)
        ahead = (each - 1) * max(ranks, sizes[0]) + 2 * (ranks - 1 - r) + 1
        cells = one_for_one(in_rounds(stages, sizes), in_rounds(stages[::-1], sizes), ahead)
        rows.append(in_turn(cells, micro_batches))
    return tuple(rows)
