"""Which rank holds which stage. A placement gives None where it cannot put so many stages on a rank."""

from typing import TypeAlias

Placement: TypeAlias = tuple[int, ...]
"""The rank of each stage."""


def loop(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Places the stages on the ranks in turn, from the first rank again after the last.

    >>> loop(3), loop(2, stages_per_rank=2)
    ((0, 1, 2), (0, 1, 0, 1))
    """
    return tuple(range(ranks)) * stages_per_rank


def line(ranks: int, stages_per_rank: int) -> Placement | None:
    """One stage on each rank."""
    return loop(ranks) if stages_per_rank == 1 else None


def loops(ranks: int, stages_per_rank: int) -> Placement | None:
    """A loop of two turns or more."""
    return loop(ranks, stages_per_rank) if stages_per_rank > 1 else None


def vee(ranks: int, stages_per_rank: int) -> Placement | None:
    """Places the stages down the ranks and up again, so that the first rank holds the first and the last stage.

    >>> vee(3, stages_per_rank=2)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks))) if stages_per_rank == 2 else None
