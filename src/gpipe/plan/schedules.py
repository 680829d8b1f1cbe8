"""Schedules: pure functions from stages and micro-batches to the bare rows of forwards and backwards."""

from collections.abc import Callable

from gpipe.plan.action import Action, Kind
from gpipe.plan.program import Rows


def fill_drain(stages: int, micro_batches: int) -> Rows:
    """GPipe: all forwards, then all backwards, newest first (paper, Figure 2c).

    ```text
    stage 0  F0 F1 F2 .. .. .. .. B2 B1 B0
    stage 1  .. F0 F1 F2 .. .. B2 B1 B0 ..
    stage 2  .. .. F0 F1 F2 B2 B1 B0 .. ..
    ```
    """
    ahead = range(micro_batches)
    return tuple(
        (*(_forward(s, m) for m in ahead), *(_backward(s, m) for m in reversed(ahead))) for s in range(stages)
    )


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
