"""1F1B and its variants: once the pipeline is full, each rank alternates between forwards and backwards.

- 1F1B is the synchronous form of PipeDream's order.
- ZB-H1 and ZB-H2 split the backwards, so that W fills idle time (Qi et al., 2023).
- Interleaved 1F1B (Megatron-LM) has several stages on each rank. Interleaved zero bubble also splits the backwards.

The docstrings state the idle time of each rank: the step time minus the work of a rank. F, I, W and B = I + W are the
seconds of one micro-batch in all stages of a rank, and K is the number of ranks. Section numbers refer to the cited
papers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from gpipe.schedule.program import Table
from gpipe.schedule.schedules.writing import Cell, Placement, Rows, one_for_one

ByRank: TypeAlias = Callable[[int], int]


def one_forward_one_backward(placement: Placement, micro_batches: int, slices: int = 1) -> Table:
    """Returns the table of 1F1B. Rank r runs K - r forwards ahead, so it holds K - r micro-batches instead of M.

    ```text
    rank 0  F0 F1 F2 .. .. .. .. B0--- F3 B1--- .. B2--- .. B3---
    rank 1  .. F0 F1 .. .. B0--- F2 B1--- F3 B2--- .. B3--- .. ..
    rank 2  .. .. F0 B0--- F1 B1--- F2 B2--- F3 B3--- .. .. .. ..
    ```

    The idle time is (K-1)(F+B), as for fill-drain (Narayanan et al., 2021, section 2.2). With S slices for each
    micro-batch (Seq1F1B, Sun et al., 2024), rank r runs K - r + S - 1 slices ahead. Then the idle time is (K-1)(F+B),
    where F and B are the seconds of one slice.
    """
    return _in_rounds(placement, micro_batches, lambda later: later + slices, slices=slices)


def zb_h1(placement: Placement, micro_batches: int) -> Table:
    """Returns the table of ZB-H1: the forwards of 1F1B. On rank r, each W comes after r later I.

    ```text
    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    ```

    The idle time is (K-1)(F+I-W), a third of 1F1B's if F = I = W. A rank holds at most K micro-batches, like the
    first rank of 1F1B (section 2.3).
    """
    return _in_rounds(placement, micro_batches, lambda later: later + 1, late=lambda r: r)


def zb_h2(placement: Placement, micro_batches: int) -> Table:
    """Returns the table of ZB-H2: rank r runs 2(K-r)-1 forwards ahead, and each W comes after 2r later I.

    ```text
    rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
    rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
    rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    ```

    No rank is idle between its first and its last action, so the idle time is (K-1)F. A rank holds at most 2K-1
    micro-batches (section 2.3).
    """
    return _in_rounds(placement, micro_batches, lambda later: 2 * later + 1, late=lambda r: 2 * r)


def interleaved(placement: Placement, micro_batches: int) -> Table:
    """Returns the table of interleaved 1F1B: rounds of K micro-batches pass through the v stages of a rank in turn.

    ```text
    rank 0  F0 F1 f0 f1 F2 .. b0--- F3 b1--- f2 B0--- f3 B1--- .. b2--- .. b3--- B2--- B3---
    rank 1  .. F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .. ..
    ```

    The idle time is (K-1)(F+B) of one stage, which is 1/v of fill-drain's. A rank holds the activations of up to K +
    (K-1)/v micro-batches (Narayanan et al., 2021, section 2.2). If M is not divisible by K, rounds are longer. Then
    the idle time is the same, and ranks hold more micro-batches.
    """
    return _in_rounds(placement, micro_batches, lambda later: 2 * later + 1)


def interleaved_zb(placement: Placement, micro_batches: int) -> Table:
    """Returns the table of interleaved zero bubble.

    Ranks run fewer forwards ahead than in interleaved 1F1B, as I is short.

    ```text
    rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    rank 1  .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
    ```

    The idle time is (K-1)F/v, and a rank holds at most K micro-batches.
    """
    return _in_rounds(placement, micro_batches, lambda later: later + 1, late=lambda r: r)


def _in_rounds(
    placement: Placement, micro_batches: int, ahead: ByRank, late: ByRank | None = None, slices: int = 1
) -> Table:
    """Returns a table that alternates forwards and backwards, in rounds through the stages of a rank.

    Rounds have K micro-batches. If M is not divisible by K, rounds have as few additional micro-batches as possible,
    and the longest rounds come first.

    Args:
        placement: The rank of each stage.
        micro_batches: M. With slices, the total number of slices.
        ahead: A function that returns how many forwards the last stage of a rank runs before its first backward. Its
            argument is the number of ranks after this rank.
        late: A function that returns for a rank how many later I come before each W. None means whole backwards.
        slices: The number of slices of each micro-batch.
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
