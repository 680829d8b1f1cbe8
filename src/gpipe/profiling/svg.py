"""Draws timelines as SVG pictures with a lane for each rank, readable on light and dark pages.

A lane is as long as the step, and gray while the rank is idle. Each action is a box, and each transfer is a thin line
below the boxes. If a rank has several stages, the boxes of later stages are lighter. Pictures are saved as SVG or
PNG.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from math import ceil, floor, log10
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Literal, TypeAlias
from xml.sax.saxutils import escape, quoteattr

from gpipe.planner.search.units import format_seconds
from gpipe.profiling.stored import Report
from gpipe.schedule.action import MOVES, NAMES, SHARDS, STREAMS, TRANSFERS, Kind
from gpipe.schedule.timeline import Timeline

COLORS = {
    Kind.FORWARD: "#4477aa",
    Kind.RECOMPUTE: "#ccbb44",
    Kind.BACKWARD: "#228833",
    Kind.BACKWARD_INPUT: "#7cae2e",
    Kind.BACKWARD_WEIGHT: "#66ccee",
    Kind.SEND: "#ee6677",
    Kind.RECEIVE: "#aa3377",
    Kind.OFFLOAD: "#997700",
    Kind.FETCH: "#004488",
    Kind.UNSHARD: "#882255",
    Kind.RESHARD: "#bbbbbb",
    Kind.LOAD: "#8c6bb1",
    Kind.FREE: "#ddcc77",
    Kind.REDUCE: "#ee7733",
    Kind.TIE: "#cc3311",
    Kind.COMMIT: "#009988",
}
THIN = TRANSFERS | MOVES | SHARDS | STREAMS  # kinds drawn as lines below the boxes
LIGHTEST = 0.55  # the share of white in the color of the last of several stages of a rank
BRIGHT = 0.3  # Dark text is easier to read from this luminance on.
WIDTH = 960
LEFT, RIGHT = 96, 24  # the margins for the names of ranks, and for half a tick label
PAD, TITLE, LANE, GAP, BETWEEN, AXIS, LEGEND = 10, 30, 30, 6, 16, 26, 26
BOX, LINE = 25, 4  # the heights of a box and of a transfer
DIGIT, LETTER = 7, 6.5  # approximate widths
MAX_LANES, MAX_SPANS = 32, 4000  # in a small picture
SHARPNESS = 3  # pixels of a PNG per unit of the SVG: 2880 across, or 300 per inch on the width of a paper page
NO_RENDERER = (
    "PNG files require resvg-py. Run pip install '.[plots]' in a clone of the gpipe repository, or pass a path that "
    "ends in .svg."
)

Unit: TypeAlias = Literal["ms", ""]
"""The unit of printed times: `"ms"`, or `""` for units without a name, one for each second of the timeline."""


def nth_stages(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Returns the index of each stage among the stages of its rank, by rank and stage."""
    stages = sorted({(span.rank, span.action.stage) for span in timeline.spans})
    return {each: nth for _, own in groupby(stages, key=itemgetter(0)) for nth, each in enumerate(own)}


def most_stages(timelines: Iterable[Timeline]) -> int:
    """Returns the largest number of stages that any rank has."""
    return 1 + max((nth for timeline in timelines for nth in nth_stages(timeline).values()), default=0)


def kinds_in(timelines: Iterable[Timeline]) -> list[Kind]:
    """Returns the kinds of actions that occur in timelines, in the order of `NAMES`."""
    kinds = {span.action.kind for timeline in timelines for span in timeline.spans}
    return [kind for kind in NAMES if kind in kinds]


def shade(kind: Kind, nth: int, stages: int) -> str:
    """Returns the color of an action kind at the n-th of `stages` stages of a rank."""
    white = LIGHTEST * nth / max(1, stages - 1)
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in bytes.fromhex(COLORS[kind][1:]))


def is_bright(color: str) -> bool:
    """Returns whether a background color is so bright that text on it should be dark."""
    red, green, blue = ((part / 255) ** 2.2 for part in bytes.fromhex(color[1:]))
    luminance: float = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return luminance > BRIGHT


