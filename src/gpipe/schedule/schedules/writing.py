"""Which rank holds which stage, and ways to write a row: micro-batch after micro-batch at every stage."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from gpipe.schedule.action import Action, Kind, Slice, nth_backward
from gpipe.schedule.program import RankActions, Table

Placement: TypeAlias = tuple[int, ...]
"""The rank of each stage. What makes one gives None where it cannot put so many stages on a rank."""


def loop(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Places the stages on the ranks in turn, from the first rank again after the last: `(0, 1, 0, 1)`."""
    return tuple(range(ranks)) * stages_per_rank


def line(ranks: int, stages_per_rank: int) -> Placement | None:
    """One stage on each rank."""
    return loop(ranks) if stages_per_rank == 1 else None


def loops(ranks: int, stages_per_rank: int) -> Placement | None:
    """A loop of two turns or more."""
    return loop(ranks, stages_per_rank) if stages_per_rank > 1 else None


def vee(ranks: int, stages_per_rank: int) -> Placement | None:
    """Down the ranks and up again, so that the first rank holds the first and the last stage: `(0, 1, 1, 0)`."""
    return (*range(ranks), *reversed(range(ranks))) if stages_per_rank == 2 else None


Cell: TypeAlias = tuple[str, int | None]
"""F, B, I or W is done next, and at which stage; a W at no stage is that of the oldest I whose W is still to come."""
OLDEST: Cell = ("W", None)


def number_of(kind: Kind, nth: int, slices: int) -> int:
    """The number of what a stage takes as its n-th, forward or backward."""
    if slices == 1:
        return nth
    return Slice(nth if kind is Kind.FORWARD else nth_backward(nth, slices), slices)


def in_turn(cells: Iterable[Cell], micro_batches: int, slices: int = 1) -> RankActions:
    """Gives the cells of each stage the micro-batches in their order; those for which there is none are left out.

    >>> print(*in_turn([("F", 0), ("F", 0), ("B", 0), ("I", 0), ("F", 0), OLDEST, OLDEST], micro_batches=2))
    0F0 0F1 0B0 0I1 0W1
    """
    each = zip(*(numbers.tolist() for numbers in numbered(cells, micro_batches)), strict=True)
    return tuple(Action(KINDS[kind], stage, number_of(KINDS[kind], nth, slices)) for kind, stage, nth in each)


KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
Numbers: TypeAlias = npt.NDArray[np.int32]


def numbered(cells: Iterable[Cell], micro_batches: int) -> tuple[Numbers, Numbers, Numbers]:
    """What is done, by its place in `KINDS`, at which stage, and as the how manieth there: a W as its I.

    All W of a row are at no stage, or each is at its own.
    """
    codes = np.fromiter(map(_code, cells), np.int32)
    kind, stage, nth = codes & 3, codes >> 2, np.zeros_like(codes)
    for own in np.unique(stage):
        for these in ((kind == 0) & (stage == own), ((kind == 1) | (kind == 2)) & (stage == own)):
            nth[these] = np.arange(np.count_nonzero(these))
    kind, stage, nth = (each[nth < micro_batches] for each in (kind, stage, nth))
    stays = np.ones(len(kind), bool)
    for own in np.unique(stage[kind == 3]):
        owing, due = (kind == 2) & ((stage == own) | (own < 0)), (kind == 3) & (stage == own)
        owed = np.cumsum(owing.astype(int) - due)  # falls to a new least where there is no I for a W
        stays &= ~due | (owed >= np.minimum.accumulate(np.append(0, owed[:-1])))
        (paid,) = np.nonzero(due & stays)
        (of,) = np.nonzero(owing)
        stage[paid], nth[paid] = stage[of[: len(paid)]], nth[of[: len(paid)]]
    return kind[stays], stage[stays], nth[stays]


@cache
def _code(cell: Cell) -> int:
    """4 times the stage of a cell, -1 for none, and the place of its kind."""
    kind, stage = cell
    return 4 * (-1 if stage is None else stage) + KINDS.index(Kind(kind))


@dataclass(frozen=True, eq=False)
class Rows(Sequence[RankActions]):
    """The table of a page, of which a row is written when it is asked for: there may be thousands."""

    ranks: int
    cells: Callable[[int], Iterable[Cell]]  # of a rank
    micro_batches: int
    slices: int = 1

    def __len__(self) -> int:
        return self.ranks

    @overload
    def __getitem__(self, at: int) -> RankActions: ...
    @overload
    def __getitem__(self, at: slice) -> Table: ...
    def __getitem__(self, at: int | slice) -> RankActions | Table:
        if isinstance(at, slice):
            return tuple(map(self.__getitem__, range(self.ranks)[at]))
        return in_turn(self.cells(range(self.ranks)[at]), self.micro_batches, self.slices)


def one_for_one(
    forwards: Sequence[int], backwards: Sequence[int], ahead: int, late: int | None = None
) -> Iterator[Cell]:
    """A forward at each of the stages for each backward, once so many forwards are ahead.

    A W stands behind `late` I more than its own; None for backwards that are whole.

    >>> "".join(kind for kind, _ in one_for_one([0] * 4, [0] * 4, ahead=2, late=1))
    'FFIFIWFIWIWW'
    """
    yield from (("F", stage) for stage in forwards[:ahead])
    following = iter(forwards[ahead:])
    for number, stage in enumerate(backwards):
        yield ("B" if late is None else "I", stage)
        if late is not None and number >= late:
            yield OLDEST
        if (forward := next(following, None)) is not None:
            yield ("F", forward)
    yield from [OLDEST] * (late or 0)


def table_in_step(
    kind: Kind, path: Sequence[int], placement: Placement, micro_batches: int, slices: int = 1
) -> Table:
    """The actions of one kind by rank, where each micro-batch takes the path from stage to stage.

    At each tick of a clock every rank does one action: of those that are ready, that of the oldest micro-batch. So
    micro-batches overtake each other at no stage, and the rows have a legal order, that of the ticks.
    """
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done = dict.fromkeys(path, 0)
    while done[path[-1]] < micro_batches:
        arrived = {path[0]: micro_batches} | {after: done[before] for before, after in pairwise(path)}
        for rank, row in enumerate(rows):
            ready = [(done[s], s) for s in path if placement[s] == rank and done[s] < arrived[s]]
            if ready:
                micro_batch, stage = min(ready)
                row.append(Action(kind, stage, number_of(kind, micro_batch, slices)))
                done[stage] += 1
    return tuple(map(tuple, rows))
