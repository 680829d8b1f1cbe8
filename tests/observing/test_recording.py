"""`gpipe.record` from a user's script: the wall time in parts, a sentence, files."""

import gc
import json
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.observing.advice import advise
from gpipe.report import read_report, report_json
from tests.support.plain_loop import squares, weights_of

DRIVERS = pytest.mark.parametrize("driver", ["lockstep", "threads"])
X, Y = torch.randn(8, 3), torch.randn(8, 3)


class Slow(nn.Linear):
    """A layer that takes so many seconds, whatever the machine."""

    def __init__(self, seconds: float) -> None:
        super().__init__(3, 3)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def slow(seconds: list[float], partitions: Any, **changes: Any) -> gpipe.GPipe:
    with weights_of(1):
        layers = [Slow(some) for some in seconds]
    return gpipe.GPipe(layers, partitions, 4, **{"remat": "never", "costs": seconds, **changes})


@DRIVERS
def test_the_parts_sum_to_the_wall_time_of_the_loop(driver: str) -> None:
    with slow([0.01, 0.01], 2, driver=driver) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters())
        pipe.step(X, Y, squares)
        recording = gpipe.record(pipe)
        start = time.perf_counter()
        for x, y in [(X, Y)] * 5:
            pipe.step(x, y, squares)
            optimizer.step()
        wall = time.perf_counter() - start
        recording.stop()
    found = recording.breakdown()
    assert found.steps == 5
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.seconds * found.steps == pytest.approx(wall, rel=0.005)


def test_data_updates_and_what_is_between_have_their_parts() -> None:
    def batches() -> Any:
        for _ in range(4):
            time.sleep(0.05)
            yield X, Y

    with slow([0.0, 0.0], 2) as pipe, gpipe.record(pipe) as recording:
        optimizer = torch.optim.SGD(pipe.parameters())
        optimizer.register_step_pre_hook(lambda *_: time.sleep(0.02))
        for x, y in recording.loading(batches()):
            pipe.step(x, y, squares)
            optimizer.step()
            time.sleep(0.03)
    found = recording.breakdown()
    seconds = {name: share * found.seconds * found.steps for name, share in found.shares.items()}
    assert 3 * 0.05 <= seconds["data"] < 4 * 0.05  # the first is made before the first step begins
    assert seconds["weight update"] >= 4 * 0.02
    assert seconds["between steps"] >= 3 * 0.03
    assert "Making mini-batches ready" in recording.explain()


@pytest.mark.parametrize("driver", ["threads"])
def test_a_slow_stage_is_named_with_the_cuts_that_mend_it(driver: str) -> None:
    seconds = [0.01, 0.01, 0.01, 0.01, 0.01, 0.01]
    with slow(seconds, [4, 1, 1], driver=driver) as pipe, gpipe.record(pipe) as recording:
        for _ in range(3):
            pipe.step(X, Y, squares)
    sentence = recording.explain()
    assert "Stage 0" in sentence
    assert "partitions=[2, 2, 2]" in sentence
    with slow(seconds, [2, 2, 2], driver=driver) as pipe, gpipe.record(pipe) as after:
        for _ in range(3):
            pipe.step(X, Y, squares)
    gain = next(advice.gain for advice in recording.advice() if "partitions=" in advice.text)
    assert recording.breakdown().seconds / after.breakdown().seconds == pytest.approx(gain, rel=0.25)


def test_recompute_is_told_with_what_it_gives() -> None:
    with slow([0.02, 0.02], 2, remat="always") as pipe, gpipe.record(pipe) as recording:
        pipe.step(X, Y, squares)
    assert any("remat='never'" in advice.text and advice.gain > 1.2 for advice in recording.advice())
    assert recording.breakdown().shares["recompute"] > 0.1


def test_one_thread_for_all_ranks_is_told() -> None:
    with slow([0.02, 0.02], 2, driver="lockstep") as pipe, gpipe.record(pipe) as recording:
        pipe.step(X, Y, squares)
    assert "driver='lockstep'" in recording.explain()


def test_advice_is_sorted_by_gain_and_worth_something() -> None:
    with slow([0.01, 0.03], 2) as pipe, gpipe.record(pipe) as recording:
        pipe.step(X, Y, squares)
    gains = [advice.gain for advice in advise(recording._seen())]
    assert gains == sorted(gains, reverse=True)
    assert all(gain >= 1.02 for gain in gains)


