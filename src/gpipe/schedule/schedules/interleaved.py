"""Interleaved 1F1B (Megatron-LM), and the same with split backwards: several stages a rank, in a loop."""

from collections.abc import Callable, Iterable, Sequence

from gpipe.schedule.program import Table
from gpipe.schedule.schedules.writing import Cell, Placement, in_turn, one_for_one


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
    return _in_rounds(placement, micro_batches, lambda behind: 2 * behind + 1, split=False)


def interleaved_zb(placement: Placement, micro_batches: int) -> Table:
    """The table of interleaved zero bubble: fewer forwards ahead than interleaved 1F1B, since I takes less than B.

    ```text
    rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    rank 1  .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
    ```

    (K-1)F/v beside the work for K micro-batches held.
    """
    return _in_rounds(placement, micro_batches, lambda behind: behind + 1, split=True)


def _in_rounds(placement: Placement, micro_batches: int, ahead: Callable[[int], int], *, split: bool) -> Table:
    """Rounds through the stages of each rank; `ahead`: the forwards by which its last is, of the ranks behind it.

    Rounds are of K micro-batches or, where K does not divide M, of as few more as can be, the largest first.
    """
    ranks = max(placement) + 1
    rounds = max(1, micro_batches // ranks)
    sizes = [micro_batches // rounds + (number < micro_batches % rounds) for number in range(rounds)]

    def through(stages: Sequence[int]) -> list[int]:
        return [stage for size in sizes for stage in stages for _ in range(size)]

    def cells(r: int) -> Iterable[Cell]:
        stages = range(r, len(placement), ranks)
        before = (len(stages) - 1) * max(ranks, sizes[0]) + ahead(ranks - 1 - r)
        return one_for_one(through(stages), through(stages[::-1]), before, late=r if split else None)

    return tuple(in_turn(cells(r), micro_batches) for r in range(ranks))
