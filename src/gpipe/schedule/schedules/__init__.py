"""Schedules by name: which stages a rank holds, and in which order it runs their forwards and backwards.

To add one, see docs/contributing/add-a-schedule.md. `gpipe.profiling.lanes_text` draws the pictures: letters are
kinds, small ones at a rank's second stage, numbers micro-batches, dots idle time; F, I and W take one unit of time,
and B, which is both I and W, two.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpipe.schedule.program import Table
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
    "fill_drain",
    "forward_only",
    "forward_only_table",
    "table_in_training",
]


@dataclass(frozen=True)
class Schedule:
    """What a rank holds, and what it does in training.

    Attributes:
        name: What it is called.
        table: From a placement and the number of micro-batches, the forwards and backwards of each rank in order;
            None where it has no table of that size.
        placement: From the number of ranks and of stages on each, the rank of each stage; None where it has none.
        stages_per_rank: How many stages a rank holds; 0 if a program says it.
        sliced: As `table`, of slices of micro-batches, so many of each; None where it has no such table.
        slices: How many slices each micro-batch of a training step is cut into.

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
        """The same schedule, which makes each of its tables once."""
        return replace(self, table=Once(self.table), sliced=None if self.sliced is None else Once(self.sliced))


class Once:
    """Makes each table once, and keeps it.

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
    )
}


def table_in_training(schedule: Schedule, placement: Placement, micro_batches: int, slices: int = 1) -> Table:
    """The table of a mini-batch of any size: the schedule's, or that of fill-drain where it has none.

    Of micro-batches in slices it is counted how many these are together.
    """
    if slices > 1:
        assert schedule.sliced is not None  # else it was refused
        return schedule.sliced(placement, micro_batches, slices)
    return schedule.table(placement, micro_batches) or fill_drain_table(placement, micro_batches)
