"""Simulates schedules with thousands of ranks and micro-batches, without an object for each action.

In each round, every rank whose next action is ready executes it. Array operations process all ranks at once. The
results are the same as in `gpipe.schedule.simulate`, including messages that wait for each other on a link.
"""

from collections.abc import Collection, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from gpipe.schedule.action import Action, Kind, Route, nth_backward
from gpipe.schedule.cost import Costs, seconds
from gpipe.schedule.schedules.writing import KINDS, Numbers, Placement, Rows, numbered
from gpipe.schedule.simulate import Figures, count_one_per_micro_batch
from gpipe.schedule.timeline import Timeline

Integers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class LargeTable:
    """The actions of all ranks as numbers, for fast simulation. Each stage recomputes all micro-batches, or none.

    The number of an action is 8 times its stage, plus the index of its kind in `KINDS`. The number is 4 higher for a
    forward that its backward follows immediately, and for this backward: the micro-batch is not recomputed there.

    Args:
        rows: The actions of each rank.
        rank_of: The rank of each stage.
        joined: Whether to replace adjacent I and W by one B, like `lower.join_backwards`. Default: False.

    >>> from gpipe.schedule.schedules.by_name import table_of
    >>> from gpipe.schedule.simulate import UNIT_COST
    >>> rows, placement = table_of("zb_v", ranks=64, micro_batches=256)
    >>> table = LargeTable(rows, placement)
    >>> table.seconds([UNIT_COST] * 128), len(rows[63])
    (1599.0, 1536)
    """

    def __init__(self, rows: Rows, rank_of: Placement, *, joined: bool = False) -> None:
        self.rows, self.rank_of, self.joined = rows, rank_of, joined
        self.row = cache(self._row)
        # Maps the n-th backward of a stage to the number of its forward.
        self._of_backward = np.array([nth_backward(nth, rows.slices) for nth in range(rows.micro_batches)])

    def _row(self, rank: int) -> Numbers:
        kind, stage, nth = numbered(self.rows.cells(rank), self.rows.micro_batches)
        nth = np.where(kind == 0, nth, self._of_backward[nth])
        same = (stage[:-1] == stage[1:]) & (nth[:-1] == nth[1:])
        if self.joined:
            # Joining delays no other rank if the preceding stage is on the same rank, or if there is none.
            local = np.equal(self.rank_of, (self.rank_of[0], *self.rank_of[:-1]))
            weights = np.append(False, same & (kind[:-1] == 2) & (kind[1:] == 3) & local[stage[:-1]])
            kind = np.where(np.append(weights[1:], False), 1, kind)
            kind, stage, nth = kind[~weights], stage[~weights], nth[~weights]
            same = (stage[:-1] == stage[1:]) & (nth[:-1] == nth[1:])
        immediate = same & (kind[:-1] == 0) & ((kind[1:] == 1) | (kind[1:] == 2))
        row: Numbers = 8 * stage + kind
        row[:-1][immediate] += 4
        row[1:][immediate] += 4
        return row

    @property
    def _all_rows(self) -> Iterator[Numbers]:
        return map(self.row, range(len(self.rows)))

    def figures(self, costs: Costs) -> Figures:
        """Returns the same figures as `gpipe.schedule.simulate.figures`, without the spans of the timeline."""
        total, each = self.seconds(costs), self._seconds_by_action(costs)
        busy = [float(each[row].sum()) for row in self._all_rows]
        ranks, stages_per_rank = len(self.rows), len(self.rank_of) // len(self.rows)
        _, whole, split, _ = np.sum([np.bincount(row & 3, minlength=4) for row in self._all_rows], axis=0)
        ones, per_peak = count_one_per_micro_batch(costs), stages_per_rank * self.rows.slices
        return Figures(
            timeline=Timeline(ranks, (), total),
            work=max(busy),
            bubble=1 - sum(busy) / (ranks * total),
            peaks=tuple(self.peak_bytes(rank, ones) / per_peak for rank in range(ranks)),
            split=float(split / (whole + split)),
        )

    def busy(self, costs: Costs, recomputed: Collection[int] = ()) -> float:
        """Returns the sum of the computation times of all ranks in seconds, if these stages recompute."""
        each = self._seconds_by_action(costs) + self._recompute_seconds(costs, recomputed)
        return float(sum(each[row].sum() for row in self._all_rows))

    def peak_bytes(self, rank: int, costs: Costs, recomputed: Collection[int] = ()) -> int:
        """Returns the peak memory of a rank in bytes. Messages in flight do not count.

        A split backward keeps the activations until its weight-gradient pass.
        """
        row = self.row(rank)
        stage, forward, backward, end = _parts(row)
        stages, index = np.unique(stage, return_inverse=True)
        sizes = [
            (costs[s].boundary, costs[s].activations, costs[s].working, s in recomputed) for s in stages.tolist()
        ]
        boundary, activations, working, recomputes = np.array(sizes)[index].T
        recompute = (recomputes == 1) & (row & 4 == 0)
        allocated = forward * (boundary + activations * ~recompute) + (backward & recompute) * activations
        freed = end * (boundary + activations)
        temporary = freed + backward * working + (forward & recompute) * activations
        return sum(costs[int(s)].state for s in stages) + int((np.cumsum(allocated - freed) + temporary).max())

    def seconds(self, costs: Costs, recomputed: Collection[int] = ()) -> float:
        """Returns the seconds of a mini-batch, if these stages recompute."""
        stages, ranks = len(self.rank_of), len(self.rows)
        durations, before = self._seconds_by_action(costs), self._recompute_seconds(costs, recomputed)
        # Each action waits for the next entry of one slot, and adds an entry to another slot. Slot s < stages is for
        # inputs of forwards at stage s, slot stages + s for gradients. `always` has all entries, `never` has none.
        back, always, never, nowhere = stages, *(2 * stages + n for n in range(3))
        awaits = np.array([*(slot for s in range(stages) for slot in (s, back + s, back + s, always) * 2), never])
        brings = np.full(8 * stages, nowhere)
        for s in range(stages):
            brings[8 * s : 8 * s + 8 : 4] = s + 1 if s + 1 < stages else nowhere
            brings[[8 * s + n for n in (1, 2, 5, 6)]] = back + s - 1 if s else nowhere
        links, message_seconds = self._links(costs)
        arrivals = np.full((2 * stages + 3, self.rows.micro_batches), np.inf)  # by slot and micro-batch
        arrivals[[0, back + stages - 1, always]] = 0.0
        # Rows are padded with an action that waits for `never`.
        rows = np.full((ranks, 1 + max(map(len, self._all_rows))), 8 * stages)
        for row, numbers in zip(rows, self._all_rows, strict=True):
            row[: len(numbers)] = numbers
        done, idle, free = np.zeros(len(arrivals), int), np.zeros(links.max() + 1), np.zeros(ranks)
        rank, index = np.arange(ranks), np.zeros(ranks, int)
        while True:
            action = rows[rank, index]
            slot = awaits[action]
            number = done[slot]
            arrived = arrivals[slot, number]
            (ready,) = np.nonzero(arrived < np.inf)
            if not len(ready):
                return float(free.max())
            action, slot, number = action[ready], slot[ready], number[ready]
            free[ready] = ends = np.maximum(free[ready] + before[action], arrived[ready]) + durations[action]
            link = links[action]
            idle[link] = ends = np.maximum(idle[link], ends) + message_seconds[action]
            arrivals[brings[action], number] = ends
            done[slot] += 1
            done[always] = 0
            index[ready] += 1

    def _seconds_by_action(self, costs: Costs) -> Seconds:
        return np.array([seconds(Action(kind, stage), costs) for stage in range(len(costs)) for kind in KINDS * 2])

    def _recompute_seconds(self, costs: Costs, recomputed: Collection[int]) -> Seconds:
        """Returns the seconds of the recompute before each action, if these stages recompute."""
        before = np.zeros((len(costs), 8))
        for stage in recomputed:
            before[stage, 1:3] = seconds(Action(Kind.RECOMPUTE, stage), costs)
        return before.ravel()

    def _links(self, costs: Costs) -> tuple[Integers, Seconds]:
        """Returns, for the message of each action, its link and its seconds. Messages within a rank take no time."""
        numbers: dict[tuple[int, int], int] = {}
        links, message_seconds = [], []
        for stage, source in enumerate(self.rank_of):
            for to in (stage + 1, stage - 1, stage - 1, stage) * 2:
                target = self.rank_of[to] if 0 <= to < len(self.rank_of) else source
                links.append(numbers.setdefault((source, target), len(numbers)))
                send = Action(Kind.SEND, stage, route=Route(min(stage, to), max(stage, to)))
                message_seconds.append(seconds(send, costs) if source != target else 0.0)
        return np.array(links), np.array(message_seconds)


def _parts(row: Numbers) -> tuple[Numbers, Flags, Flags, Flags]:
    """Returns the stage of each action, and whether it is a forward, a backward, or the last of its micro-batch."""
    kind = row & 3
    return row >> 3, kind == 0, (kind == 1) | (kind == 2), (kind == 1) | (kind == 3)
