"""What notebooks show: well-formed pictures of any size and text, whatever became of the value; it never raises."""

import re
from base64 import b64decode
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe.planner.search.units import format_seconds
from gpipe.profiling import breakdown, cells
from gpipe.profiling.svg import MAX_LANES, MAX_SPANS
from gpipe.schedule.lower import place_transfers
from gpipe.schedule.program import Program
from gpipe.schedule.schedules.by_name import program_of
from tests.support.browser import CHROMIUM, browser
from tests.support.jobs.recorded import draw
from tests.support.planned import pipe_by_costs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

SVG = "{http://www.w3.org/2000/svg}"
ODD = "<b>&\"']]>"
X = torch.ones(8, 4)


def seen(html: str | None) -> tuple[ElementTree.Element | None, str]:
    """The picture of a cell, and the words under it."""
    assert html is not None
    assert len(html) < 200_000
    assert re.search("<script|href=|url\\(", html) is None
    cell = ElementTree.fromstring(html)
    image, words = cell.find("img"), cell.findtext("pre", "")
    if image is None:
        return None, words
    kind, _, data = image.attrib["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    picture = ElementTree.fromstring(b64decode(data))
    assert image.attrib["alt"]
    assert any(rect.get("class") == "page" for rect in picture.iter(f"{SVG}rect"))  # a ground of its own
    assert not any("id" in element.attrib or "href" in str(element.attrib) for element in picture.iter())
    height = float(picture.attrib["height"])
    assert all(float(text.get("y", 0)) <= height for text in picture.iter(f"{SVG}text"))
    return picture, words


def texts(picture: ElementTree.Element | None) -> list[str]:
    assert picture is not None
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def ranks(picture: ElementTree.Element | None) -> int:
    return sum(text.startswith("rank ") for text in texts(picture))


def make(**options: Any) -> gpipe.GPipe:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    build: Any = pipe_by_costs if "costs" in options else gpipe.GPipe
    pipe: gpipe.GPipe = build(layers, **{"partitions": 3, "micro_batches": 4, **options})
    return pipe


def test_a_pipe_shows_the_step_that_is_predicted_and_its_summary() -> None:
    pipe = make(partitions=[1, 2, 3])
    picture, words = seen(pipe._repr_html_())
    assert ranks(picture) == 3
    assert "pipe: 3 partitions, 4 micro-batches" in texts(picture)
    assert words.split() == pipe.summary().split()
    assert repr(pipe) == nn.Module.__repr__(pipe)


@pytest.mark.parametrize("costs", [[0.0] * 6, [0, 0, 0, 0, 0, 1e-300], [1e-9, 1, 1e9, 1, 1, 1], None])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_v", "interleaved"])
def test_a_pipe_of_any_costs_and_schedule_is_drawn(costs: list[float] | None, schedule: str) -> None:
    pipe = make(schedule=schedule, costs=costs)
    for value in (pipe, pipe.prediction, pipe.program):
        assert ranks(seen(value._repr_html_())[0]) == 3


def test_names_are_text_whatever_is_in_them() -> None:
    names = [ODD, "\x00\n", "\ud800", "a" * 1000]
    layers = nn.Sequential()
    for name in names:
        layers._modules[name] = nn.Linear(4, 4)
    pipe = gpipe.GPipe(layers, partitions=2, micro_batches=2)
    words = seen(pipe._repr_html_())[1]
    assert ODD in words
    assert all(len(line) <= cells.COLUMNS for line in words.splitlines())


def test_values_show_themselves_before_and_after_steps_and_when_closed() -> None:
    pipe = make(sample=X)
    recording = gpipe.record(pipe)
    assert seen(recording._repr_html_()) == (None, breakdown.NO_STEPS)
    version = [p._version for p in pipe.parameters()]
    for _ in range(3):
        assert pipe._repr_html_()
        pipe.step(X, X, mse_loss)
        pipe.close()
    picture, words = seen(recording._repr_html_())
    assert ranks(picture) == 2 * 3
    assert {"measured step (median of 3)", "predicted step"} <= {*texts(picture)}
    assert words.startswith("part ")
    assert words.endswith(cells.ONE_STEP)
    assert [p._version for p in pipe.parameters()] == version
    with torch.no_grad():
        pipe(X)
    recording.stop()
    assert seen(recording._repr_html_())[0] is not None


def test_the_words_of_a_recording_are_of_the_step_that_is_drawn() -> None:
    """Bug story: under the step of median length stood the mean of all, by a first that took ten times as long."""
    pipe = make()
    with gpipe.record(pipe) as recording:
        for _ in range(5):
            pipe.step(X, X, mse_loss)
    slow = recording.runs[0].timeline
    recording.runs[0] = recording.runs[0]._replace(timeline=replace(slow, seconds=slow.seconds + 1000.0))
    step = recording.timelines[recording._steps("").typical]
    picture, words = seen(cells.recording(recording))
    assert " ".join(str(breakdown.breakdown([step])).split()) in " ".join(words.split())
    assert step.seconds < 1000.0
    assert format_seconds(step.seconds) in " ".join(texts(picture))
    with gpipe.record(pipe) as once:
        pipe.step(X, X, mse_loss)
    picture, words = seen(cells.recording(once))
    assert "measured step" in texts(picture)
    assert cells.ONE_STEP not in words


def test_a_recording_of_a_step_that_failed_says_that_it_keeps_none() -> None:
    pipe = make()
    with gpipe.record(pipe) as recording, pytest.raises(RuntimeError):
        pipe.step(X[:, :2], X, mse_loss)
    assert "Failed steps are not kept" in seen(recording._repr_html_())[1]


def test_rows_of_a_table_stay_whole_and_what_stands_under_a_long_one_is_shown() -> None:
    names = [f"a_rather_long_name_of_a_block_{at}" for at in range(64)]
    pipe = gpipe.GPipe(nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names)), 64, 2)
    words = seen(pipe._repr_html_())[1]
    rows = [line for line in words.splitlines() if " cpu " in line]
    assert [row.split()[2] for row in rows[:20]] == names[:20]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert "predicted step: " in words
    assert re.search(r"\.\.\. \d+ more lines", words)


