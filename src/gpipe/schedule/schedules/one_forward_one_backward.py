"""1F1B: once the pipeline is full, a backward after each forward (PipeDream's order, made synchronous).

ZB-H1 and ZB-H2: the same with split backwards, so that W fills what would be idle (Qi et al., 2023).
"""

from collections.abc import Callable

from gpipe.schedule.program import Table
from gpipe.schedule.schedules.writing import Placement, in_turn, one_for_one


def one_forward_one_backward(placement: Placement, micro_batches: int) -> Table:
    """The table of 1F1B: rank r of K runs K - r forwards ahead, and so holds that many micro-batches, never M.

    ```text
    rank 0  F0 F1 F2 .. .. .. .. B0--- F3 B1--- .. B2--- .. B3---
    rank 1  .. F0 F1 .. .. B0--- F2 B1--- F3 B2--- .. B3--- .. ..
    rank 2  .. .. F0 B0--- F1 B1--- F2 B2--- F3 B3--- .. .. .. ..
    ```

    As long as fill-drain, (K-1)(F+B) beside the work (Narayanan et al., 2021, section 2.2).
    """
    return _in_line(placement, micro_batches, ahead=lambda r: len(placement) - r)


def zb_h1(placement: Placement, micro_batches: int) -> Table:
    """The table of ZB-H1: 1F1B's forwards, and each W on rank r behind the r-th I after its own.

    ```text
    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    ```

    (K-1)(F+I-W) beside the work, a third of 1F1B's, for the K micro-batches that 1F1B holds on its first rank
    (section 2.3).
    """
    return _in_line(placement, micro_batches, ahead=lambda r: len(placement) - r, late=lambda r: r)


def zb_h2(placement: Placement, micro_batches: int) -> Table:
    """The table of ZB-H2: 2(K-r)-1 forwards ahead, and each W on rank r behind the 2r-th I after its own.

    ```text
    rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
    rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
    rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    ```

    No rank is idle between its first and its last action, so (K-1)F beside the work, for 2K-1 micro-batches held
    (section 2.3).
    """
    return _in_line(placement, micro_batches, lambda r: 2 * (len(placement) - r) - 1, late=lambda r: 2 * r)


def _in_line(
    placement: Placement,
    micro_batches: int,
    ahead: Callable[[int], int],
    late: Callable[[int], int | None] = lambda r: None,
) -> Table:
    """A forward for each backward on every rank, which holds one stage; the rest by rank, as `one_for_one` has it."""
    return tuple(
        in_turn(one_for_one([r] * micro_batches, [r] * micro_batches, ahead(r), late(r)), micro_batches)
        for r in placement
    )
