"""Times a table again and again with other costs: many times as fast as `simulate`, to the same numbers."""

from collections.abc import Collection, Iterable, Sequence
from functools import cache, cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.cost import StageCost, seconds
from gpipe.schedule.lower import Remat, recomputed
from gpipe.schedule.order import linearize_with_needs
from gpipe.schedule.program import Program
from gpipe.schedule.rules import BACKWARDS

Cell: TypeAlias = tuple[int, int | None]
"""A stage and a micro-batch."""
Counts: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Own: TypeAlias = tuple[StageCost, ...]
"""What the stages of one rank cost."""
Each = TypeVar("Each")
TIMED = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)
ENDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""Behind these a stage keeps nothing more of a micro-batch."""


class Rehearsal:
    """A table of forwards and backwards, with what each waits for on other ranks.

    What is recomputed is no part of it, so that one table serves for every remat.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> rehearsal = Rehearsal(program_of("gpipe", ranks=2, micro_batches=4))
    >>> costs = [StageCost(forward=1.0, backward=2.0, boundary=10, inside=100)] * 2
    >>> rehearsal.seconds(costs, set()), rehearsal.peak(0, (costs[0],), ("never",))
    (15.0, 440)
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.cells = {cell: at for at, cell in enumerate(_cells(program))}
        self._timed = [Action(kind, stage) for stage in range(program.stages) for kind in TIMED]
        self.stages_of = [
            [s for s, own in enumerate(program.rank_of) if own == rank] for rank in range(program.ranks)
        ]
        self._by_stage, self.held = cache(self._recomputed), cache(self._held)
        self._held_by, self._masks = cache(self._held_by_stage), cache(self._find_masks)

    @cached_property
    def _steps(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """Of each action seven numbers, as `seconds` takes them.

        Its rank; its place in `takes` and that of a recompute before it, with its cell, or the one behind the last
        where none can be; the step on another rank that it waits for or -1; the link that carries what it makes to
        another rank or -1, and that message's place in `under_way`.
        """
        at: dict[Action, int] = {}
        steps, links = [], dict[tuple[int, int], int]()
        messages: dict[int, tuple[int, int]] = {}
        for rank, _, action, needed in linearize_with_needs(self.program):
            stage, gradient = action.stage, action.kind in BACKWARDS
            far = [need for need in needed if self.program.rank_of[need.stage] != rank]
            place = stage * len(TIMED)
            cell = self.cells[stage, action.micro_batch] if gradient else len(self.cells)
            if far:
                link = links.setdefault((self.program.rank_of[far[0].stage], rank), len(links))
                messages[at[far[0]]] = link, 2 * far[0].stage + gradient
            before = at[far[0]] if far else -1
            steps.append((rank, place + TIMED.index(action.kind), place + TIMED.index(Kind.RECOMPUTE), cell, before))
            at[action] = len(at)
        return [(*step, *messages.get(number, (-1, 0))) for number, step in enumerate(steps)]

    def seconds(self, costs: Sequence[StageCost], again: Collection[Cell]) -> float:
        """How long a mini-batch takes, with these cells recomputed."""
        takes = [seconds(action, costs) for action in self._timed]
        under_way = [number for cost in costs for number in (cost.send, _back(cost))]
        recomputes = bytearray(len(self.cells) + 1)
        for stage_and_micro_batch in again:
            recomputes[self.cells[stage_and_micro_batch]] = 1
        free, arrivals = [0.0] * self.program.ranks, [0.0] * len(self._steps)
        idle = [0.0] * self.program.ranks**2  # from when on links are
        for at, (rank, place, recompute, cell, far, link, message) in enumerate(self._steps):
            start = free[rank]
            if recomputes[cell]:
                start += takes[recompute]
            if far >= 0:
                start = max(start, arrivals[far])
            free[rank] = end = start + takes[place]
            if link >= 0:
                arrivals[at] = idle[link] = max(end, idle[link]) + under_way[message]
        return max(free)

    def busy(self, costs: Sequence[StageCost], again: Collection[Cell]) -> float:
        """The seconds that all ranks compute together."""
        actions = sum(seconds(action, costs) for row in self.program.rows for action in row)
        return actions + sum(seconds(Action(Kind.RECOMPUTE, *cell), costs) for cell in again)

    def recomputed(self, stage: int, remat: Remat) -> frozenset[Cell]:
        """What a stage recomputes."""
        return self._by_stage(self.program.rank_of[stage], remat)[stage]

    def _recomputed(self, rank: int, remat: Remat) -> dict[int, frozenset[Cell]]:
        """What each stage of a rank recomputes, if all have this remat."""
        again = recomputed(self.program.rows[rank], [remat] * self.program.stages)
        return {stage: frozenset(cell for cell in again if cell[0] == stage) for stage in self.stages_of[rank]}

    def of_rank(self, rank: int, of_stages: Sequence[Each]) -> tuple[Each, ...]:
        """What is said of a rank's stages, of what is said of all."""
        return tuple(of_stages[stage] for stage in self.stages_of[rank])

    def peak(self, rank: int, own: Own, remat: tuple[Remat, ...]) -> int:
        """The most bytes that a rank holds, if its stages cost so much and have this remat, each its own."""
        sizes = [size for cost in own for size in (cost.boundary, cost.inside, cost.working)]
        return sum(cost.state for cost in own) + int((self.held(rank, remat) @ sizes).max())

    def _held(self, rank: int, remat: tuple[Remat, ...]) -> Counts:
        """During each action of a rank, of each of its stages, how many boundaries, insides and workings it holds."""
        stages = zip(self.stages_of[rank], remat, strict=True)
        return np.stack([counts for own in stages for counts in self._held_by(*own)], axis=1)

    def _held_by_stage(self, stage: int, remat: Remat) -> tuple[Counts, Counts, Counts]:
        """During each action of its rank, how many boundaries, insides and workings of a stage are held.

        What a forward makes inside lives at least until it ends.
        """
        forward, ends, working, cells = self._masks(stage)
        again = np.zeros(len(self.cells), np.bool_)
        again[[self.cells[cell] for cell in self.recomputed(stage, remat)]] = True
        redone = again[cells]
        backward = working & redone
        boundaries = _during(forward, forward.astype(int) - ends)
        insides = _during(forward | backward, (forward & ~redone).astype(int) + backward - ends)
        return boundaries, insides, working.astype(int)

    def _find_masks(self, stage: int) -> tuple[Mask, Mask, Mask, Counts]:
        """Which actions of its rank are forwards of a stage, ends, backwards that begin; and the cell of each."""
        row = self.program.rows[self.program.rank_of[stage]]
        own = [action.stage == stage for action in row]
        forward, ends, working = (
            np.array([is_own and action.kind in kinds for is_own, action in zip(own, row, strict=True)])
            for kinds in ((Kind.FORWARD,), ENDS, BACKWARDS)
        )
        cells = [self.cells[action.stage, action.micro_batch] for action in row]
        return forward, ends, working, np.array(cells)

    def in_flight(self, stage: int) -> int:
        """The most micro-batches of which a stage keeps something at once."""
        rank = self.program.rank_of[stage]
        at = 3 * self.stages_of[rank].index(stage)
        return int(self.held(rank, ("never",) * len(self.stages_of[rank]))[:, at].max())


def _during(added: Mask, change: Counts) -> Counts:
    """How many there are during each action; some add one meanwhile, and each changes the number when it ends."""
    count: Counts = np.cumsum(change) - change + added
    return count


def _cells(program: Program) -> Iterable[Cell]:
    return ((stage, m) for stage in range(program.stages) for m in range(program.micro_batches))


def _back(cost: StageCost) -> float:
    return cost.send if cost.send_gradient is None else cost.send_gradient