def test_numbers_are_written_out_and_one_is_no_plural() -> None:
    pipe = gpipe.GPipe([nn.Linear(64, 64)], 1, 1)
    shown = [seen(value._repr_html_()) for value in (pipe, pipe.program, pipe.prediction)]
    every = " ".join([*(" ".join(texts(picture)) for picture, _ in shown), *(words for _, words in shown)])
    assert "pipe: 1 partition, 1 micro-batch" in every
    assert "program: 1 rank, 1 micro-batch" in every
    assert not re.search(r"\be\+\d|\b1 (ranks|partitions|micro-batches)", every)


def test_a_prediction_says_seconds_and_bytes_where_they_are_known() -> None:
    unmeasured = make().prediction
    assert "Pass sample= to GPipe to predict seconds" in seen(unmeasured._repr_html_())[1]
    pipe = make(sample=X, remat="auto")
    picture, words = seen(pipe.prediction._repr_html_())
    assert "predicted step: 3 ranks, 4 micro-batches" in texts(picture)
    assert re.search(r"A step takes [\d.]+ (ms|µs|s)\. Ranks are idle for [\d.]+%", words)
    assert len(re.findall(r"Rank \d holds at most [\d.]+ \w+", words)) == 3


def test_a_plan_is_drawn_and_explained() -> None:
    devices = [gpipe.Device(memory=2**20, flops=1e9)] * 2
    plan = gpipe.find_plan([nn.Linear(64, 64) for _ in range(4)], torch.zeros(8, 64), devices, schedule="1f1b")
    picture, words = seen(plan._repr_html_())
    assert "plan: 2 ranks, 8 micro-batches, schedule 1f1b" in texts(picture)
    assert words.split() == plan.explain().split()


def test_a_program_that_cannot_be_run_says_why() -> None:
    broken = Program.from_text("rank_of 0 1\nmicro_batches 1\nroutes x:0>1\nrow 0B0 0F0\nrow 1F0 1B0")
    picture, words = seen(broken._repr_html_())
    assert picture is None
    assert "0B0" in words
    assert Program((), 0, (), ())._repr_html_() is None  # the cell shows its text


@pytest.mark.parametrize(
    ("schedule", "size"), [("1f1b", (64, 128)), ("gpipe", (32, 32)), ("zb_v", (16, 64)), ("gpipe", (2, 2000))]
)
def test_large_programs_are_drawn_in_part_as_they_say(schedule: str, size: tuple[int, int]) -> None:
    program = program_of(schedule, *size)
    picture, _ = seen(program._repr_html_())
    assert ranks(picture) == min(size[0], MAX_LANES)
    title = texts(picture)[0]
    assert (", ranks 0 to 31 of 64" in title) == (size[0] == 64)
    assert (", the first" in title) == (min(size[0], MAX_LANES) * len(program.table[0]) > MAX_SPANS)


def test_a_large_pipe_shows_itself_without_going_through_its_table() -> None:
    layers = [nn.Linear(2, 2) for _ in range(256)]
    pipe = gpipe.GPipe(layers, partitions=64, micro_batches=1024)
    assert seen(pipe._repr_html_()) == (None, cells.TOO_LARGE)
    assert not pipe._stages._compiled


def test_over_processes_each_draws_by_itself(pool: WorkerPool) -> None:
    for html in answers(pool.run(draw, world=3)):
        assert [ranks(seen(each)[0]) for each in html] == [3] * 4


def test_what_cannot_be_drawn_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError

    for name in ("program", "pipe"):
        monkeypatch.setattr(cells, name, fail)
    pipe = make()
    assert pipe._repr_html_() is pipe.program._repr_html_() is None


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: `apt-get install chromium` brings one")
def test_two_pictures_are_seen_on_one_page_that_they_leave_as_it_was(tmp_path: Path) -> None:
    pipe, file = make(), tmp_path / "page.html"
    file.write_text(f"<p class='title'>mine</p>{pipe._repr_html_()}{place_transfers(pipe.program)._repr_html_()}")
    with browser() as page:
        page.open(file)
        assert page.value("[...document.images].map((i) => i.complete && i.naturalWidth)") == [960, 960]
        assert page.value("getComputedStyle(document.querySelector('.title')).fontSize") == "16px"
        assert page.complaints == []
