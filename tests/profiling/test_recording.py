"""`gpipe.record` from a user's script: the wall time in parts, a sentence, files."""

import gc
import json
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.planner.other_processes import OtherProcesses
from gpipe.profiling import read_report, report_json
from gpipe.profiling.advice import advise, explain
from gpipe.profiling.recording import Recording
from gpipe.schedule.action import COMPUTE
from gpipe.schedule.timeline import Timeline
from tests.support.clock import Clock, Slow
from tests.support.jobs import recorded
from tests.support.plain_loop import squares, weights_of
from tests.support.planned import pipe_by_costs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

DRIVERS = pytest.mark.parametrize("driver", ["lockstep", "threads"])
X, Y = torch.randn(8, 3), torch.randn(8, 3)
CLOCKS_APART = 1.0
"""Seconds: one host has one clock, but what else runs on it may hold up what the clocks are compared by."""


def two_stages(driver: str = "threads") -> gpipe.GPipe:
    with weights_of(1):
        layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    return gpipe.GPipe(layers, 2, 4, remat="never", driver=driver)


@DRIVERS
def test_the_parts_sum_to_the_wall_time_of_the_loop(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    layers = [Slow(3, 0.5, clock), Slow(3, 0.25, clock)]
    with pipe_by_costs(layers, 2, 4, remat="never", costs=[2, 1], driver=driver) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters())
        pipe.step(X, Y, squares)
        recording = gpipe.record(pipe)
        start = time.perf_counter()
        for x, y in [(X, Y)] * 5:
            pipe.step(x, y, squares)
            clock.sleep(0.125)
            optimizer.step()
        wall = time.perf_counter() - start
        recording.stop()
    found = recording.breakdown()
    assert found.steps == 5
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.seconds * found.steps == pytest.approx(wall)
    assert wall == 5 * (4 * (0.5 + 0.25) + 0.125)


def test_each_part_is_what_took_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def batches() -> Any:
        for _ in range(4):
            clock.sleep(0.05)
            yield X, Y

    layers = [Slow(3, 1.0, clock), Slow(3, 0.5, clock)]
    with gpipe.GPipe(layers, 2, 4, remat="always", driver="lockstep") as pipe, gpipe.record(pipe) as recording:
        optimizer = torch.optim.SGD(pipe.parameters())
        optimizer.register_step_pre_hook(lambda *_: clock.sleep(0.02))
        for x, y in recording.loading(batches()):
            pipe.step(x, y, squares)
            optimizer.step()
            clock.sleep(0.03)
    found = recording.breakdown()
    seconds = {name: share * found.seconds * found.steps for name, share in found.shares.items()}
    assert seconds["data"] == pytest.approx(3 * 0.05)  # the first is made before the first step begins
    assert seconds["weight update"] == pytest.approx(4 * 0.02)
    assert seconds["between steps"] == pytest.approx(3 * 0.03)
    assert seconds["forward"] == seconds["recompute"] == pytest.approx(4 * 4 * (1 + 0.5) / 2)  # the mean of two ranks
    assert found.stage_seconds == pytest.approx((2 * 1.0, 2 * 0.5))


def test_files_by_suffix(tmp_path: Path) -> None:
    with two_stages() as pipe, gpipe.record(pipe) as recording:
        for _ in range(3):
            pipe.step(X, Y, squares)
        assert recording.save(tmp_path / "step.svg").read_text().startswith("<svg")
        events = json.loads(recording.save(tmp_path / "steps.json").read_text())["traceEvents"]
        assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {0, 1, 2}
        assert "step 1: " in recording.save(tmp_path / "steps.html").read_text(encoding="utf-8")
        report = recording.report("three")
        assert read_report(report_json(report)) == report
        assert recording.save(tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match=r"suffix '\.gif'"):
            recording.save(tmp_path / "step.gif")


def test_it_goes_on_until_it_is_stopped_and_keeps_the_last_steps() -> None:
    with two_stages() as pipe:
        recording = gpipe.record(pipe, keep=3)
        assert str(recording) == "No steps were recorded."
        for _ in range(5):
            pipe.step(X, Y, squares)
        assert len(recording.timelines) == 3
        seen = recording._recorded_steps()
        assert (seen.driver, seen.partition.layers) == ("threads", (1, 1))
        recording.stop()
        seen = recording._recorded_steps()
        assert (recording.advice(), recording.explain()) == (advise(seen), explain(seen))
        assert pipe.recorder is None
        with pytest.raises(ValueError, match="has been stopped"), recording:
            pass
        pipe.step(X, Y, squares)
        assert len(recording.timelines) == 3
        assert "forward" in str(recording)


def test_every_optimizer_hook_is_gone_behind_it() -> None:
    with two_stages() as pipe:
        optimizer = torch.optim.SGD(pipe.parameters())
        with gpipe.record(pipe) as recording:
            pipe.step(X, Y, squares)
            optimizer.step()
        share = recording.breakdown().seconds
        optimizer.step()
        assert recording.breakdown().seconds == share


