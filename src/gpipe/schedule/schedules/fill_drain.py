"""GPipe's schedule, fill-drain: every forward, then every backward (paper, Figure 2c); and forwards alone."""

from gpipe.schedule.action import Kind
from gpipe.schedule.program import Table
from gpipe.schedule.schedules.writing import Placement, Rows, loop, table_in_step


def fill_drain(stages: int, micro_batches: int) -> Table:
    """The table of fill-drain for one stage a rank; forwards and backwards are in the order of the plain loop.

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
    """The table of fill-drain where a rank may hold several stages; here each of two ranks holds two.

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
    return tuple((*ahead, *back) for ahead, back in zip(forwards, backwards, strict=True))


def forward_only(stages: int, micro_batches: int) -> Table:
    """The table of forwards alone for one stage a rank.

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
    """The table of forwards alone where a rank may hold several stages."""
    return table_in_step(Kind.FORWARD, range(len(placement)), placement, micro_batches, slices)
