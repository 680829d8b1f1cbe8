"""What runs is the table: each of its actions is done in one step of its rank, in the order of the table."""

import pytest
from torch import nn

from gpipe.runtime.compiled_table import CompiledAction, CompiledProgram
from gpipe.schedule.action import TRANSFERS, Action
from gpipe.schedule.schedules import SCHEDULES
from tests.support.odd_layers import Pop, Stash
from tests.support.planned import pipe_by_costs


def actions_of(step: CompiledAction) -> list[Action]:
    transfers = [transfer.action for transfer in (*step.receives, *step.sends) if transfer.action is not None]
    return [*transfers, step.action]


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_are_the_table(name: str) -> None:
    layers = [Stash("a", 4), *[nn.Identity() for _ in range(6)], Pop({"a": 4}, 4)]
    pipe = pipe_by_costs(layers, 2, 4, schedule=name, costs=[1] * 8, batch_norm="deferred")
    compiled = CompiledProgram.of(pipe.program)
    for row, steps in zip(pipe.program.table, compiled.whole.rows, strict=True):
        done = [action for step in steps for action in actions_of(step)]
        assert sorted(map(str, done)) == sorted(map(str, row))
        assert [step.action for step in steps] == [action for action in row if action.kind not in TRANSFERS]
        assert all(row[step.position] == step.action for step in steps)
    assert {str(action) for row in pipe.program.table for action in row if action.kind in TRANSFERS}