def test_an_optimizer_that_steps_another_inside_is_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Slower(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            clock.sleep(0.05)
            return super().step(closure)

    with two_stages() as pipe, gpipe.record(pipe) as recording:
        optimizer = Slower(pipe.parameters())
        torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
        pipe.step(X, Y, squares)
        optimizer.step()
    found = recording.breakdown()
    assert found.shares["weight update"] * found.seconds == pytest.approx(0.05)


def test_a_step_that_fails_is_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def fails(*_: Tensor) -> Tensor:
        clock.sleep(0.1)
        raise ZeroDivisionError

    layers = [Slow(3, 1.0, clock), Slow(3, 1.0, clock)]
    with gpipe.GPipe(layers, 2, 4, remat="never") as pipe, gpipe.record(pipe) as recording:
        pipe.step(X, Y, squares)
        with pytest.raises(ZeroDivisionError):
            pipe.step(X, Y, fails)
        pipe.step(X, Y, squares)
    found = recording.breakdown()
    assert found.shares["between steps"] * found.seconds * found.steps >= 0.1


def test_a_recording_that_is_never_stopped_keeps_no_pipe_alive() -> None:
    pipe = two_stages("lockstep")
    recording = gpipe.record(pipe)
    pipe.step(X, Y, squares)
    alive = weakref.ref(pipe)
    del pipe, recording
    gc.collect()
    assert alive() is None


def test_evaluations_between_steps_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    layers = [Slow(3, 1.0, clock), Slow(3, 0.5, clock)]
    with gpipe.GPipe(layers, 2, 4, remat="always", driver="lockstep") as pipe, gpipe.record(pipe) as recording:
        for _ in range(3):
            pipe.step(X, Y, squares)
            for _ in range(2):
                with torch.no_grad():
                    pipe(X)
    assert len(recording.timelines) == 9
    assert len(recording._recorded_steps().timelines) == 3
    assert recording._recorded_steps().breakdown.stage_seconds == pytest.approx((2 * 1.0, 2 * 0.5))
    assert recording.report("").timelines[recording.report("").typical].is_step


def test_what_is_loaded_ahead_and_what_updates_within_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def ahead(batches: list[Any], made: list[Any]) -> None:
        made.extend(recording.loading(batches))

    def updating() -> Any:
        for _ in range(3):
            clock.sleep(0.25)
            optimizer.step()
            yield X, Y

    with gpipe.GPipe([Slow(3, 1.0, clock), Slow(3, 1.0, clock)], 2, 4, remat="never", driver="lockstep") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters())
        optimizer.register_step_pre_hook(lambda *_: clock.sleep(0.5))
        with gpipe.record(pipe) as recording:
            start = time.perf_counter()
            for x, y in recording.loading(updating()):
                if not recording.runs:
                    start = time.perf_counter()
                pipe.step(x, y, squares)
            wall = time.perf_counter() - start
            thread = threading.Thread(target=ahead, args=([1, 2, 3], []))
            thread.start()
            thread.join()
    found = recording.breakdown()
    assert found.seconds * found.steps == pytest.approx(wall)
    assert found.shares["data"] * found.seconds * found.steps == pytest.approx(2 * 0.25)
    assert found.shares["weight update"] * found.seconds * found.steps == pytest.approx(2 * 0.5)
    assert len(recording._loads) == 3


@pytest.mark.parametrize(("driver", "told"), [("threads", 1), ("lockstep", 0)])
def test_ranks_that_wait_for_each_others_python_are_a_finding_told_once(
    monkeypatch: pytest.MonkeyPatch, driver: Any, told: int
) -> None:
    monkeypatch.setattr(Recording, "_others", lambda _: OtherProcesses(0.0, 64))
    pipe = gpipe.GPipe([nn.Linear(3, 3) for _ in range(4)], 4, 8, driver=driver)
    for _ in range(2):
        with gpipe.record(pipe) as recording:
            pipe.step(X, Y, squares)
            spans = [span._replace(end=span.start + 1.0) for span in recording.runs[0].timeline.spans]
            busy = sum(span.action.kind in COMPUTE for span in spans)
            timeline = Timeline(4, tuple(spans), busy / 3)  # three ranks were at it, on one core
            recording.runs[0] = recording.runs[0]._replace(timeline=timeline, cpu=busy / 3)
    assert sum("on average 2.0 of 4 rank threads waited" in finding for finding in pipe.findings) == told


def test_what_cannot_be_recorded_is_told() -> None:
    with two_stages() as pipe:
        recording = gpipe.record(pipe)
        for ask in (recording.breakdown, recording.explain, recording.advice):
            with pytest.raises(ValueError, match="No step was recorded"):
                ask()
        for keep in (0, 1.5, "3", True):
            with pytest.raises(ValueError, match="keep="):
                gpipe.record(pipe, keep=keep)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pipe is a Linear\. Pass the gpipe\.GPipe"):
        gpipe.record(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_has_all_ranks_and_parts_that_sum_to_its_wall_time(world: int, pool: WorkerPool) -> None:
    for found in answers(pool.run(recorded.record, world=world)):
        assert found["ranks"] == world
        assert sum(found["shares"].values()) == pytest.approx(1)
        asleep = recorded.STEPS * recorded.MICRO_BATCHES * 4 * recorded.SECONDS  # the first stage, at least
        assert asleep <= found["seconds"] <= found["wall since all met"] + CLOCKS_APART
        assert len(found["spans"]) == recorded.STEPS
        assert all(found["spans"])