@dataclass(frozen=True, slots=True)
class Scale:
    """Converts seconds to x coordinates. All timelines in a picture use the same scale."""

    seconds: float
    width: float = WIDTH
    unit: Unit = "ms"

    def __call__(self, seconds: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * seconds / self.seconds

    def ticks(self) -> list[float]:
        """Returns at most eleven round times, from 0 to the end of the scale, for the time axis.

        >>> Scale(0.23).ticks()
        [0.0, 0.05, 0.1, 0.15, 0.2]
        """
        decade = 10.0 ** floor(log10(self.seconds / 10))
        step = next(n * decade for n in (1, 2, 5, 10) if n * decade * 10 >= self.seconds)
        return [round(n * step, 12) for n in range(floor(self.seconds / step) + 1)]

    def shown(self, seconds: float) -> float:
        return seconds * 1000 if self.unit == "ms" else seconds


def timeline_svg(timeline: Timeline, title: str = "") -> str:
    """Draws one step as an SVG document, with a lane per rank, a box per action, and times in milliseconds.

    >>> from gpipe.schedule.action import parse_action
    >>> from gpipe.schedule.timeline import Span
    >>> timeline_svg(Timeline(1, (Span(0, parse_action("0F0"), 0.0, 0.1),), 0.2))[:4]
    '<svg'
    """
    return timelines_svg({title: timeline})


def timelines_svg(
    timelines: Mapping[str, Timeline], unit: Unit = "ms", width: int = WIDTH, *, small: bool = False
) -> str:
    """Draws steps one above the other on a common time axis, and prints the utilization of each step.

    Args:
        timelines: The steps, by title.
        unit: `"ms"`, or `""` for units without a name, if the costs of layers are not seconds. Default: `"ms"`.
        width: The width of the picture.
        small: Whether to keep the picture below 150 kB. A small picture has no tooltips. If a step has many ranks or
            actions, a small picture shows only the first ranks and actions, with a note in the title. Default: False.

    Returns:
        The SVG document as text, including its style sheet.

    Raises:
        ValueError: If `timelines` is empty, or if a timeline is 0 seconds long.

    >>> from gpipe.schedule.action import parse_action
    >>> from gpipe.schedule.timeline import Span
    >>> step = Timeline(1, (Span(0, parse_action("0F0"), 0.0, 0.1),), 0.2)
    >>> "200 ms, utilization 50%" in timelines_svg({"before": step, "after": step})
    True
    """
    if not timelines or min(timeline.seconds for timeline in timelines.values()) <= 0:
        raise ValueError(
            "timelines is empty, or has a timeline of 0 seconds. Pass timelines that are longer than 0 seconds."
        )
    limit = MAX_SPANS // len(timelines)
    parts = [_first(timeline, limit) if small else timeline for timeline in timelines.values()]
    scale = Scale(max(part.seconds for part in parts), width, unit)
    notes = {}
    panels, y = list[str](), float(PAD)
    for (title, timeline), part in zip(timelines.items(), parts, strict=True):
        notes[title] = f"{format_seconds(timeline.seconds, unit)}, utilization {1 - timeline.idle_share():.0%}"
        head = escape(_head(title, timeline, part, scale))
        panels.append(f'<text class="title" x="{PAD}" y="{y + 14:g}">{head}</text>')
        panels.append(f'<text class="right" x="{width - RIGHT:g}" y="{y + 14:g}">{notes[title]}</text>')
        panels += _panel(timeline, part, scale, y + TITLE, small=small)
        y += TITLE + part.ranks * (LANE + GAP) + BETWEEN
    y -= BETWEEN
    legend, bottom = _legend(timelines.values(), width, y + AXIS)
    label = "; ".join(f"{title}: {text}" for title, text in notes.items())
    ticks = list[str]()
    for tick in scale.ticks():
        text = f"{scale.shown(tick):,.7g}{'' if tick else ' ms' if unit else ' units'}"
        ticks.append(f'<text class="tick soft" x="{scale(tick):.2f}" y="{y + 12:g}">{text}</text>')
    return document((*panels, *ticks, *legend), label, width, ceil(bottom))


def document(elements: Iterable[str], label: str, width: int, height: int) -> str:
    """Returns an SVG document with a background and the common style."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(label)}>'
    style = f"<style>\n{read_file('svg.css')}</style>"
    page = f'<rect class="page" width="{width}" height="{height}" rx="6"/>'
    return "\n".join((head, style, page, *elements, "</svg>\n"))


def read_file(name: str) -> str:
    """Returns the text of a file in the folder of this module."""
    return files("gpipe.profiling").joinpath(name).read_text(encoding="utf-8")


def _first(timeline: Timeline, limit: int) -> Timeline:
    """Returns the beginning of a timeline, with the first ranks and at most `limit` actions."""
    ranks = min(timeline.ranks, MAX_LANES)
    own = sorted((span for span in timeline.spans if span.rank < ranks), key=attrgetter("start"))
    until = own[limit].start if len(own) > limit else timeline.seconds
    spans = (span._replace(end=min(span.end, until)) for span in own if span.start < until)
    return Timeline(ranks, tuple(spans), until)


def _head(title: str, timeline: Timeline, part: Timeline, scale: Scale) -> str:
    """Returns the title of a timeline. If only some ranks or a part of the time are drawn, the title says so."""
    if part.ranks < timeline.ranks:
        title += f", ranks 0 to {part.ranks - 1} of {timeline.ranks}"
    if part.seconds < timeline.seconds:
        title += f", the first {format_seconds(part.seconds, scale.unit)}"
    return title


def _panel(timeline: Timeline, part: Timeline, scale: Scale, y: float, *, small: bool) -> Iterator[str]:
    """Yields vertical lines at round times, and a lane of boxes for each rank.

    If `small`, all boxes of one color form one path.
    """
    tops = [y + rank * (LANE + GAP) for rank in range(part.ranks)]
    for tick in scale.ticks():
        yield f'<path class="grid" d="M{scale(tick):.2f} {y - GAP:g}V{tops[-1] + LANE + GAP:g}"/>'
    for rank, top in enumerate(tops):
        idle = 1 - timeline.busy(rank) / timeline.seconds
        yield f'<text x="{PAD}" y="{top + 12:g}">rank {rank}</text>'
        yield f'<text class="soft" x="{PAD}" y="{top + 26:g}">{idle:.0%} idle</text>'
        width = scale(part.seconds) - LEFT
        yield f'<rect class="idle" x="{LEFT}" y="{top:g}" width="{width:.2f}" height="{LANE}"/>'
    nth, stages = nth_stages(timeline), most_stages([timeline])
    paths, numbers = defaultdict[tuple[str, int], str](str), list[str]()
    for span in part.spans:
        kind, micro_batch = span.action.kind, span.action.micro_batch
        color = shade(kind, nth[span.rank, span.action.stage], stages)
        x, width, top = scale(span.start), scale(span.end) - scale(span.start), tops[span.rank]
        shape, top, height = ("line", top + LANE - LINE, LINE) if kind in THIN else ("box", top, BOX)
        if small:
            paths[color, height] += f"M{x:.1f} {top + height / 2:g}h{max(width - 0.6, 0.3):.1f}"
        else:
            lasts = f"{scale.shown(span.seconds):.2f} {scale.unit}".rstrip()
            tip = escape(f"{span.action}: {NAMES[kind]}, {lasts} from {scale.shown(span.start):.2f}")
            place = f'x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{height}"'
            yield f'<rect class="{shape}" {place} fill="{color}"><title>{tip}</title></rect>'
        if micro_batch is not None and shape == "box" and width >= DIGIT * len(str(micro_batch)) + 2:
            ink = "label ink" if is_bright(color) else "label"
            numbers.append(f'<text class="{ink}" x="{x + width / 2:.1f}" y="{top + 17:g}">{micro_batch}</text>')
    for (color, height), path in paths.items():
        yield f'<path stroke="{color}" stroke-width="{height}" d="{path}"/>'
    yield from numbers


def note_of(timelines: Iterable[Timeline]) -> str:
    """Returns a text that explains the numbers and shades in a picture."""
    return "numbers: micro-batch" + ("; lighter: later stage" if most_stages(timelines) > 1 else "")


def _legend(timelines: Collection[Timeline], width: float, top: float) -> tuple[list[str], float]:
    """Returns the elements of a legend, and the y coordinate at which it ends."""
    entries = [(NAMES[kind], f'fill="{COLORS[kind]}"') for kind in kinds_in(timelines)]
    lines, x, y = list[str](), float(PAD), top
    for word, paint in (*entries, ("idle", 'class="idle"')):
        taken = 17 + LETTER * len(word) + 22
        if x > PAD and x + taken > width - RIGHT:
            x, y = PAD, y + LEGEND
        lines.append(f'<rect {paint} x="{x:g}" y="{y:g}" width="12" height="12" rx="2"/>')
        lines.append(f'<text x="{x + 17:g}" y="{y + 10:g}">{word}</text>')
        x += taken
    note = note_of(timelines)
    if x + LETTER * len(note) > width - RIGHT:
        y += LEGEND
    lines.append(f'<text class="right soft" x="{width - RIGHT:g}" y="{y + 10:g}">{note}</text>')
    return lines, y + LEGEND


def typical_svg(report: Report) -> str:
    """Draws the step of median length, and the predicted step below. The report must have at least one step.

    >>> typical_svg(Report("", timelines=(Timeline(1, (), 0.2),)))[:4]
    '<svg'
    """
    typical = report.timelines[report.typical]
    if report.predicted is None:
        return timeline_svg(typical)
    return timelines_svg({"measured": typical, "predicted": report.predicted})


def write_picture(path: Path, svg: str) -> None:
    """Writes a picture to a file. The suffix `.svg` keeps the SVG, and `.png` renders it on a white background.

    Args:
        path: The path of the file, which is replaced if it exists.
        svg: The SVG document, for example the result of `timeline_svg`.

    Raises:
        ImportError: If the file is a PNG, and resvg-py is not installed.
        ValueError: If the suffix is neither `.svg` nor `.png`.

    >>> write_picture(Path("step.jpg"), "<svg/>")
    Traceback (most recent call last):
    ValueError: step.jpg has the suffix '.jpg'. Use .svg or .png.
    """
    match path.suffix:
        case ".svg":
            path.write_text(svg, encoding="utf-8")
        case ".png":
            try:
                from resvg_py import svg_to_bytes
            except ImportError as error:
                raise ImportError(NO_RENDERER) from error
            path.write_bytes(bytes(svg_to_bytes(svg_string=svg, background="white", zoom=SHARPNESS)))
        case other:
            raise ValueError(f"{path} has the suffix {other!r}. Use .svg or .png.")
