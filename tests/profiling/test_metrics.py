"""Recorded steps as plain numbers by name."""

import re
from math import isnan
from typing import Any

import pytest
import torch
from torch import nn

import gpipe
from gpipe.profiling import Report
from gpipe.profiling.memory import Held
from gpipe.profiling.messages import Message
from gpipe.profiling.recording import metrics_of
from gpipe.schedule.cost import StageCost
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import fill_drain
from gpipe.schedule.simulate import simulate
from tests.docs.pages import ROOT
from tests.support.jobs import recorded
from tests.support.plain_loop import squares, weights_of
from tests.support.planned import pipe_by_costs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

X, Y = torch.randn(8, 3), torch.randn(8, 3)


def two_stages(**how: Any) -> gpipe.GPipe:
    make: Any = pipe_by_costs if "costs" in how else gpipe.GPipe
    with weights_of(1):
        return make([nn.Linear(3, 3), nn.Linear(3, 3)], 2, 4, **how)


def crossed(kind: str, size: int) -> Message:
    return Message(kind, 0, 1, 0, 0, "x:0>1", 0, "forward", size, ("float32",), (), 0.0, 0.0, 0.0)


def test_they_say_what_breakdown_memory_and_messages_say() -> None:
    """Two steps of 1.5 s by the table, which were predicted to take 1.25 s."""
    program = Program.of(fill_drain(stages=2, micro_batches=4), micro_batches=4)
    step, less = (simulate(program, [StageCost(forward=f, backward=0.2)] * 2).timeline for f in (0.1, 0.05))
    steps = Report("", timelines=(step, step), predicted=less, predicted_memory=(64, 32))
    held = {0: Held(8, 8, 0, 2, 2), 1: Held(8, 8, 0)}
    found = metrics_of(steps, [0.5, 0.25], [crossed("send", 6), crossed("receive", 6), crossed("reduce", 8)], held)
    assert found == {
        "steps": 2.0,
        "loss": 0.375,
        "step_seconds": pytest.approx(1.5),
        "pipeline_seconds": pytest.approx(1.5),
        "predicted_seconds": pytest.approx(1.25),
        "sent_bytes": 3.0,
        "reduced_bytes": 4.0,
        "table_bubble": pytest.approx(0.2),
        **{name: pytest.approx(value) for name, value in SHARES.items()},
        "bubble/filling": pytest.approx(0.1 / 3),
        "bubble/draining": pytest.approx(0.2 / 3),
        "bubble/stalls": pytest.approx(0.1),
        "busy/rank_0": pytest.approx(0.8),
        "busy/rank_1": pytest.approx(0.8),
        "stage_seconds/stage_0": pytest.approx(0.3),
        "stage_seconds/stage_1": pytest.approx(0.3),
        "memory_bytes/rank_0": 20.0,  # of the other it is not known
        "predicted_memory_bytes/rank_0": 64.0,
        "predicted_memory_bytes/rank_1": 32.0,
    }
    assert {type(value) for value in found.values()} == {float}


SHARES = {
    "share/forward": 0.4 / 1.5,
    "share/recompute": 0.0,
    "share/backward": 0.8 / 1.5,
    "share/bubble": 0.2,
    **dict.fromkeys(
        (f"share/{part}" for part in ("imbalance", "late_starts", "communication", "moving", "reduction")), 0.0
    ),
    **dict.fromkeys((f"share/{part}" for part in ("data", "weight_update", "host", "between_steps")), 0.0),
}


def test_the_loss_is_the_mean_of_the_training_steps_that_are_kept() -> None:
    pipe = two_stages()
    recording = gpipe.record(pipe, keep=3)
    losses = [pipe.step(at * X, Y, squares).item() for at in range(4)]
    assert recording.metrics()["loss"] == pytest.approx(sum(losses[1:]) / 3)
    with torch.no_grad():
        pipe.step(9 * X, Y, squares)
    recording.stop()
    pipe.step(7 * X, Y, squares)
    found = recording.metrics()
    assert found["steps"] == 3
    assert found["loss"] == pytest.approx(sum(losses[1:]) / 3)


def test_a_loss_that_is_no_number_is_none_here_either() -> None:
    pipe = two_stages()
    with gpipe.record(pipe) as recording:
        pipe.step(X * torch.nan, Y, squares)
    assert isnan(recording.metrics()["loss"])


def test_of_calls_alone_no_loss_and_no_prediction_are_known() -> None:
    pipe = two_stages(sample=X)
    with gpipe.record(pipe) as recording:
        pipe(X).sum().backward()
    found = recording.metrics()
    assert found["steps"] == 2
    assert not {"loss", "pipeline_seconds", "predicted_seconds"} & found.keys()


def test_what_was_not_asked_for_is_left_out() -> None:
    plain, planned = two_stages(costs=[1, 1]), two_stages(sample=X, remat=gpipe.Remat(2**30))
    with gpipe.record(plain) as recording, gpipe.record(planned, memory=True) as watched:
        plain.step(X, Y, squares)
        planned.step(X, Y, squares)
    odd = {"predicted_seconds"} | {f"{of}memory_bytes/rank_{k}" for of in ("", "predicted_") for k in (0, 1)}
    assert not odd & recording.metrics().keys()
    assert odd <= watched.metrics().keys()


def test_nothing_recorded_is_told() -> None:
    with pytest.raises(ValueError, match="No step was recorded"):
        gpipe.record(two_stages()).metrics()


def test_over_processes_what_was_sent_is_of_all_ranks(pool: WorkerPool) -> None:
    """Of 4 micro-batches of 2 rows of 3 numbers each crosses one cut, and its gradient comes back."""
    first, second = answers(pool.run(recorded.metrics, world=2))
    crosses = recorded.MICRO_BATCHES * (8 // recorded.MICRO_BATCHES) * 3 * 4
    assert first["sent_bytes"] == second["sent_bytes"] == 2 * crosses
    assert first["loss"] == second["loss"]
    assert {name for name in first if name.startswith("memory_bytes")} == {"memory_bytes/rank_0"}
    assert {name for name in second if name.startswith("memory_bytes")} == {"memory_bytes/rank_1"}


def test_the_page_has_every_name() -> None:
    page = (ROOT / "docs" / "reference" / "data-formats.md").read_text()
    section = page.partition("## metrics()")[2].partition("\n## ")[0]
    told = re.findall(r"`([a-z_]+(?:/\w+)?)`", "".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE)))
    pipe = two_stages(sample=X, remat=gpipe.Remat(2**30))
    with gpipe.record(pipe, memory=True) as recording:
        pipe.step(X, Y, squares)
    names = recording.metrics().keys()
    assert {name.partition("/")[0] for name in told} == {name.partition("/")[0] for name in names}
    assert {name for name in told if not name.endswith("/PART")} <= names
