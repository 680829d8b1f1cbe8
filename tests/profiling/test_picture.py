"""Pictures for papers: the typical step as an SVG, or as points."""

import struct
import sys
from pathlib import Path

import pytest

from gpipe.profiling import Report, timeline_svg, typical_svg, write_picture
from gpipe.profiling.svg import SHARPNESS, WIDTH
from gpipe.schedule.action import parse_action
from gpipe.schedule.timeline import Span, Timeline

STEP = Timeline(1, (Span(0, parse_action("0F0"), 0.0, 0.1),), 0.2)


def test_points_are_as_many_as_a_printer_wants(tmp_path: Path) -> None:
    write_picture(tmp_path / "step.png", timeline_svg(STEP))
    points = (tmp_path / "step.png").read_bytes()
    assert points.startswith(b"\x89PNG")
    assert struct.unpack(">I", points[16:20]) == (SHARPNESS * WIDTH,)


def test_what_was_predicted_is_beside_what_was_measured() -> None:
    assert typical_svg(Report("", timelines=(STEP,))) == timeline_svg(STEP)
    assert "predicted" in typical_svg(Report("", timelines=(STEP,), predicted=STEP))


def test_another_suffix_and_a_missing_renderer_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"suffix '\.jpg'; a picture has \.svg or \.png"):
        write_picture(tmp_path / "step.jpg", "<svg/>")
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ImportError, match=r"pip install 'gpipe\[plots\]'"):
        write_picture(tmp_path / "step.png", "<svg/>")