def test_files_by_suffix(tmp_path: Path) -> None:
    with slow([0.0, 0.0], 2) as pipe, gpipe.record(pipe) as recording:
        for _ in range(3):
            pipe.step(X, Y, squares)
        assert recording.save(tmp_path / "step.svg").read_text().startswith("<svg")
        events = json.loads(recording.save(tmp_path / "steps.json").read_text())["traceEvents"]
        assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {0, 1, 2}
        assert "step 1: " in recording.save(tmp_path / "steps.html").read_text(encoding="utf-8")
        report = recording.report("three")
        assert read_report(report_json(report)) == report
        with pytest.raises(ValueError, match=r"suffix '\.png'"):
            recording.save(tmp_path / "step.png")


def test_it_goes_on_until_it_is_stopped_and_keeps_the_last_steps() -> None:
    with slow([0.0, 0.0], 2) as pipe:
        recording = gpipe.record(pipe, keep=3)
        assert str(recording) == "no steps recorded"
        for _ in range(5):
            pipe.step(X, Y, squares)
        assert len(recording.timelines) == 3
        recording.stop()
        assert pipe.recorder is None
        pipe.step(X, Y, squares)
        assert len(recording.timelines) == 3
        assert "forward" in str(recording)


def test_nothing_recorded_and_no_pipe_are_told() -> None:
    with slow([0.0, 0.0], 2) as pipe:
        recording = gpipe.record(pipe)
        for ask in (recording.breakdown, recording.explain, recording.advice):
            with pytest.raises(ValueError, match="nothing was recorded"):
                ask()
    with pytest.raises(TypeError, match=r"given a Linear; give the gpipe.GPipe"):
        gpipe.record(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_every_optimizer_hook_is_gone_behind_it() -> None:
    with slow([0.0, 0.0], 2) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters())
        with gpipe.record(pipe) as recording:
            pipe.step(X, Y, squares)
            optimizer.step()
        share = recording.breakdown().seconds
        optimizer.step()
        assert recording.breakdown().seconds == share


def test_a_slow_stage_that_no_cut_mends_is_named_too() -> None:
    seconds = [0.03, 0.01, 0.01]
    with slow(seconds, 3) as pipe, gpipe.record(pipe) as recording:
        for _ in range(3):
            pipe.step(X, Y, squares)
    assert recording.explain().startswith("Stage 0 takes")
    assert "no cuts are better" in recording.explain()


def test_an_optimizer_that_steps_another_inside_is_one_update() -> None:
    class Slower(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(0.05)
            return super().step(closure)

    with slow([0.0, 0.0], 2) as pipe, gpipe.record(pipe) as recording:
        optimizer = Slower(pipe.parameters())
        torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
        pipe.step(X, Y, squares)
        optimizer.step()
    found = recording.breakdown()
    assert found.shares["weight update"] * found.seconds >= 0.05


def test_a_step_that_fails_is_between_steps() -> None:
    def fails(*_: Tensor) -> Tensor:
        time.sleep(0.1)
        raise ZeroDivisionError

    with slow([0.0, 0.0], 2) as pipe, gpipe.record(pipe) as recording:
        pipe.step(X, Y, squares)
        with pytest.raises(ZeroDivisionError):
            pipe.step(X, Y, fails)
        pipe.step(X, Y, squares)
    found = recording.breakdown()
    assert found.shares["between steps"] * found.seconds * found.steps >= 0.1


def test_a_recording_that_is_never_stopped_keeps_no_pipe_alive() -> None:
    pipe = slow([0.0, 0.0], 2, driver="lockstep")
    recording = gpipe.record(pipe)
    pipe.step(X, Y, squares)
    alive = weakref.ref(pipe)
    del pipe, recording
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("keep", [0, -1, 1.5, "3"])
def test_keep_is_a_number_of_steps(keep: Any) -> None:
    with slow([0.0, 0.0], 2) as pipe, pytest.raises(ValueError, match="keep="):
        gpipe.record(pipe, keep=keep)


def test_a_stopped_recording_is_not_begun_again() -> None:
    with slow([0.0, 0.0], 2) as pipe:
        recording = gpipe.record(pipe)
        recording.stop()
        with pytest.raises(ValueError, match="has been stopped"), recording:
            pass
