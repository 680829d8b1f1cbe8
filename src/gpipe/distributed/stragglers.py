"""Who is slow among the processes of a pipe, so that all others wait for it."""

from collections import deque
from collections.abc import Sequence
from statistics import median_low

SLOW = 2.0  # times its share
WINDOW, ENOUGH = 5, 3  # steps that are looked at, and how many of them must be there
NOTICEABLE = 0.05  # seconds a step; below it, it does not matter who is slow
WARMING_UP = 10  # steps that are not looked at: caches, compilers and allocators fill


def ratios(busy: Sequence[float], shares: Sequence[float]) -> list[float]:
    """How many times its share each rank was busy, as the other ranks (their median) set the pace.

    >>> ratios(busy=[1.0, 1.0, 1.0, 6.0], shares=[1.0, 1.0, 1.0, 2.0])
    [1.0, 1.0, 1.0, 3.0]
    """
    paces = [seconds / share if share else 0.0 for seconds, share in zip(busy, shares, strict=True)]
    ordered, middle = sorted(paces), (len(paces) - 1) // 2
    above = ordered[min(middle + 1, len(paces) - 1)]  # the median of the others of those up to the middle
    others = [above if pace <= ordered[middle] else ordered[middle] for pace in paces]
    return [pace / other if other else 0.0 for pace, other in zip(paces, others, strict=True)]


class Stragglers:
    """Finds ranks that are slow in most of the last steps, and names each once.

    The share of a rank is what its stages cost, if that was measured. Numbers of parameters say little of time: then
    a rank can only be compared with those of other replicas that have the same layers.
    """

    def __init__(self, placement: Sequence[int], costs: Sequence[float], replicas: int, *, measured: bool) -> None:
        self._rows = max(placement) + 1
        self._measured = measured
        self._held = [[stage for stage, row in enumerate(placement) if row == rank] for rank in range(self._rows)]
        ranks = range(self._rows * replicas)
        self._alike = [ranks] if measured else [ranks[row :: self._rows] for row in range(self._rows)]
        self._shares = [sum(costs[stage] for stage in held) if measured else 1.0 for held in self._held] * replicas
        self._last = [deque[float](maxlen=WINDOW) for _ in ranks]
        self._named: set[int] = set()
        self._steps = 0

    def note(self, busy: Sequence[float]) -> list[str]:
        """Notes for how many seconds each rank was busy in a step; gives what is to be said."""
        self._steps += 1
        if self._steps <= WARMING_UP:
            return []
        for alike in self._alike:
            found = ratios([busy[rank] for rank in alike], [self._shares[rank] for rank in alike])
            for rank, ratio in zip(alike, found, strict=True):
                self._last[rank].append(ratio)
        slow = [
            rank
            for rank, last in enumerate(self._last)
            if len(last) >= ENOUGH and min(last[-1], median_low(last)) >= SLOW and busy[rank] >= NOTICEABLE
        ]
        new = [rank for rank in slow if rank not in self._named]
        self._named.update(new)
        return [self._in_words(rank, median_low(self._last[rank]), busy[rank]) for rank in new]

    def _in_words(self, rank: int, ratio: float, seconds: float) -> str:
        replica, row = divmod(rank, self._rows)
        stages = f"stage{'s' * (len(self._held[row]) > 1)} {', '.join(map(str, self._held[row]))}"
        share = "its share by the measured costs" if self._measured else "what the same layers take in other replicas"
        return (
            f"rank {rank} ({stages}, replica {replica}) is slow, and the others wait for it: it was busy {ratio:.1f} "
            f"times {share}, {seconds:.3g} s in the last step; something else may use its device"
        )
