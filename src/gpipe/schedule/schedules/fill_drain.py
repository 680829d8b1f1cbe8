"""GPipe's schedule, fill-drain: all forwards, then all backwards (paper, Figure 2c).

Also defines forward-only schedules.
"""

from gpipe.schedule.action import Kind
from gpipe.schedule.program import Table
from gpipe.schedule.schedules.writing import Placement, Rows, loop, table_in_step


def fill_drain(stages: int, micro_batches: int) -> Table:
    """Returns the table of fill-drain with one stage per rank, in the order of the reference loop.

    ```text
    rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0--- B1--- B2--- B3---
    rank 1  .. F0 F1 F2 F3 .. .. .. B0--- B1--- B2--- B3--- .. ..
    rank 2  .. .. F0 F1 F2 F3 B0--- B1--- B2--- B3--- .. .. .. ..
    ```

    >>> for row in fill_drain(stages=2, micro_batches=2):
    ...     print(*row)
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    """
    return fill_drain_table(loop(stages), micro_batches)


def fill_drain_table(placement: Placement, micro_batches: int, slices: int = 1) -> Table:
    """Returns the table of fill-drain for any placement. The picture has two ranks with two stages each.

    ```text
    rank 0  F0 F1 f0 f1 F2 F3 f2 f3 .. .. .. b0--- b1--- B0--- B1--- b2--- b3--- B2--- B3---
    rank 1  .. F0 F1 f0 f1 F2 F3 f2 f3 b0--- b1--- B0--- B1--- b2--- b3--- B2--- B3--- .. ..
    ```
    """
    path = range(len(placement))
    if placement == loop(len(placement)):
        return Rows(
            len(path), lambda r: [("F", r)] * micro_batches + [("B", r)] * micro_batches, micro_batches, slices
        )
    forwards = table_in_step(Kind.FORWARD, path, placement, micro_batches, slices)
    backwards = table_in_step(Kind.BACKWARD, path[::-1], placement, micro_batches, slices)
    return tuple((*rows[0], *rows[1]) for rows in zip(forwards, backwards, strict=True))


def forward_only(stages: int, micro_batches: int) -> Table:
    """Returns the forward-only table with one stage per rank.

    ```text
    rank 0  F0 F1 F2 F3 .. ..
    rank 1  .. F0 F1 F2 F3 ..
    rank 2  .. .. F0 F1 F2 F3
    ```

    >>> print(*forward_only(stages=2, micro_batches=3)[1])
    1F0 1F1 1F2
    """
    return forward_only_table(loop(stages), micro_batches)


def forward_only_table(placement: Placement, micro_batches: int, slices: int = 1) -> Table:
    """Returns the forward-only table for any placement."""
    return table_in_step(Kind.FORWARD, range(len(placement)), placement, micro_batches, slices)
