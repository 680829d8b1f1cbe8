"""Defines placements of stages on ranks, and helpers that write the actions of each rank."""

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
"""The rank of each stage."""


def loop(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Returns a placement in rounds, such as `(0, 1, 0, 1)`: after the last rank comes the first rank again."""
    return tuple(range(ranks)) * stages_per_rank


def line(ranks: int, stages_per_rank: int) -> Placement | None:
    """Returns the placement with one stage on each rank; None for any other number of stages."""
    return loop(ranks) if stages_per_rank == 1 else None


def loops(ranks: int, stages_per_rank: int) -> Placement | None:
    """Returns a placement in at least two rounds; None for one stage per rank."""
    return loop(ranks, stages_per_rank) if stages_per_rank > 1 else None


def vee(ranks: int, stages_per_rank: int) -> Placement | None:
    """Returns a placement in the form of a V, such as `(0, 1, 1, 0)`; None unless each rank has two stages."""
    return (*range(ranks), *reversed(range(ranks))) if stages_per_rank == 2 else None


Cell: TypeAlias = tuple[str, int | None]
"""An action without its micro-batch: F, B, I or W, and the stage. A W without stage belongs to the oldest I that has
no W yet."""
OLDEST: Cell = ("W", None)


def number_of(kind: Kind, nth: int, slices: int) -> int:
    """Returns the micro-batch or slice of the `nth` forward or backward of a stage."""
    if slices == 1:
        return nth
    return Slice(nth if kind is Kind.FORWARD else nth_backward(nth, slices), slices)


def in_turn(cells: Iterable[Cell], micro_batches: int, slices: int = 1) -> RankActions:
    """Returns the actions of a rank: numbers the cells of each stage by micro-batch, in order. Drops excess cells.

    >>> print(*in_turn([("F", 0), ("F", 0), ("B", 0), ("I", 0), ("F", 0), OLDEST, OLDEST], micro_batches=2))
    0F0 0F1 0B0 0I1 0W1
    """
    actions = zip(*(numbers.tolist() for numbers in numbered(cells, micro_batches)), strict=True)
    return tuple(Action(KINDS[kind], stage, number_of(KINDS[kind], nth, slices)) for kind, stage, nth in actions)


KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
Numbers: TypeAlias = npt.NDArray[np.int32]


def numbered(cells: Iterable[Cell], micro_batches: int) -> tuple[Numbers, Numbers, Numbers]:
    """Returns the kind (index in `KINDS`), the stage and the number of each cell.

    The number counts the cells of the same kind at the same stage. B and I are counted together. A W has the number
    of its I. Either all W of a rank have a stage, or no W has a stage.
    """
    codes = np.fromiter(map(_code, cells), np.int32)
    kind, stage, nth = codes & 3, codes >> 2, np.zeros_like(codes)
    for s in np.unique(stage):
        for selected in ((kind == 0) & (stage == s), ((kind == 1) | (kind == 2)) & (stage == s)):
            nth[selected] = np.arange(np.count_nonzero(selected))
    kind, stage, nth = (each[nth < micro_batches] for each in (kind, stage, nth))
    stays = np.ones(len(kind), bool)
    for s in np.unique(stage[kind == 3]):
        inputs, weights = (kind == 2) & ((stage == s) | (s < 0)), (kind == 3) & (stage == s)
        pending = np.cumsum(inputs.astype(int) - weights)  # falls to a new minimum at each W that has no I
        stays &= ~weights | (pending >= np.minimum.accumulate(np.append(0, pending[:-1])))
        (matched,) = np.nonzero(weights & stays)
        (sources,) = np.nonzero(inputs)
        stage[matched], nth[matched] = stage[sources[: len(matched)]], nth[sources[: len(matched)]]
    return kind[stays], stage[stays], nth[stays]


@cache
def _code(cell: Cell) -> int:
    """Returns 4 times the stage of a cell (-1 for no stage), plus the index of its kind in `KINDS`."""
    kind, stage = cell
    return 4 * (-1 if stage is None else stage) + KINDS.index(Kind(kind))


@dataclass(frozen=True, eq=False)
class Rows(Sequence[RankActions]):
    """The actions of each rank, computed when a rank is accessed, because there may be thousands of ranks."""

    ranks: int
    cells: Callable[[int], Iterable[Cell]]  # the cells of a rank
    micro_batches: int
    slices: int = 1

    def __len__(self) -> int:
        return self.ranks

    @overload
    def __getitem__(self, index: int) -> RankActions: ...
    @overload
    def __getitem__(self, index: slice) -> Table: ...
    def __getitem__(self, index: int | slice) -> RankActions | Table:
        if isinstance(index, slice):
            return tuple(map(self.__getitem__, range(self.ranks)[index]))
        return in_turn(self.cells(range(self.ranks)[index]), self.micro_batches, self.slices)


def one_for_one(
    forwards: Sequence[int], backwards: Sequence[int], ahead: int, late: int | None = None
) -> Iterator[Cell]:
    """Yields `ahead` forwards, and then alternates between backwards and forwards.

    Args:
        forwards: The stages of the forwards, in order.
        backwards: The stages of the backwards, in order.
        ahead: The number of forwards before the first backward.
        late: The number of later I before each W. None means whole backwards. Default: None.

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
    """Returns the table of one kind of action. Every micro-batch passes through the stages of `path` in order.

    At each tick of a clock, every rank executes one action: of the ready actions, the action of the oldest
    micro-batch. So each stage runs the micro-batches in order, and the order of the ticks is valid.
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
