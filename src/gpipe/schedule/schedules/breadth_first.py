"""Breadth-first: each stage runs all its micro-batches before its rank continues with another stage."""

from collections.abc import Iterator

from gpipe.schedule.program import Table
from gpipe.schedule.schedules.writing import Cell, Placement, Rows


def breadth_first(placement: Placement, micro_batches: int) -> Table:
    """Returns the table of the breadth-first schedule for any placement (Lamy-Poirier, 2022).

    A rank computes with each stage in at most two periods: once forward, once backward. So whatever is moved or
    gathered for a stage moves twice per step, for any number of micro-batches. In the last stage, a backward follows
    each forward, so this stage keeps one micro-batch and never recomputes.

    ```text
    rank 0  F0 F1 F2 F3 f0 f1 f2 f3 b0--- .. b1--- .. b2--- .. b3--- B0--- B1--- B2--- B3---
    rank 1  .. F0 F1 F2 F3 f0 b0--- f1 b1--- f2 b2--- f3 b3--- B0--- B1--- B2--- B3--- .. ..
    ```
    """
    last = len(placement) - 1

    def cells(rank: int) -> Iterator[Cell]:
        stages = [stage for stage in range(last) if placement[stage] == rank]
        for stage in stages:
            yield from [("F", stage)] * micro_batches
        if placement[last] == rank:
            yield from [("F", last), ("B", last)] * micro_batches
        for stage in reversed(stages):
            yield from [("B", stage)] * micro_batches

    return Rows(max(placement) + 1, cells, micro_batches)
