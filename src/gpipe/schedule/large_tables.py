"""Times a page over thousands of ranks and micro-batches, whose actions are too many to be objects.

At each tick all ranks that can go on do their next action, by one operation on arrays for all of them. What comes of
it is what the simulator says, messages that wait for each other included.
"""

from collections.abc import Collection, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from gpipe.schedule.action import Action, Kind, Route, nth_backward
from gpipe.schedule.cost import Costs, seconds
from gpipe.schedule.schedules.writing import KINDS, Numbers, Placement, Rows, numbered
from gpipe.schedule.simulate import Figures, _one_per_micro_batch
from gpipe.schedule.timeline import Timeline

Whole = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class LargeTable:
    """The rows of a page in numbers, timed by what its stages cost; some stages may recompute all micro-batches.

    Perhaps as they are run, with what stands together of a split backward joined, as `lower.join_backwards` does.

    An action is 8 times its stage and the place of its kind in `KINDS`; and 4 more in a forward and a backward of one
    micro-batch at one stage between which nothing is, so that nothing is recomputed.

    >>> from gpipe.schedule.schedules.by_name import table_of
    >>> from gpipe.schedule.simulate import UNIT_COST
    >>> rows, placement = table_of("zb_v", ranks=64, micro_batches=256)
    >>> many = LargeTable(rows, placement)
    >>> many.seconds([UNIT_COST] * 128), len(rows[63])
    (1599.0, 1536)
    """

    def __init__(self, rows: Rows, rank_of: Placement, *, joined: bool = False) -> None:
        self.rows, self.rank_of, self.joined = rows, rank_of, joined
        self.row = cache(self._row)
        # of what a stage takes as its n-th backward, the number among its forwards
        self._of_backward = np.array([nth_backward(nth, rows.slices) for nth in range(rows.micro_batches)])

    def _row(self, rank: int) -> Numbers:
        kind, stage, nth = numbered(self.rows.cells(rank), self.rows.micro_batches)
        nth = np.where(kind == 0, nth, self._of_backward[nth])
        same = (stage[:-1] == stage[1:]) & (nth[:-1] == nth[1:])
        if self.joined:
            stays = np.equal(self.rank_of, (self.rank_of[0], *self.rank_of[:-1]))  # what I gives, or nothing is given
            late = np.append(False, same & (kind[:-1] == 2) & (kind[1:] == 3) & stays[stage[:-1]])
            kind = np.where(np.append(late[1:], False), 1, kind)
            kind, stage, nth = kind[~late], stage[~late], nth[~late]
            same = (stage[:-1] == stage[1:]) & (nth[:-1] == nth[1:])
        follows = same & (kind[:-1] == 0) & ((kind[1:] == 1) | (kind[1:] == 2))
        row: Numbers = 8 * stage + kind
        row[:-1][follows] += 4
        row[1:][follows] += 4
        return row

    @property
    def _every(self) -> Iterator[Numbers]:
        return map(self.row, range(len(self.rows)))

    def figures(self, costs: Costs) -> Figures:
        """What `gpipe.schedule.simulate.figures` says of the table, but for its spans."""
        took, takes = self.seconds(costs), self._takes(costs)
        busy = [float(takes[row].sum()) for row in self._every]
        ranks, each = len(self.rows), len(self.rank_of) // len(self.rows)
        _, whole, split, _ = np.sum([np.bincount(row & 3, minlength=4) for row in self._every], axis=0)
        ones = _one_per_micro_batch(costs)
        return Figures(
            timeline=Timeline(ranks, (), took),
            work=max(busy),
            bubble=1 - sum(busy) / (ranks * took),
            peaks=tuple(self.peak_bytes(rank, ones) / each / self.rows.slices for rank in range(ranks)),
            split=float(split / (whole + split)),
        )

    def busy(self, costs: Costs, again: Collection[int] = ()) -> float:
        """The seconds that all ranks compute together."""
        took = self._takes(costs) + self._before(costs, again)
        return float(sum(took[row].sum() for row in self._every))

    def peak_bytes(self, rank: int, costs: Costs, again: Collection[int] = ()) -> int:
        """The most that a rank holds, but for messages that wait; what a split backward leaves counts as inside."""
        row = self.row(rank)
        stage, forward, backward, end = _parts(row)
        own, at = np.unique(stage, return_inverse=True)
        sizes = [(costs[s].boundary, costs[s].activations, costs[s].working, s in again) for s in own.tolist()]
        boundary, inside, working, recomputes = np.array(sizes)[at].T
        redone = (recomputes == 1) & (row & 4 == 0)
        made = forward * (boundary + inside * ~redone) + (backward & redone) * inside
        left = end * (boundary + inside)
        beside = left + backward * working + (forward & redone) * inside
        return sum(costs[int(s)].state for s in own) + int((np.cumsum(made - left) + beside).max())

    def seconds(self, costs: Costs, again: Collection[int] = ()) -> float:
        """How long a mini-batch takes."""
        stages, ranks = len(self.rank_of), len(self.rows)
        takes, before = self._takes(costs), self._before(costs, again)
        back, always, never, nowhere = stages, *(2 * stages + n for n in range(3))
        # What an action waits for, and who waits for it: places of a forward at each stage, and of a backward.
        awaits = np.array([*(slot for s in range(stages) for slot in (s, back + s, back + s, always) * 2), never])
        brings = np.full(8 * stages, nowhere)
        for s in range(stages):
            brings[8 * s : 8 * s + 8 : 4] = s + 1 if s + 1 < stages else nowhere
            brings[[8 * s + n for n in (1, 2, 5, 6)]] = back + s - 1 if s else nowhere
        links, sent = self._links(costs)
        brought = np.full((2 * stages + 3, self.rows.micro_batches), np.inf)  # when, by place and micro-batch
        brought[[0, back + stages - 1, always]] = 0.0
        # behind its end a row awaits what never comes
        rows = np.full((ranks, 1 + max(map(len, self._every))), 8 * stages)
        for row, known in zip(rows, self._every, strict=True):
            row[: len(known)] = known
        done, idle, free = np.zeros(len(brought), int), np.zeros(links.max() + 1), np.zeros(ranks)
        rank, at = np.arange(ranks), np.zeros(ranks, int)
        while True:
            action = rows[rank, at]
            place = awaits[action]
            number = done[place]
            there = brought[place, number]
            (can,) = np.nonzero(there < np.inf)
            if not len(can):
                return float(free.max())
            action, place, number = action[can], place[can], number[can]
            free[can] = ends = np.maximum(free[can] + before[action], there[can]) + takes[action]
            link = links[action]
            idle[link] = ends = np.maximum(idle[link], ends) + sent[action]
            brought[brings[action], number] = ends
            done[place] += 1
            done[always] = 0
            at[can] += 1

    def _takes(self, costs: Costs) -> Seconds:
        return np.array([seconds(Action(kind, stage), costs) for stage in range(len(costs)) for kind in KINDS * 2])

    def _before(self, costs: Costs, again: Collection[int]) -> Seconds:
        """How long each recomputes before it, if these stages do."""
        found = np.zeros((len(costs), 8))
        for stage in again:
            found[stage, 1:3] = seconds(Action(Kind.RECOMPUTE, stage), costs)
        return found.ravel()

    def _links(self, costs: Costs) -> tuple[Whole, Seconds]:
        """Of each action, the link by which its message goes, and how long; a rank's to itself takes no time."""
        known: dict[tuple[int, int], int] = {}
        links, sent = [], []
        for stage, own in enumerate(self.rank_of):
            for to in (stage + 1, stage - 1, stage - 1, stage) * 2:
                other = self.rank_of[to] if 0 <= to < len(self.rank_of) else own
                links.append(known.setdefault((own, other), len(known)))
                route = Route(min(stage, to), max(stage, to))
                sent.append(seconds(Action(Kind.SEND, stage, route=route), costs) if own != other else 0.0)
        return np.array(links), np.array(sent)


def _parts(row: Numbers) -> tuple[Numbers, Flags, Flags, Flags]:
    """The stage of each action of a row, and whether it is a forward, a backward, or the last of its micro-batch."""
    kind = row & 3
    return row >> 3, kind == 0, (kind == 1) | (kind == 2), (kind == 1) | (kind == 3)
