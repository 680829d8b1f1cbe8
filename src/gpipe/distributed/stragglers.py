"""Finds slow ranks, for which the other ranks wait."""

from collections import deque
from collections.abc import Sequence
from statistics import median_low

SLOW_RATIO = 2.0
WINDOW, LEAST_STEPS = 5, 3  # recent steps to examine, and the minimum
NOTICEABLE_SECONDS = 0.05  # of busy time per step; less is not reported
WARM_UP_STEPS = 10  # ignored, because caches, compilers and allocators warm up


def ratios(busy: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Returns the busy time of each rank, divided by its share of the work and by the median of the other ranks.

    >>> ratios(busy=[1.0, 1.0, 1.0, 6.0], shares=[1.0, 1.0, 1.0, 2.0])
    [1.0, 1.0, 1.0, 3.0]
    """
    paces = [seconds / share if share else 0.0 for seconds, share in zip(busy, shares, strict=True)]
    ordered, middle = sorted(paces), (len(paces) - 1) // 2
    above = ordered[min(middle + 1, len(paces) - 1)]  # for ranks up to the median, the median of the others
    medians = [above if pace <= ordered[middle] else ordered[middle] for pace in paces]
    return [pace / other if other else 0.0 for pace, other in zip(paces, medians, strict=True)]


class Stragglers:
    """Finds ranks that were slow in most of the last steps, and reports each slow rank once.

    If the costs are measured times, the share of a rank is the cost of its stages, and all ranks are compared. If the
    costs are numbers of parameters, they do not predict time. A rank is then compared only with ranks that have the
    same layers in other replicas.

    Args:
        placement: The pipeline rank of each stage.
        costs: The cost of each stage.
        replicas: The number of replicas.
        measured: Whether the costs are measured times.
    """

    def __init__(self, placement: Sequence[int], costs: Sequence[float], replicas: int, *, measured: bool) -> None:
        self._pp_size = max(placement) + 1
        self._measured = measured
        ranks, pp_ranks = range(self._pp_size * replicas), range(self._pp_size)
        self._stages = [[stage for stage, rank in enumerate(placement) if rank == pp_rank] for pp_rank in pp_ranks]
        self._comparable = [ranks] if measured else [ranks[start :: self._pp_size] for start in pp_ranks]
        shares = [sum(costs[stage] for stage in stages) if measured else 1.0 for stages in self._stages]
        self._shares = shares * replicas
        self._recent = [deque[float](maxlen=WINDOW) for _ in ranks]
        self._reported: set[int] = set()
        self._steps = 0

    def record(self, busy: Sequence[float]) -> list[str]:
        """Records the busy seconds of each rank in a step. Returns a warning for each newly found slow rank."""
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            return []
        for group in self._comparable:
            group_ratios = ratios([busy[rank] for rank in group], [self._shares[rank] for rank in group])
            for rank, ratio in zip(group, group_ratios, strict=True):
                self._recent[rank].append(ratio)
        slow = [
            rank
            for rank, recent in enumerate(self._recent)
            if len(recent) >= LEAST_STEPS
            and min(recent[-1], median_low(recent)) >= SLOW_RATIO
            and busy[rank] >= NOTICEABLE_SECONDS
        ]
        new = [rank for rank in slow if rank not in self._reported]
        self._reported.update(new)
        return [self._warning(rank, median_low(self._recent[rank]), busy[rank]) for rank in new]

    def _warning(self, rank: int, ratio: float, seconds: float) -> str:
        replica, pp_rank = divmod(rank, self._pp_size)
        stages = f"stage{'s' * (len(self._stages[pp_rank]) > 1)} {', '.join(map(str, self._stages[pp_rank]))}"
        expected = (
            "expected from the measured costs" if self._measured else "needed for the same layers in other replicas"
        )
        return (
            f"Rank {rank} ({stages}, replica {replica}) is slow, and the other ranks wait for it: it was busy "
            f"{ratio:.1f} times as long as {expected}, {seconds:.3g} s in the last step. Check whether a different "
            f"program uses its device. [slow-rank]"
        )
