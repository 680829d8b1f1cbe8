"""How long a step must take: all forwards, then all backwards, each as soon as what it needs is there."""

from collections.abc import Sequence


def makespan(forward: Sequence[float], backward: Sequence[float], micro_batches: int, *, remat: bool) -> float:
    """Seconds of one mini-batch whose stages take these seconds for a micro-batch.

    Nothing else takes time, and a recompute, as long as its forward, runs while the gradient is under way.
    Without recompute it is sum(f) + sum(b) + (M-1) (max f + max b).

    >>> makespan([1, 1], [2, 2], 4, remat=False)
    15.0
    >>> makespan([1, 1], [2, 2], 4, remat=True)  # M more forwards; those of the first stage hide for one of them
    19.0
    """
    free = [0.0] * len(forward)
    for _ in range(micro_batches):
        arrived = 0.0
        for stage, seconds in enumerate(forward):
            arrived = free[stage] = max(free[stage], arrived) + seconds
    for _ in range(micro_batches):
        arrived = 0.0
        for stage in reversed(range(len(forward))):
            free[stage] += forward[stage] if remat else 0.0
            arrived = free[stage] = max(free[stage], arrived) + backward[stage]
    return max(free)


def share(forward: Sequence[float], backward: Sequence[float], micro_batches: int, *, remat: bool) -> float:
    """What a schedule of equal stages does with K machines: the plain loop's time / (K x makespan).

    Without recompute it is M/(M+K-1).

    >>> share([1, 1], [2, 2], 4, remat=False)
    0.8
    """
    stages = len(forward)
    f, b = sum(forward) / stages, sum(backward) / stages
    return micro_batches * (f + b) / makespan([f] * stages, [b] * stages, micro_batches, remat=remat)
