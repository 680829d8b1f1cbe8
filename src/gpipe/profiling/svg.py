"""Timelines as pictures: an SVG with a lane for each rank, written by hand, readable on light and dark pages.

A lane is as long as its step, and gray where its rank computes nothing; transfers are a thin line under the boxes.
Where a rank holds several stages, the boxes of later ones are lighter.

A picture in a file: an SVG as it is, or as points for where an SVG is not taken.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from statistics import median
from typing import Literal, TypeAlias
from xml.sax.saxutils import escape, quoteattr

from gpipe.profiling.colors import COLORS, is_bright, nth_stages, shade
from gpipe.profiling.stored import Report
from gpipe.schedule.action import NAMES, TRANSFERS, Kind
from gpipe.schedule.timeline import Span, Timeline

WIDTH = 960
LEFT, RIGHT = 96, 24  # beside the lanes: who the lane belongs to, half a tick label
PAD, TITLE, LANE, GAP, BETWEEN, AXIS, LEGEND = 10, 30, 30, 6, 16, 26, 26
BOX, LINE = 25, 4  # heights within a lane: a box, a transfer
DIGIT, LETTER = 7, 6.5  # rough widths of type

Unit: TypeAlias = Literal["ms", ""]
"""What times are written in: milliseconds, or units that have no name, of which one is a second of the timeline."""

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.page { fill: #ffffff } .idle { fill: #e4e7eb } .grid { stroke: #c8cdd3 } .box { stroke: #ffffff; stroke-width: .6 }
.title { font-size: 14px; font-weight: 600 } .soft { font-size: 11px; fill: #59636e }
.label { font-size: 11px; fill: #ffffff } .ink { fill: #1f2328 }
.label, .tick { text-anchor: middle } .right { text-anchor: end }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 } .idle { fill: #2a313c } .grid { stroke: #3d444d }
  .box { stroke: #0d1117 } .soft { fill: #9198a1 } .label { fill: #ffffff } .ink { fill: #1f2328 }
}
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """From seconds to the x of the picture, the same for all timelines in it."""

    seconds: float

    def __call__(self, seconds: float) -> float:
        """Returns the x of a time."""
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / self.seconds

    def ticks(self) -> list[float]:
        """Returns round times from 0 to the end, eleven at most.

        >>> Scale(0.23).ticks()
        [0.0, 0.05, 0.1, 0.15, 0.2]
        """
        decade = 10.0 ** floor(log10(self.seconds / 10))
        step = next(n * decade for n in (1, 2, 5, 10) if n * decade * 10 >= self.seconds)
        return [round(n * step, 12) for n in range(floor(self.seconds / step) + 1)]


def timeline_svg(timeline: Timeline, title: str = "") -> str:
    """Draws one step as an SVG document: a lane for each rank, a box for each action, time in milliseconds.

    >>> from gpipe.schedule.action import parse_action
    >>> timeline_svg(Timeline(1, (Span(0, parse_action("0F0"), 0.0, 0.1),), 0.2))[:4]
    '<svg'
    """
    return timelines_svg({title: timeline})


def timelines_svg(timelines: Mapping[str, Timeline], unit: Unit = "ms") -> str:
    """Draws several steps, by title, one above the other on a common time axis, each with its utilization.

    Of a table whose costs are in proportions alone, `unit=""` writes times as they are.

    >>> from gpipe.schedule.action import parse_action
    >>> step = Timeline(1, (Span(0, parse_action("0F0"), 0.0, 0.1),), 0.2)
    >>> "200 ms, utilization 50%" in timelines_svg({"before": step, "after": step})
    True

    Raises:
        ValueError: There is nothing to draw, or a timeline is 0 seconds long.
    """
    if not timelines or min(timeline.seconds for timeline in timelines.values()) <= 0:
        raise ValueError("a picture needs at least one timeline, each longer than 0 seconds")
    scale = Scale(max(timeline.seconds for timeline in timelines.values()))
    panels: list[str] = []
    y = float(PAD)
    for title, timeline in timelines.items():
        panels += _panel(title, timeline, scale, unit, y)
        y += _height(timeline) + BETWEEN
    y -= BETWEEN
    places, note = _legend_places(timelines.values()), _note(timelines.values())
    return "\n".join(
        (
            *_page(timelines, unit, height=ceil(y + AXIS + LEGEND * (places[-1][2] + 1))),
            *panels,
            *_axis(scale, unit, y),
            *_legend(places, note, y + AXIS),
            "</svg>\n",
        )
    )


def _page(timelines: Mapping[str, Timeline], unit: Unit, height: int) -> Iterator[str]:
    spoken = "; ".join(f"{title}: {_utilization(timeline, unit)}" for title, timeline in timelines.items())
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(spoken)}>'
    yield f"<style>{STYLE}</style>"
    yield f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>'


def _height(timeline: Timeline) -> int:
    return TITLE + timeline.ranks * (LANE + GAP)


def _axis(scale: Scale, unit: Unit, y: float) -> Iterator[str]:
    for tick in scale.ticks():
        name = f" {unit}" if unit and tick == 0 else ""
        yield f'<text class="tick soft" x="{scale(tick):.2f}" y="{y + 12:g}">{_in(tick, unit):g}{name}</text>'


def _in(seconds: float, unit: Unit) -> float:
    return seconds * 1000 if unit == "ms" else seconds


def _panel(title: str, timeline: Timeline, scale: Scale, unit: Unit, y: float) -> Iterator[str]:
    """A title, lines through the lanes at round times, and for each rank a lane with its boxes."""
    yield f'<text class="title" x="{PAD}" y="{y + 14:g}">{escape(title)}</text>'
    yield f'<text class="right" x="{WIDTH - RIGHT}" y="{y + 14:g}">{_utilization(timeline, unit)}</text>'
    for tick in scale.ticks():
        yield f'<path class="grid" d="M{scale(tick):.2f} {y + TITLE - GAP:g}V{y + _height(timeline):g}"/>'
    tops = [y + TITLE + rank * (LANE + GAP) for rank in range(timeline.ranks)]
    for rank, top in enumerate(tops):
        idle = 1 - timeline.busy(rank) / timeline.seconds
        yield f'<text x="{PAD}" y="{top + 12:g}">rank {rank}</text>'
        yield f'<text class="soft" x="{PAD}" y="{top + 26:g}">{idle:.0%} idle</text>'
        width = scale(timeline.seconds) - LEFT
        yield f'<rect class="idle" x="{LEFT}" y="{top:g}" width="{width:.2f}" height="{LANE}"/>'
    numbered, nth = _numbered(timeline, scale), nth_stages(timeline)
    stages = 1 + max(nth.values(), default=0)
    for span in timeline.spans:
        color = shade(span.action.kind, nth[span.rank, span.action.stage], stages)
        yield from _box(span, color, scale, unit, tops[span.rank], numbered)


def _numbered(timeline: Timeline, scale: Scale) -> frozenset[Kind]:
    """Returns the kinds whose boxes are wide enough, on the whole, to show their micro-batch."""
    widths: dict[Kind, list[float]] = {}
    for span in timeline.spans:
        if span.action.micro_batch is not None and span.action.kind not in TRANSFERS:
            widths.setdefault(span.action.kind, []).append(scale(span.end) - scale(span.start))
    longest = max((len(str(span.action.micro_batch)) for span in timeline.spans), default=0)
    return frozenset(kind for kind, all_ in widths.items() if median(all_) >= DIGIT * longest + 2)


def _box(span: Span, color: str, scale: Scale, unit: Unit, top: float, numbered: frozenset[Kind]) -> Iterator[str]:
    kind, micro_batch = span.action.kind, span.action.micro_batch
    x, width = scale(span.start), scale(span.end) - scale(span.start)
    thin = kind in TRANSFERS
    y, height = (top + LANE - LINE, LINE) if thin else (top, BOX)
    lasts = f"{_in(span.seconds, unit):.2f} {unit}".rstrip()
    tip = f"{span.action}: {NAMES[kind]}, {lasts} from {_in(span.start, unit):.2f}"
    yield (
        f'<rect class="{"line" if thin else "box"}" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height}" '
        f'fill="{color}"><title>{escape(tip)}</title></rect>'
    )
    if kind in numbered and width >= DIGIT * len(str(micro_batch)):
        ink = "label ink" if is_bright(color) else "label"
        yield f'<text class="{ink}" x="{x + width / 2:.2f}" y="{y + 17:g}">{micro_batch}</text>'


def _legend_places(timelines: Collection[Timeline]) -> list[tuple[Kind | None, float, int]]:
    """Returns the kinds that occur, and None for idle time, each with its x and its line of the legend."""
    kinds = {span.action.kind for timeline in timelines for span in timeline.spans}
    room = WIDTH - RIGHT - LETTER * len(_note(timelines))
    x, line = float(LEFT), 0
    places: list[tuple[Kind | None, float, int]] = []
    for kind in [*(kind for kind in Kind if kind in kinds), None]:
        width = 17 + LETTER * len(_word(kind)) + 22
        if x + width > room:
            x, line = float(LEFT), line + 1
        places.append((kind, x, line))
        x += width
    return places


def _note(timelines: Iterable[Timeline]) -> str:
    """What numbers and shades mean, right of the legend."""
    several = any(nth for timeline in timelines for nth in nth_stages(timeline).values())
    return "numbers: micro-batch" + ("; lighter: later stage" if several else "")


def _word(kind: Kind | None) -> str:
    return "idle" if kind is None else NAMES[kind]


def _legend(places: Iterable[tuple[Kind | None, float, int]], note: str, top: float) -> Iterator[str]:
    """A patch and a word for each kind, and the note."""
    for kind, x, line in places:
        y = top + line * LEGEND
        paint = 'class="idle"' if kind is None else f'fill="{COLORS[kind]}"'
        yield f'<rect {paint} x="{x:g}" y="{y:g}" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 17:g}" y="{y + 10:g}">{_word(kind)}</text>'
    yield f'<text class="right soft" x="{WIDTH - RIGHT}" y="{top + 10:g}">{note}</text>'


def _utilization(timeline: Timeline, unit: Unit) -> str:
    lasts = f"{timeline.seconds * 1000:.0f} ms" if unit == "ms" else f"{timeline.seconds:g}"
    return f"{lasts}, utilization {1 - timeline.idle_share():.0%}"


SHARPNESS = 3
"""Points of a PNG for each unit of the SVG: 2880 across, 300 per inch at the width of a page of paper."""
PICTURES = (".svg", ".png")
NO_RENDERER = "a .png is drawn by resvg-py: pip install 'gpipe[plots]', or give a path that ends in .svg"


def typical_svg(report: Report) -> str:
    """Draws the step of median length, and below it what was predicted; the report must have a step.

    >>> from gpipe.schedule.timeline import Timeline
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
