"""Who is slow among the processes of a pipe, so that all others wait for it."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median_low

from gpipe.schedule.schedules import Placement

SLOW = 2.0  # times its share
WINDOW, ENOUGH = 5, 3  # steps that are looked at, and how many of them must be there
NOTICEABLE = 0.05  # seconds a step; below it, it does not matter who is slow
WARMING_UP = 10  # steps that are not looked at: caches, compilers and allocators fill


def ratios(busy: Sequence[float], shares: Sequence[float]) -> list[float]:
    """How many times its share each rank was busy, as the other ranks (their median) set the pace.

    >>> ratios(busy=[1.0, 1.0, 1.0, 6.0], shares=[1.0, 1.0, 1.0, 2.0])
    [1.0, 1.0, 1.0, 3.0]
    """
    paces = [own / share if share else 0.0 for own, share in zip(busy, shares, strict=True)]
    ordered, middle = sorted(paces), (len(paces) - 1) // 2
    found = []
    for pace in paces:
        at = middle + 1 if bisect_left(ordered, pace) <= middle else middle  # without the rank's own
        others = ordered[at] if at < len(ordered) else pace
        found.append(pace / others if others else 0.0)
    return found


class Stragglers:
    """Finds ranks that are slow in most of the last steps, and names each once.

    The share of a rank is what its layers cost, if that was measured. Numbers of parameters say little of time: then
    a rank can only be compared with those of other replicas that have the same layers.
    """

    def __init__(
        self, costs: Sequence[float], replicas: int, *, measured: bool, stages: Sequence[str] | None = None
    ) -> None:
        self._rows = len(costs)
        self._stages = [f"stage {row}" for row in range(self._rows)] if stages is None else stages
        self._measured = measured
        ranks = range(len(costs) * replicas)
        self._alike = [ranks] if measured else [ranks[row :: len(costs)] for row in range(len(costs))]
        self._shares = list(costs if measured else [1.0] * len(costs)) * replicas
        self._last = [deque[float](maxlen=WINDOW) for _ in ranks]
        self._named: set[int] = set()
        self._steps = 0

    def note(self, busy: Sequence[float]) -> list[str]:
        """Notes for how many seconds each rank was busy in a step; gives what is to be said."""
        self._steps += 1
        if self._steps <= WARMING_UP:
            return []
        for alike in self._alike:
            theirs = ratios([busy[rank] for rank in alike], [self._shares[rank] for rank in alike])
            for rank, ratio in zip(alike, theirs, strict=True):
                self._last[rank].append(ratio)
        found = []
        for rank, seen in enumerate(self._last):
            slow = seen[-1] >= SLOW and busy[rank] >= NOTICEABLE and rank not in self._named
            if slow and len(seen) >= ENOUGH and median_low(seen) >= SLOW:
                self._named.add(rank)
                found.append(self._say(rank, median_low(seen), busy[rank]))
        return found

    def _say(self, rank: int, ratio: float, seconds: float) -> str:
        replica, row = divmod(rank, self._rows)
        share = "its share by the measured costs" if self._measured else "what the same layers take in other replicas"
        return (
            f"rank {rank} ({self._stages[row]}, replica {replica}) is slow, and the others wait for it: it was busy "
            f"{ratio:.1f} times {share}, {seconds:.3g} s in the last step; something else may use its device"
        )


def stragglers_among(placement: Placement, costs: Sequence[float], replicas: int, *, measured: bool) -> Stragglers:
    """What finds slow ranks, by what the stages of each cost."""
    held = [[stage for stage, row in enumerate(placement) if row == rank] for rank in range(max(placement) + 1)]
    names = [f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" for stages in held]
    by_row = [sum(costs[stage] for stage in stages) for stages in held] if costs else [1.0] * len(held)
    return Stragglers(by_row, replicas, measured=measured, stages=names)
