"""Schedules by name: which stages a rank holds, and in which order it runs their forwards and backwards.

To add one, write a page like `gpipe.py`, pure functions with their picture, and name it in `SCHEDULES`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gpipe.plan.program import Rows
from gpipe.plan.schedules.forward_only import forward_only, forward_only_rows
from gpipe.plan.schedules.gpipe import fill_drain, fill_drain_rows
from gpipe.plan.schedules.placement import Placement, loop

__all__ = ["SCHEDULES", "Placement", "Schedule", "fill_drain", "forward_only", "forward_only_rows"]


@dataclass(frozen=True)
class Schedule:
    """What a rank holds, and what it does in training.

    Attributes:
        rows: From a placement and the number of micro-batches, the forwards and backwards of each rank in order.
        placement: From the number of ranks and of stages on each, the rank of each stage.
        stages_per_rank: How many stages a rank holds where nothing is asked for.

    >>> schedule = SCHEDULES["gpipe"]
    >>> schedule.placement(3, 1)
    (0, 1, 2)
    >>> [" ".join(map(str, row)) for row in schedule.rows((0, 1), 2)]
    ['0F0 0F1 0B0 0B1', '1F0 1F1 1B0 1B1']
    """

    rows: Callable[[Placement, int], Rows]
    placement: Callable[[int, int], Placement]
    stages_per_rank: int = 1


SCHEDULES: dict[str, Schedule] = {"gpipe": Schedule(fill_drain_rows, loop)}
