"""Schedules: what every one of them gives, then the pictures."""

from collections.abc import Callable

import pytest

from gpipe.plan.action import Action, Kind
from gpipe.plan.laws import check
from gpipe.plan.program import Program, Rows
from gpipe.plan.schedules import SCHEDULES, fill_drain, forward_only

COUNTS = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in range(1, 9)]


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), forward_only])
def test_a_schedule_is_lawful_and_does_all_forwards(schedule: Callable[[int, int], Rows]) -> None:
    for stages, micro_batches in COUNTS:
        program = Program.of(schedule(stages, micro_batches), micro_batches)
        check(program)
        forwards = {Action(Kind.FORWARD, s, m) for s in range(stages) for m in range(micro_batches)}
        assert program.only([Kind.FORWARD]).actions == forwards


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_training_schedule_has_a_backward_for_each_forward(schedule: Callable[[int, int], Rows]) -> None:
    for stages, micro_batches in COUNTS:
        program = Program.of(schedule(stages, micro_batches), micro_batches)
        ends = {a for a in program.actions if a.kind in {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}}
        assert {(a.stage, a.micro_batch) for a in ends} == {(a.stage, a.micro_batch) for a in program.actions}


def picture(rows: Rows) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


def test_fill_drain_goes_forth_in_order_and_back_in_order() -> None:
    assert picture(fill_drain(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_forward_only_goes_forth_in_order() -> None:
    assert picture(forward_only(2, 3)) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]
