"""Tests the callback that logs the times of a pipe's steps."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback, TrainingArguments

import gpipe
from gpipe.integrations.trackers import GPipeCallback
from gpipe.integrations.transformers import GPipeTrainer
from tests.families.law import quiet
from tests.integrations.trained import Outcome, apart, model_of, outcome, trainer_of
from tests.support.plain_loop import one_thread


class Tracker(TrainerCallback):
    """Keeps everything that is logged."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.told.append((state.global_step, dict(logs)))


def trained(folder: Path, *, reports: bool) -> tuple[Any, Outcome, list[tuple[int, dict[str, float]]]]:
    """Four optimizer steps, of which each second is logged."""
    tracker = Tracker()
    with quiet(), one_thread():
        make: Any = partial(GPipeTrainer, partitions=2, callbacks=[tracker])
        trainer = trainer_of(make, model_of("gpt2"), "gpt2", folder, arguments={"logging_steps": 2})
        if reports:
            trainer.add_callback(GPipeCallback(trainer))
        trainer.train()
        return trainer, outcome(trainer), tracker.told


def test_numbers_follow_each_loss_and_are_of_the_steps_since_the_last(tmp_path: Path) -> None:
    _, _, told = trained(tmp_path, reports=True)
    assert [step for step, logs in told if "loss" in logs] == [2, 4]
    numbers = [(step, logs) for step, logs in told if "gpipe/steps" in logs]
    assert [(step, logs["gpipe/steps"]) for step, logs in numbers] == [(2, 2), (4, 2)]
    for _, logs in numbers:
        assert sum(value for name, value in logs.items() if name.startswith("gpipe/share/")) == pytest.approx(1)
        assert all(name.startswith("gpipe/") or name == "epoch" for name in logs)
        assert "gpipe/loss" not in logs


def test_it_changes_nothing_else_and_records_no_longer_than_training(tmp_path: Path) -> None:
    trainer, found, _ = trained(tmp_path, reports=True)
    _, expected, _ = trained(tmp_path, reports=False)
    others = [one for one in found.log if not any(name.startswith("gpipe/") for name in one)]
    assert apart(found._replace(log=others), expected) == 0.0
    assert trainer.pipe.recorder is None


def test_a_trainer_without_a_pipe_is_told_so(tmp_path: Path) -> None:
    trainer = Trainer(model_of("gpt2"), TrainingArguments(str(tmp_path), report_to=[]))
    with pytest.raises(TypeError, match=r"pipe is a NoneType"):
        GPipeCallback(trainer).on_train_begin()


def test_a_pipe_that_is_recorded_already_stays_so(tmp_path: Path) -> None:
    trainer, _, _ = trained(tmp_path, reports=False)
    with gpipe.record(trainer.pipe) as recording:
        callback = GPipeCallback(trainer)
        callback.on_train_begin()
        callback.on_train_end()
        assert trainer.pipe.recorder is recording
