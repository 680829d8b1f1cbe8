"""Schedules: pure functions from stages and micro-batches to the bare rows of forwards and backwards."""

from collections.abc import Callable

from gpipe.plan.action import Action, Kind
from gpipe.plan.program import Rows


def fill_drain(stages: int, micro_batches: int) -> Rows:
    """GPipe: all forwards, then all backwards (paper, Figure 2c), both in the order of the plain loop.

    ```text
    stage 0  F0 F1 F2 .. .. .. .. B0 B1 B2
    stage 1  .. F0 F1 F2 .. .. B0 B1 B2 ..
    stage 2  .. .. F0 F1 F2 B0 B1 B2 .. ..
    ```
    """
    each = range(micro_batches)
    return tuple((*(_forward(s, m) for m in each), *(_backward(s, m) for m in each)) for s in range(stages))


def forward_only(stages: int, micro_batches: int) -> Rows:
    """Forwards alone, for evaluation.

    ```text
    stage 0  F0 F1 F2 ..
    stage 1  .. F0 F1 F2
    ```
    """
    return tuple(tuple(_forward(s, m) for m in range(micro_batches)) for s in range(stages))


SCHEDULES: dict[str, Callable[[int, int], Rows]] = {"gpipe": fill_drain}


def _forward(stage: int, micro_batch: int) -> Action:
    return Action(Kind.FORWARD, stage, micro_batch)


def _backward(stage: int, micro_batch: int) -> Action:
    return Action(Kind.BACKWARD, stage, micro_batch)
