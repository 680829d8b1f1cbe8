"""Defines the schedules: the stages that each rank has, and the order of its forwards and backwards.

To add a schedule, see docs/contributing/add-a-schedule.md. The pictures in the docstrings are made by
`gpipe.profiling.lanes_text`. Letters are kinds of action, in lower case for the second stage of a rank. Numbers are
micro-batches, and dots are idle time. F, I and W take one unit of time; B, which is I and W together, takes two.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpipe.schedule.action import Kind
from gpipe.schedule.program import Table
from gpipe.schedule.schedules.breadth_first import breadth_first
from gpipe.schedule.schedules.fill_drain import fill_drain, fill_drain_table, forward_only, forward_only_table
from gpipe.schedule.schedules.one_forward_one_backward import (
    interleaved,
    interleaved_zb,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
)
from gpipe.schedule.schedules.v_shaped import dualpipe_v, v_half, v_min, zb_v
from gpipe.schedule.schedules.writing import Placement, line, loop, loops, vee

__all__ = [
    "SCHEDULES",
    "Placement",
    "Schedule",
    "breadth_first",
    "fill_drain",
    "forward_only",
    "forward_only_table",
    "table_in_evaluation",
    "table_in_training",
]


@dataclass(frozen=True)
class Schedule:
    """A schedule: the stages that each rank has, and the order of its actions in training.

    Attributes:
        name: The name in messages and reports.
        table: A function that returns the forwards and backwards of each rank, for a placement and a number of
            micro-batches. The result is None for sizes that the schedule does not support.
        placement: A function that returns the rank of each stage, for a number of ranks and a number of stages per
            rank. The result is None if the schedule does not support this number of stages.
        stages_per_rank: The default number of stages on each rank; 0 for a user's program, which defines the number
            itself.
        sliced: A function like `table` for slices of micro-batches, with the number of slices per micro-batch as
            third argument. None if the schedule does not support slices.
        slices: The number of slices of each micro-batch in a training step.

    >>> for row in SCHEDULES["1f1b"].table(SCHEDULES["1f1b"].placement(2, 1), 2):
    ...     print(*row)
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """

    name: str
    table: Callable[[Placement, int], Table | None]
    placement: Callable[[int, int], Placement | None]
    stages_per_rank: int = 1
    sliced: Callable[[Placement, int, int], Table] | None = None
    slices: int = 1

    def once(self) -> "Schedule":
        """Returns the same schedule with a cache for the results of `table` and `sliced`."""
        return replace(self, table=Once(self.table), sliced=None if self.sliced is None else Once(self.sliced))


class Once:
    """A picklable cache for a function that returns the actions of all ranks.

    >>> table = Once(lambda placement, micro_batches: [placement, micro_batches])
    >>> table((0, 1), 4) is table((0, 1), 4)
    True
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make, self._made = make, dict[tuple[object, ...], Any]()

    def __call__(self, *size: Any) -> Any:
        if size not in self._made:
            self._made[size] = self._make(*size)
        return self._made[size]

    def __reduce__(self) -> tuple[type["Once"], tuple[Callable[..., Any]]]:
        return Once, (self._make,)


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", fill_drain_table, loop, sliced=fill_drain_table),
        Schedule("1f1b", one_forward_one_backward, line, sliced=one_forward_one_backward),
        Schedule("interleaved", interleaved, loops, stages_per_rank=2),
        Schedule("zb_h1", zb_h1, line),
        Schedule("zb_h2", zb_h2, line),
        Schedule("interleaved_zb", interleaved_zb, loops, stages_per_rank=2),
        Schedule("zb_v", zb_v, vee, stages_per_rank=2),
        Schedule("v_half", v_half, vee, stages_per_rank=2),
        Schedule("v_min", v_min, vee, stages_per_rank=2),
        Schedule("dualpipe_v", dualpipe_v, vee, stages_per_rank=2),
        Schedule("breadth_first", breadth_first, loop, stages_per_rank=2),
    )
}


def table_in_training(schedule: Schedule, placement: Placement, micro_batches: int, slices: int = 1) -> Table:
    """Returns the actions of each rank in a mini-batch of any size.

    If the schedule does not support the size, uses fill-drain.

    With slices, `micro_batches` is the total number of slices.
    """
    if slices > 1:
        assert schedule.sliced is not None  # checked when the pipe was created
        return schedule.sliced(placement, micro_batches, slices)
    return schedule.table(placement, micro_batches) or fill_drain_table(placement, micro_batches)


def table_in_evaluation(schedule: Schedule, placement: Placement, micro_batches: int, slices: int = 1) -> Table:
    """Returns the forwards of each rank in a mini-batch without backwards. `breadth_first` keeps its order."""
    if schedule.name != "breadth_first":
        return forward_only_table(placement, micro_batches, slices)
    rows = table_in_training(schedule, placement, micro_batches, slices)
    return [tuple(action for action in row if action.kind is Kind.FORWARD) for row in rows]
