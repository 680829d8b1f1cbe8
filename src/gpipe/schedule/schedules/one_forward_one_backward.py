"""1F1B: once the pipeline is full, a backward after each forward (PipeDream's order, made synchronous)."""

from gpipe.schedule.program import Rows
from gpipe.schedule.schedules.writing import Placement, in_turn, one_for_one


def one_forward_one_backward(placement: Placement, micro_batches: int) -> Rows:
    """The rows of 1F1B: rank r of K runs K - r forwards ahead, and so holds that many micro-batches, never M.

    ```text
    rank 0  F0 F1 F2 .. .. .. .. B0--- F3 B1--- .. B2--- .. B3---
    rank 1  .. F0 F1 .. .. B0--- F2 B1--- F3 B2--- .. B3--- .. ..
    rank 2  .. .. F0 B0--- F1 B1--- F2 B2--- F3 B3--- .. .. .. ..
    ```

    As long as fill-drain, (K-1)(F+B) beside the work (Narayanan et al., 2021, section 2.2).
    """
    ranks, each = len(placement), micro_batches
    return tuple(in_turn(one_for_one([r] * each, [r] * each, ahead=ranks - r), each) for r in placement)
