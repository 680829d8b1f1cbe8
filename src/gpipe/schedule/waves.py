"""ZB-H1 over thousands of ranks and micro-batches: its rows repeat a period, and no more is listed than is asked for.

    rank r  F F .. F   I W F   I W F   ..   I W   I W   W .. W

A wave is one such period of all ranks: its I go up the ranks, and each W and F follows on its own. So a mini-batch is
timed by a few operations on arrays of K numbers for each micro-batch. Messages never wait for each other here.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.cost import StageCost, seconds
from gpipe.schedule.program import RankActions
from gpipe.schedule.schedules.writing import in_turn, one_for_one

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Waves:
    """M micro-batches through ranks of one stage each, by what the stages cost.

    >>> from gpipe.schedule.simulate import UNIT_COST
    >>> waves = Waves((UNIT_COST,) * 1024, micro_batches=4096)
    >>> waves.seconds, len(waves.row(1000))
    (13311.0, 12288)
    """

    costs: tuple[StageCost, ...]
    micro_batches: int

    def row(self, rank: int) -> RankActions:
        """What a rank does, in order."""
        own = [rank] * self.micro_batches
        return in_turn(one_for_one(own, own, ahead=len(self.costs) - rank, late=rank), self.micro_batches)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank holds: what a micro-batch leaves, K times or as often as there are any."""
        held = min(len(self.costs), self.micro_batches)
        return tuple(cost.state + cost.working + held * (cost.boundary + cost.inside) for cost in self.costs)

    def _each(self, kind: Kind) -> Numbers:
        return np.array([seconds(Action(kind, stage), self.costs) for stage in range(len(self.costs))])

    @cached_property
    def seconds(self) -> float:
        """How long a mini-batch takes."""
        forward, backward, weights = map(self._each, (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
        sent = np.array([0.0, *(cost.send for cost in self.costs[:-1])])  # to each stage, with what it is to do
        sent_back = np.array([*(c.send if c.send_gradient is None else c.send_gradient for c in self.costs[1:]), 0.0])
        ranks, m = len(self.costs), self.micro_batches
        rank = np.arange(ranks)
        ahead = np.minimum(ranks - rank, m)
        down, up = np.cumsum(forward + sent), np.cumsum((backward + sent_back)[::-1])[::-1]
        free = np.zeros(ranks)  # from when on ranks are
        for some in range(ranks, max(ranks - m, 0), -1):  # those with one more forward ahead
            free[:some] = down[:some] + np.maximum.accumulate(free[:some] - down[:some] + forward[:some])
        last = free  # the end of each rank's last forward
        for wave in range(m):
            free = up + np.maximum.accumulate((free - up + backward)[::-1])[::-1] + weights * (rank <= wave)
            arrived = np.concatenate(([0.0], last[:-1])) + sent
            goes_on = wave + ahead < m
            last = np.where(goes_on, np.maximum(free, arrived) + forward, last)
            free = np.where(goes_on, last, free)
        return float((free + np.minimum(rank, m) * weights).max())
