"""The page of a run: one file, nothing missing and nothing in excess, and it works in a browser."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.profiling import Report, report_html
from gpipe.profiling.page import MAX_SPANS, MAX_STEPS, drawn_steps, steps_json
from gpipe.schedule.action import CLOSING, SHARDS, Action, Kind
from gpipe.schedule.timeline import Span, Timeline
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.timelines import full, pipelined

VOID = ("meta", "link", "input")
EVIL = """</script><img src=x onerror=alert(1)>"'&amp;"""


class Balanced(HTMLParser):
    """Reads a page whose every element ends where it should; keeps text, and the names and places of elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words += data

    @property
    def sections(self) -> list[str]:
        return [str(attributes["id"]) for tag, attributes in self.seen if tag == "section"]


PARTS: dict[str, Any] = {
    "timeline": {"timelines": full().timelines},
    "breakdown": {"shares": full().shares},
    "memory": {"memory": full().memory},
    "losses": {"losses": full().losses},
    "configuration": {"configuration": full().configuration},
}


def test_a_whole_report_has_all_sections_and_the_numbers_that_one_looks_for() -> None:
    page = Balanced(report_html(full()))
    assert page.sections == [*PARTS]
    for words in (
        "three ranks",
        "Rank 1 is slow.",
        "measured: 33 % more time",
        "not finite at epoch 3",
        "5.00 MiB",
        "3.00 MiB predicted",
    ):
        assert words in page.words


@pytest.mark.parametrize("name", PARTS)
def test_what_is_absent_leaves_no_hole(name: str) -> None:
    assert Balanced(report_html(Report("alone", **PARTS[name]))).sections == [name]
    blank = {**{field: value for part in PARTS.values() for field, value in part.items()}}
    left = {field: value for field, value in blank.items() if field not in PARTS[name]}
    assert Balanced(report_html(Report("others", **left))).sections == [part for part in PARTS if part != name]


def test_a_single_loss_is_a_number_and_no_curve() -> None:
    page = report_html(Report("one epoch", losses=(0.5,), loss_each="epoch"))
    assert "<p>epoch 1: 0.5</p>" in page
    assert "<polyline" not in page


def test_a_prediction_alone_is_drawn() -> None:
    page = Balanced(report_html(Report("predicted", predicted=pipelined(2, 2))))
    assert page.sections == ["timeline"]
    assert "predicted step" in page.words
    with pytest.raises(ValueError, match="longer than 0 seconds"):
        report_html(Report("", predicted=Timeline(1, (), 0.0)))


@given(st.one_of(st.just(EVIL), st.text(st.characters(codec="utf-8", exclude_characters="\r\0"))))
def test_whatever_text_is_in_it_stays_text(text: str) -> None:
    report = replace(
        full(),
        title=text,
        sentence=text + ".",
        configuration={text: text},
        shares={text: 1.0},
        memory=({text: 1},),
        timelines=(replace(full().timelines[0], other={text: 1.0}),),
    )
    page, before = (
        Balanced(report_html(report)),
        Balanced(report_html(replace(full(), timelines=full().timelines[:1]))),
    )
    assert {tag for tag, _ in page.seen} <= {tag for tag, _ in before.seen}
    assert page.words.count(text) >= 5


def test_it_asks_for_nothing() -> None:
    page = report_html(full())
    assert not re.search(r"https?:|url\(|@import|fetch\(|\bsrc=", page)
    assert "default-src 'none'" in page


def test_a_large_run_is_less_than_a_megabyte_and_a_larger_one_says_what_is_drawn() -> None:
    assert len(report_html(full(8, 32, 10)).encode()) < 1_000_000
    assert drawn_steps(full(8, 32, 10)) == tuple(range(10))
    long = full(2, 2, 500)
    long = replace(long, timelines=(*long.timelines[250:], *long.timelines[:250]))
    assert MAX_STEPS - 2 <= len(drawn_steps(long)) <= MAX_STEPS
    assert {0, long.typical, 249, 499} <= {*drawn_steps(long)}
    assert f"steps ({len(drawn_steps(long))} of 500: the median, the slowest, and evenly" in report_html(long)
    wide = replace(full(), timelines=(pipelined(40, 250),) * 3)
    assert len(wide.timelines[0].spans) > MAX_SPANS
    assert drawn_steps(wide) == (0,)  # all are equal: the typical is the slowest


def test_times_are_off_by_less_than_a_millionth_of_the_step() -> None:
    timeline = pipelined(4, 8)
    data = json.loads(steps_json(Report("", timelines=(timeline,))))
    (step,) = data["steps"]
    for rank, lane in enumerate(step["ranks"]):
        begun, numbers = 0, iter(lane["actions"])
        spans = sorted((span for span in timeline.spans if span.rank == rank), key=lambda span: span.start)
        for span, (place, micro_batch, after, lasts) in zip(spans, zip(*[numbers] * 4, strict=True), strict=True):
            begun += after
            assert begun * timeline.seconds / data["parts"] == pytest.approx(span.start, abs=1e-6 * timeline.seconds)
            assert lasts * timeline.seconds / data["parts"] == pytest.approx(
                span.seconds, abs=2e-6 * timeline.seconds
            )
            assert (data["actions"][place]["stage"], micro_batch) == (span.action.stage, span.action.micro_batch)


# ---- in a browser ----


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: `apt-get install chromium` brings one")
    with browser() as page:
        yield page


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(full(), tmp_path)


def written(report: Report, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(report_html(report), encoding="utf-8")
    return path


def place(tab: Page, timeline: Timeline, longest: float, text: str) -> tuple[float, float]:
    """The middle of an action, such as `1F2`, in a window that shows so many seconds."""
    left, top, width = tab.value("(({left, top, width}) => [left, top, width])(canvas.getBoundingClientRect())")
    (span,) = (span for span in timeline.spans if str(span.action) == text)
    return left + (span.start + span.end) / 2 / longest * width, top + span.rank * 51 + 11 + 13


def test_pointing_at_an_action_tells_of_it_and_of_its_prediction(tab: Page, file: Path) -> None:
    tab.open(file)
    assert tab.text("#tip") == ""
    timeline = full().timelines[1]
    x, y = place(tab, timeline, timeline.seconds, "1F2")
    tab.mouse("Moved", x, y)
    assert tab.text("#tip") == (
        "forward, micro-batch 2, stage 1, rank 1\n20.0 ms, from 60.0 ms\npredicted 15.0 ms, from 45.0 ms"
    )
    tab.mouse("Moved", x, y - 18)
    assert tab.text("#tip").startswith("predicted forward, micro-batch")
    tab.mouse("Moved", *place(tab, timeline, timeline.seconds, "0B3"))
    tab.mouse("Moved", x, 5)
    assert tab.text("#tip") == ""
    tab.value("document.getElementById('show-predicted').click()")
    assert tab.value("document.getElementById('names').firstChild.offsetHeight") < 51
    assert tab.complaints == []


def test_the_wheel_keys_buttons_and_a_drag_zoom(tab: Page, file: Path) -> None:
    tab.open(file)
    timeline = full().timelines[1]
    whole = "step 2: 480 ms"
    x, y = place(tab, timeline, timeline.seconds, "1F2")
    assert tab.text("#range") == whole
    tab.mouse("Wheel", x, y, deltaX=0, deltaY=-300, modifiers=2)
    shown = tab.text("#range")
    assert shown.startswith(whole + ", showing ")
    start, end = (float(number) for number in re.findall(r"(?:showing|to) ([\d.]+) ms", shown))
    assert start < 70 < end  # 1F2 is in the middle of 60 and 80 ms, and stays where it is
    assert end - start == pytest.approx(480 / 4.48, rel=0.02)
    tab.mouse("Moved", x, y)
    assert "micro-batch 2, stage 1" in tab.text("#tip")
    tab.value("document.getElementById('whole').click()")
    assert tab.text("#range") == whole
    tab.mouse("Moved", x, y)
    tab.mouse("Pressed", x, y, button="left", clickCount=1)
    tab.mouse("Moved", x + 100, y, button="left", buttons=1)
    tab.mouse("Released", x + 100, y, button="left", clickCount=1)
    assert "showing 70.0 ms to" in tab.text("#range")
    tab.value("document.getElementById('view').focus()")
    tab.key("0")
    assert tab.text("#range") == whole
    tab.key("+")
    assert "showing" in tab.text("#range")
    assert tab.complaints == []


def test_the_wheel_alone_scrolls_the_page(tab: Page, file: Path) -> None:
    tab.open(file, height=400)
    timeline = full().timelines[1]
    tab.value("scrolled = new Promise((done) => addEventListener('scroll', () => done(scrollY))), 0")
    tab.mouse("Wheel", *place(tab, timeline, timeline.seconds, "0F0"), deltaX=0, deltaY=200)
    assert tab.value("scrolled") > 0
    assert tab.text("#range") == "step 2: 480 ms"


def test_fingers_tap_and_zoom(tab: Page, file: Path) -> None:
    tab.open(file, width=390)
    timeline = full().timelines[1]
    x, y = place(tab, timeline, timeline.seconds, "1F2")
    tab.fingers("Start", (x, y))
    tab.fingers("End")
    assert tab.text("#tip").startswith("forward, micro-batch 2, stage 1, rank 1\n")
    tab.fingers("Start", (x - 20, y), (x + 20, y))
    for apart in (30, 40, 60, 80):
        tab.fingers("Move", (x - apart, y), (x + apart, y))
    tab.fingers("End")
    start, end = (float(number) for number in re.findall(r"(?:showing|to) ([\d.]+) ms", tab.text("#range")))
    assert start < 70 < end
    assert 480 / 4 < (end - start) * 1.01 < 480  # zoomed, but a browser takes the first moves for itself
    assert tab.complaints == []


def test_the_keyboard_does_all(tab: Page, file: Path) -> None:
    tab.open(file)
    tab.value("document.querySelector('input[name=step]:checked').focus()")
    assert tab.text("#range").startswith("step 2:")
    tab.value("document.querySelector('input[value=\"3\"]').click()")
    assert tab.text("#range") == "step 3: 720 ms"
    tab.value("document.getElementById('view').focus()")
    tab.key("ArrowRight")
    assert tab.text("#tip").startswith("forward, micro-batch 0, stage 0, rank 0\n30.0 ms, from 0 ms")
    tab.key("ArrowDown")
    assert tab.text("#tip").startswith("forward, micro-batch 0, stage 1, rank 1\n")
    tab.key("End")
    assert tab.text("#tip").startswith("backward, micro-batch 0, stage 1, rank 1\n")
    tab.key("Home")
    tab.key("Escape")
    assert tab.text("#tip") == ""
    tab.value("document.querySelector('.curve').focus()")
    tab.key("ArrowLeft")
    assert tab.text(".read") == "epoch 3: not finite"
    tab.key("ArrowLeft")
    assert tab.text(".read") == "epoch 2: 1.25"
    assert tab.complaints == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize(
    "report", [full(), full(8, 32), Report("x" * 200, {"y" * 300: "z" * 300})], ids=["small", "large", "long"]
)
def test_nothing_is_wider_than_the_window(tab: Page, tmp_path: Path, report: Report, width: int, dark: bool) -> None:
    tab.open(written(report, tmp_path), width=width, dark=dark)
    assert tab.value("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    beyond = (
        "[...document.querySelectorAll('main *')].filter((one) => one.getBoundingClientRect().right > innerWidth)"
    )
    assert tab.value(f"{beyond}.filter((one) => !one.closest('.wide, #view')).length") == 0
    colors = tab.value("((css) => [css.backgroundColor, css.color])(getComputedStyle(document.body))")
    assert (colors == ["rgb(13, 17, 23)", "rgb(230, 237, 243)"]) == dark
    assert tab.complaints == []


def test_what_is_outside_of_the_pipeline_is_told(tab: Page, tmp_path: Path) -> None:
    step = replace(pipelined(2, 2), other={"data": 0.0, "weight update": 0.0125})
    tab.open(written(Report("", timelines=(step,)), tmp_path))
    assert tab.text("#outside") == "Outside the pipeline, on all ranks: weight update 12.5 ms."


def test_every_kind_is_drawn_and_empty_ranks_are_too(tab: Page, tmp_path: Path) -> None:
    actions = [Action(kind, 0, None if kind in CLOSING | SHARDS else 0) for kind in Kind]
    spans = tuple(Span(1, action, at, at + 1.0) for at, action in enumerate(actions))
    for timeline in (Timeline(3, spans, 12.0), Timeline(1, (), 1e-6)):
        tab.open(written(Report("kinds", timelines=(timeline,)), tmp_path))
        tab.value("document.getElementById('view').focus()")
        for key in ("ArrowDown", "ArrowDown", "ArrowUp", "End", "+"):
            tab.key(key)
        assert tab.complaints == []
