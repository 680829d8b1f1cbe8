"""1F1B: once the pipeline is full, a backward after each forward (PipeDream's order, made synchronous)."""

from gpipe.plan.program import Rows
from gpipe.plan.schedules.order import in_turn, one_for_one
from gpipe.plan.schedules.placement import Placement


def one_forward_one_backward(placement: Placement, micro_batches: int) -> Rows:
    """The rows of 1F1B: rank r of K runs K - r forwards ahead, and so holds that many micro-batches, never M.

    As long as fill-drain, (K-1)(F+B) beside the work (Narayanan et al., 2021, section 2.2).
    """
    ranks, each = len(placement), micro_batches
    return tuple(in_turn(one_for_one([r] * each, [r] * each, ahead=ranks - r), each) for r in placement)
