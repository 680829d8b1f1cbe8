"""A picture in a file: an SVG as it is, or as points for where an SVG is not taken."""

from pathlib import Path

from gpipe.report.stored import Report
from gpipe.report.svg import timeline_svg, timelines_svg

SHARPNESS = 3
"""Points of a PNG for each unit of the SVG: 2880 across, 300 per inch at the width of a page of paper."""
PICTURES = (".svg", ".png")
NO_RENDERER = "a .png is drawn by resvg-py: pip install 'gpipe[plots]', or give a path that ends in .svg"


def typical_svg(report: Report) -> str:
    """Draws the step of median length, and below it what was predicted; the report must have a step.

    >>> from gpipe.plan.timeline import Timeline
    >>> typical_svg(Report("", timelines=(Timeline(1, (), 0.2),)))[:4]
    '<svg'
    """
    typical = report.timelines[report.typical]
    if report.predicted is None:
        return timeline_svg(typical)
    return timelines_svg({"measured": typical, "predicted": report.predicted})


def write_picture(path: Path, svg: str) -> None:
    """Writes an SVG to a file that ends in `.svg`, or its points on white to one that ends in `.png`.

    Raises:
        ImportError: A PNG is wanted, and resvg-py is missing.
        ValueError: The suffix is another.

    >>> write_picture(Path("step.jpg"), "<svg/>")
    Traceback (most recent call last):
    ValueError: step.jpg has the suffix '.jpg'; a picture has .svg or .png
    """
    match path.suffix:
        case ".svg":
            path.write_text(svg, encoding="utf-8")
        case ".png":
            path.write_bytes(_points(svg))
        case other:
            raise ValueError(f"{path} has the suffix {other!r}; a picture has {' or '.join(PICTURES)}")


def _points(svg: str) -> bytes:
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise ImportError(NO_RENDERER) from error
    return bytes(svg_to_bytes(svg_string=svg, background="white", zoom=SHARPNESS))
