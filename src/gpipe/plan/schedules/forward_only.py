"""Forwards alone, for evaluation; whatever the schedule of training is, its placement serves."""

from gpipe.plan.action import Kind
from gpipe.plan.program import Rows
from gpipe.plan.schedules.order import rows_in_step
from gpipe.plan.schedules.placement import Placement, loop


def forward_only(stages: int, micro_batches: int) -> Rows:
    """The rows of forwards alone for one stage a rank.

    ```text
    rank 0  F0 F1 F2 F3 .. ..
    rank 1  .. F0 F1 F2 F3 ..
    rank 2  .. .. F0 F1 F2 F3
    ```

    >>> print(*forward_only(stages=2, micro_batches=3)[1])
    1F0 1F1 1F2
    """
    return forward_only_rows(loop(stages), micro_batches)


def forward_only_rows(placement: Placement, micro_batches: int) -> Rows:
    """The rows of forwards alone where a rank may hold several stages."""
    return rows_in_step(Kind.FORWARD, range(len(placement)), placement, micro_batches)
