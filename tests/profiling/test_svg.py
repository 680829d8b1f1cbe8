"""Pictures: every action where it was, on light and dark pages, as an SVG or as points for papers."""

import struct
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpipe.profiling import Report, timeline_svg, timelines_svg, typical_svg, write_picture
from gpipe.profiling.svg import LEFT, RIGHT, SHARPNESS, WIDTH
from gpipe.schedule.action import CLOSING, NAMES, SHARDS, Action, Kind
from gpipe.schedule.timeline import Span, Timeline
from tests.support.timelines import pipelined

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[ElementTree.Element]:
    return [r for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.get("class") in {"box", "line"}]


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 8), (8, 32)])
def test_every_span_is_a_box_where_and_as_long_as_it_was(ranks: int, micro_batches: int) -> None:
    timeline = pipelined(ranks, micro_batches)
    drawn = boxes(timeline_svg(timeline))
    assert len(drawn) == len(timeline.spans)
    scale = (WIDTH - LEFT - RIGHT) / timeline.seconds
    for box, span in zip(drawn, timeline.spans, strict=True):
        assert float(box.attrib["x"]) == pytest.approx(LEFT + span.start * scale, abs=0.01)
        assert float(box.attrib["width"]) == pytest.approx(span.seconds * scale, abs=0.01)
        assert box.findtext(f"{SVG}title", "").startswith(f"{span.action}: ")


def test_every_kind_has_a_word_and_a_color_of_its_own() -> None:
    actions = [Action(kind, 0, None if kind in CLOSING | SHARDS else 0) for kind in Kind]
    svg = timeline_svg(Timeline(1, tuple(Span(0, a, at, at + 1) for at, a in enumerate(actions)), len(actions)))
    assert [NAMES[kind] for kind in Kind] == words(svg)[-len(Kind) - 2 : -2]  # behind it idle, and what numbers mean
    legend = ElementTree.fromstring(svg).findall(f"{SVG}rect[@rx='2']")
    assert all(float(patch.attrib["x"]) + 12 < WIDTH - RIGHT for patch in legend)
    assert all(float(patch.attrib["y"]) + 12 < float(svg.split('height="')[1].split('"')[0]) for patch in legend)
    colors = {action.kind: box.attrib["fill"] for action, box in zip(actions, boxes(svg), strict=True)}
    assert len(set(colors.values())) == len(colors)


def test_each_rank_has_a_lane_with_its_idle_share_and_numbers_where_they_fit() -> None:
    text = words(timeline_svg(pipelined(2, 8), "a < b & c"))
    assert "a < b & c" in text
    assert [word for word in text if word.startswith("rank")] == ["rank 0", "rank 1"]
    assert [word for word in text if word.endswith("% idle")] == ["11% idle", "11% idle"]
    assert words(timeline_svg(pipelined(2, 4))).count("3") == 3 * 2
    assert "31" not in words(timeline_svg(pipelined(8, 32)))


def test_stacked_timelines_share_the_axis() -> None:
    naive, fast = pipelined(4, 1), replace(pipelined(4, 8), seconds=0.08)
    svg = timelines_svg({"naive": naive, "pipelined": fast})
    lanes = [
        r for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.get("class") == "idle" and r.get("rx") is None
    ]
    width = WIDTH - LEFT - RIGHT
    long = max(naive.seconds, fast.seconds)
    assert [float(lane.attrib["width"]) for lane in lanes] == pytest.approx(
        [width * naive.seconds / long] * 4 + [width * fast.seconds / long] * 4, abs=0.01
    )
    assert any("utilization 25%" in word for word in words(svg))


def test_nothing_to_draw_is_refused() -> None:
    for nothing in ({}, {"empty": Timeline(1, (), 0.0)}):
        with pytest.raises(ValueError, match="timelines is empty"):
            timelines_svg(nothing)


@pytest.mark.parametrize("width", [400, 640])
def test_a_narrow_picture_holds_all_that_is_in_it(width: int) -> None:
    svg = ElementTree.fromstring(timelines_svg({"K=3": pipelined(3, 4)}, width=width))
    height = float(svg.attrib["height"])
    for patch in svg.iter(f"{SVG}rect"):
        assert float(patch.get("x", 0)) + float(patch.attrib["width"]) <= width
        assert float(patch.get("y", 0)) + float(patch.attrib["height"]) <= height


def test_points_are_as_many_as_a_printer_wants_and_what_cannot_be_drawn_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = pipelined(1, 1)
    assert typical_svg(Report("", timelines=(step,))) == timeline_svg(step)
    both = typical_svg(Report("", timelines=(step,), predicted=step))
    assert "predicted" in both
    assert "prefers-color-scheme: dark" in both
    write_picture(tmp_path / "step.png", both)
    points = (tmp_path / "step.png").read_bytes()
    assert points.startswith(b"\x89PNG")
    assert struct.unpack(">I", points[16:20]) == (SHARPNESS * WIDTH,)
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[plots\]'"):
        write_picture(tmp_path / "step.png", both)
