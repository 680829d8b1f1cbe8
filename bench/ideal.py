"""Computes the minimum duration of a step in which each action runs as soon as its inputs are available."""

from collections.abc import Sequence


def makespan(forward: Sequence[float], backward: Sequence[float], micro_batches: int, *, remat: bool) -> float:
    """Returns the duration of one mini-batch with these durations of stages per micro-batch.

    Nothing else takes time. A recomputation takes as long as its forward pass, and runs while the gradient is
    computed by later stages. Without recomputation, the duration is sum(f) + sum(b) + (M-1) (max f + max b).

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
    """Returns the efficiency of a schedule with equal stages on K machines: loop time / (K x makespan).

    Without recomputation it is M/(M+K-1).

    >>> share([1, 1], [2, 2], 4, remat=False)
    0.8
    """
    stages = len(forward)
    f, b = sum(forward) / stages, sum(backward) / stages
    return micro_batches * (f + b) / makespan([f] * stages, [b] * stages, micro_batches, remat=remat)
