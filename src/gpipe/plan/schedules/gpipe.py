"""GPipe's schedule, fill-drain: every forward, then every backward (paper, Figure 2c)."""

from gpipe.plan.action import Kind
from gpipe.plan.program import Rows
from gpipe.plan.schedules.order import rows_in_step
from gpipe.plan.schedules.placement import Placement, loop


def fill_drain(stages: int, micro_batches: int) -> Rows:
    """The rows of fill-drain for one stage a rank; forwards and backwards are in the order of the plain loop.

    ```text
    stage 0  F0 F1 F2 .. .. .. .. B0 B1 B2
    stage 1  .. F0 F1 F2 .. .. B0 B1 B2 ..
    stage 2  .. .. F0 F1 F2 B0 B1 B2 .. ..
    ```

    >>> for row in fill_drain(stages=2, micro_batches=2):
    ...     print(*row)
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    """
    return fill_drain_rows(loop(stages), micro_batches)


def fill_drain_rows(placement: Placement, micro_batches: int) -> Rows:
    """The rows of fill-drain where a rank may hold several stages; here rank 0 holds stages 0 and 2.

    ```text
    rank 0  0F0 0F1 2F0 2F1 ... ... 2B0 2B1 0B0 0B1
    rank 1  ... 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 ...
    ```
    """
    path = range(len(placement))
    forwards = rows_in_step(Kind.FORWARD, path, placement, micro_batches)
    backwards = rows_in_step(Kind.BACKWARD, path[::-1], placement, micro_batches)
    return tuple((*ahead, *back) for ahead, back in zip(forwards, backwards, strict=True))
