"""Hooks of features: which are called, when, and in which order."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe import pipeline
from gpipe.features.chosen import choose_features
from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
from gpipe.runtime.feature import Feature, Work
from gpipe.runtime.run import Rank, Run
from gpipe.schedule.action import Kind
from tests.support.plain_loop import mini_batch


class Noted(Feature):
    """A feature that notes the hooks that are called."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes = name, notes

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work |= {kind: partial(self._perform, work[kind]) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.SEND)}

    def _perform(self, perform: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        self._notes.append(f"{self._name} {task.action} sends {len(rank.outbox)}")
        perform(run, rank, task)

    @contextmanager
    def around_pass(self, run: Run, table: CompiledTable) -> Iterator[None]:
        self._notes.append(f"{self._name} begins")
        yield
        self._notes.append(f"{self._name} ends")

    @contextmanager
    def around_layers(self, run: Run, rank: Rank, state: Any, entered: Sequence[Any], call: Any) -> Iterator[None]:
        yield
        assert len(call.output.values) == len(entered) == 1
        self._notes.append(f"{self._name} layers")


class Completed(Feature):
    """A feature that only completes runs and notes errors."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def complete(self, run: Run) -> None:
        self._notes.append("complete")

    def note_error(self, run: Run, rank: Rank, table: CompiledTable, at: int, error: BaseException) -> None:
        self._notes.append(f"error in {table.program.table[rank.rank][at]}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hooks called by pipes, with two features more."""
    found: list[str] = []

    def choose(run: Run) -> list[Feature]:
        return [*choose_features(run), Noted("inner", found), Noted("outer", found), Completed(found)]

    monkeypatch.setattr(pipeline, "choose_features", choose)
    return found


def one_micro_batch(loss_fn: Any = mse_loss) -> None:
    x, y = mini_batch(4, 4)
    with gpipe.GPipe([nn.Linear(4, 4), nn.Linear(4, 4)], 2, 1, driver="lockstep") as pipe:
        pipe.verify_steps = False
        pipe.step(x, y, loss_fn)


def test_later_features_are_around_earlier_ones(notes: list[str]) -> None:
    one_micro_batch()
    assert notes == [
        *("outer begins", "inner begins"),
        *("outer 0F0 sends 0", "inner 0F0 sends 0", "inner layers", "outer layers"),
        *("outer 0F0 sends 1", "inner 0F0 sends 1"),
        *("outer 1F0 sends 0", "inner 1F0 sends 0", "inner layers", "outer layers"),
        *("outer 1B0 sends 0", "inner 1B0 sends 0", "outer 1B0 sends 1", "inner 1B0 sends 1"),
        *("outer 0B0 sends 0", "inner 0B0 sends 0"),
        *("inner ends", "outer ends", "complete"),
    ]


def test_a_run_that_fails_is_not_complete(notes: list[str]) -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        one_micro_batch(fails)
    assert notes[-1] == "error in 1F0"
