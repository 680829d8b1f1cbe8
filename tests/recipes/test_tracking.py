"""`--report-to`: the numbers of a run, as a tracker has them in the end."""

import json
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpipe.recipes.images import DigitsRecipe
from gpipe.recipes.options.training import ImagesOptions
from gpipe.recipes.training import open_tracker
from gpipe.recipes.world import World
from tests.support.small_images import OPTIONS, prepared, same, shown, train, weights
from tests.support.trackers import own_trackio

TRACKERS = pytest.mark.parametrize("tracker", ["tensorboard", "trackio"])
FOUR_STEPS = replace(OPTIONS, epochs=2)


def reporting_to(tracker: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> ImagesOptions:
    """Options of a run whose tracker, if it is installed, writes into its folder."""
    own_trackio(out, monkeypatch)
    pytest.importorskip(tracker)
    return replace(FOUR_STEPS, out=out, report_to=tracker)


def told(options: ImagesOptions) -> dict[str, list[tuple[int, float]]]:
    """What the tracker has: by name, steps and values."""
    found: dict[str, list[tuple[int, float]]] = {}
    if options.report_to == "trackio":
        with sqlite3.connect(options.out / "trackio" / "gpipe.db") as kept:
            for step, numbers in kept.execute("select step, metrics from metrics order by id"):
                for name, value in json.loads(numbers).items():
                    found.setdefault(name, []).append((step, value))
        return found
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(options.out / "tensorboard"))
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


@TRACKERS
def test_a_tracker_has_losses_what_was_measured_and_where_the_time_went(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, plain = reporting_to(tracker, tmp_path / "one", monkeypatch), replace(FOUR_STEPS, out=tmp_path / "two")
    epochs, text = train(options)
    found = told(options)
    assert [step for step, _ in found["loss"]] == [1, 2, 3, 4]
    losses = [loss for _, loss in found["loss"]]
    assert [sum(losses[:2]) / 2, sum(losses[2:]) / 2] == pytest.approx([epoch.loss for epoch in epochs])
    expected = {
        "epoch": [1, 2],
        "epoch_loss": [epoch.loss for epoch in epochs],
        "epoch_seconds": [epoch.seconds for epoch in epochs],
        "held_out/accuracy": [epoch.measured["accuracy"] for epoch in epochs],
    }
    for name, values in expected.items():
        assert [step for step, _ in found[name]] == [2, 4]
        assert [value for _, value in found[name]] == pytest.approx(values)
    assert found["gpipe/steps"] == [(4, 1)]  # the last epoch is recorded, but for its first step
    assert sum(values[0][1] for name, values in found.items() if name.startswith("gpipe/share/")) == pytest.approx(1)
    assert shown(text) == shown(train(plain)[1])
    assert same(weights(options.out), weights(plain.out))


@TRACKERS
def test_a_run_that_goes_on_goes_on_there_too(tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in the second epoch, and goes on from the end of the first."""

    class Ends(DigitsRecipe):
        def before_step(self, pipe: Any, step: int, steps: int) -> None:
            if step == 3:
                raise KeyboardInterrupt

    options = reporting_to(tracker, tmp_path, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(options, Ends)
    epochs, _ = train(replace(options, resume=True))
    found = told(options)["loss"]
    losses = [dict(found)[step] for step in (1, 2, 3, 4)]
    assert [sum(losses[:2]) / 2, sum(losses[2:]) / 2] == pytest.approx([epoch.loss for epoch in epochs])
    if tracker == "tensorboard":
        assert len(found) == 4  # step 3 was taken twice
    else:
        with sqlite3.connect(options.out / "trackio" / "gpipe.db") as kept:
            assert kept.execute("select count(distinct run_id) from metrics").fetchone() == (1,)


def test_a_run_anew_replaces_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = reporting_to("tensorboard", tmp_path, monkeypatch)
    train(options)
    train(replace(options, seed=1, epochs=1))
    assert [step for step, _ in told(options)["loss"]] == [1, 2]


def test_the_first_process_alone_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepared(reporting_to("tensorboard", tmp_path, monkeypatch))
    job.world = World(rank=1, size=2)
    with job.pipe, open_tracker(job) as report:
        report({"loss": 1.0})
    assert not (tmp_path / "tensorboard").exists()


@TRACKERS
def test_a_tracker_that_is_missing_is_named_before_anything_is_built(
    tracker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    text = f"--report-to {tracker} requires {tracker}. Run pip install '.\\[{tracker}\\]'"
    with pytest.raises(ImportError, match=text):
        prepared(replace(OPTIONS, out=tmp_path / "out", report_to=tracker))
    assert not (tmp_path / "out").exists()
