"""Which rank holds which stage, and the order in which a rank takes the stages that it holds."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from gpipe.plan.action import Action, Kind
from gpipe.plan.program import Rows

Placement: TypeAlias = tuple[int, ...]
"""The rank of each stage."""


def loop(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Places the stages on the ranks in turn, from the first rank again after the last.

    >>> loop(3), loop(2, stages_per_rank=2)
    ((0, 1, 2), (0, 1, 0, 1))
    """
    return tuple(range(ranks)) * stages_per_rank


def rows_in_step(kind: Kind, path: Sequence[int], placement: Placement, micro_batches: int) -> Rows:
    """The actions of one kind by rank, where each micro-batch takes the path from stage to stage.

    At each tick of a clock every rank does one action: of those that are ready, that of the oldest micro-batch. So
    micro-batches overtake each other at no stage, and the rows have a legal order, that of the ticks.

    >>> for row in rows_in_step(Kind.FORWARD, [0, 1, 2, 3], (0, 1, 0, 1), micro_batches=3):
    ...     print(*row)
    0F0 0F1 2F0 2F1 0F2 2F2
    1F0 1F1 3F0 3F1 1F2 3F2
    """
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done = dict.fromkeys(path, 0)
    while done[path[-1]] < micro_batches:
        arrived = {path[0]: micro_batches} | {after: done[before] for before, after in pairwise(path)}
        for rank, row in enumerate(rows):
            ready = [(done[s], s) for s in path if placement[s] == rank and done[s] < arrived[s]]
            if ready:
                micro_batch, stage = min(ready)
                row.append(Action(kind, stage, micro_batch))
                done[stage] += 1
    return tuple(map(tuple, rows))
