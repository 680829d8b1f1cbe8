"""1F1B: once the pipeline is full, a backward after each forward (PipeDream's order, made synchronous).

ZB-H1 and ZB-H2: the same with split backwards, so that W fills what would be idle (Qi et al., 2023). Interleaved
1F1B (Megatron-LM), and the same with split backwards: several stages a rank, in a loop.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from gpipe.schedule.program import Table
from gpipe.schedule.schedules.writing import Cell, Placement, Rows, one_for_one

ByRank: TypeAlias = Callable[[int], int]


def one_forward_one_backward(placement: Placement, micro_batches: int, slices: int = 1) -> Table:
    """The table of 1F1B: rank r of K runs K - r forwards ahead, and so holds that many micro-batches, never M.

    ```text
    rank 0  F0 F1 F2 .. .. .. .. B0--- F3 B1--- .. B2--- .. B3---
    rank 1  .. F0 F1 .. .. B0--- F2 B1--- F3 B2--- .. B3--- .. ..
    rank 2  .. .. F0 B0--- F1 B1--- F2 B2--- F3 B3--- .. .. .. ..
    ```

    As long as fill-drain, (K-1)(F+B) beside the work (Narayanan et al., 2021, section 2.2). Of micro-batches in S
    slices (Seq1F1B, Sun et al., 2024) rank r runs K - r + S - 1 slices ahead: (K-1)(F+B) of a slice beside the work.
    """
    return _in_rounds(placement, micro_batches, lambda behind: behind + slices, slices=slices)


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
    return _in_rounds(placement, micro_batches, lambda behind: behind + 1, late=lambda r: r)


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
    return _in_rounds(placement, micro_batches, lambda behind: 2 * behind + 1, late=lambda r: 2 * r)


def interleaved(placement: Placement, micro_batches: int) -> Table:
    """The table of interleaved 1F1B: rounds of K micro-batches go through the v stages of a rank in turn.

    ```text
    rank 0  F0 F1 f0 f1 F2 .. b0--- F3 b1--- f2 B0--- f3 B1--- .. b2--- .. b3--- B2--- B3---
    rank 1  .. F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .. ..
    ```

    (K-1)(F+B) of one stage beside the work, which is 1/v of fill-drain's, for K + (K-1)/v of a rank's activations
    (Narayanan et al., 2021, section 2.2). Where K does not divide M, rounds are longer: fill and drain stay as they
    are, and more is held.
    """
    return _in_rounds(placement, micro_batches, lambda behind: 2 * behind + 1)


def interleaved_zb(placement: Placement, micro_batches: int) -> Table:
    """The table of interleaved zero bubble: fewer forwards ahead than interleaved 1F1B, since I takes less than B.

    ```text
    rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    rank 1  .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
    ```

    (K-1)F/v beside the work for K micro-batches held.
    """
    return _in_rounds(placement, micro_batches, lambda behind: behind + 1, late=lambda r: r)


def _in_rounds(
    placement: Placement, micro_batches: int, ahead: ByRank, late: ByRank | None = None, slices: int = 1
) -> Table:
    """A forward for each backward, in rounds through the stages of each rank, as `one_for_one` has it.

    `ahead`: the forwards by which a rank's last stage is, of the ranks behind it. Rounds are of K micro-batches or,
    where K does not divide M, of as few more as can be, the largest first.
    """
    ranks = max(placement) + 1
    rounds = max(1, micro_batches // ranks)
    sizes = [micro_batches // rounds + (number < micro_batches % rounds) for number in range(rounds)]

    def through(stages: Sequence[int]) -> list[int]:
        return [stage for size in sizes for stage in stages for _ in range(size)]

    def cells(r: int) -> Iterable[Cell]:
        stages = range(r, len(placement), ranks)
        before = (len(stages) - 1) * max(ranks, sizes[0]) + ahead(ranks - 1 - r)
        return one_for_one(through(stages), through(stages[::-1]), before, late(r) if late else None)

    return Rows(ranks, cells, micro_batches, slices)
