"""Timelines as pictures: an SVG with a lane for each rank, written by hand, readable on light and dark pages.

A lane is as long as its step, and gray where its rank computes nothing; transfers and moves are thin lines under the
boxes. Where a rank holds several stages, later ones are lighter. A file takes the SVG, or points made of it.
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
from gpipe.schedule.action import MOVES, NAMES, SHARDS, TRANSFERS, Kind
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
    Kind.REDUCE: "#ee7733",
    Kind.TIE: "#cc3311",
    Kind.COMMIT: "#009988",
}
THIN = TRANSFERS | MOVES | SHARDS  # kinds that are lines under the boxes
LIGHTEST = 0.55  # the share of white in the colours of a rank's last stage, if it has several
BRIGHT = 0.3  # the luminance from which on dark type is easier to read
WIDTH = 960
LEFT, RIGHT = 96, 24  # beside the lanes: who the lane belongs to, half a tick label
PAD, TITLE, LANE, GAP, BETWEEN, AXIS, LEGEND = 10, 30, 30, 6, 16, 26, 26
BOX, LINE = 25, 4  # heights within a lane: a box, a transfer
DIGIT, LETTER = 7, 6.5  # rough widths of type
MOST_LANES, MOST_SPANS = 32, 4000  # of a small picture
SHARPNESS = 3  # points of a PNG for each unit of the SVG: 2880 across, 300 per inch at the width of a page of paper
NO_RENDERER = "a .png is drawn by resvg-py: pip install 'gpipe[plots]', or give a path that ends in .svg"

Unit: TypeAlias = Literal["ms", ""]
"""What times are written in: milliseconds, or units that have no name, of which one is a second of the timeline."""


def nth_stages(timeline: Timeline) -> dict[tuple[int, int], int]:
    """By rank and stage, which of the stages of its rank it is, from 0."""
    held = sorted({(span.rank, span.action.stage) for span in timeline.spans})
    return {each: nth for _, own in groupby(held, key=itemgetter(0)) for nth, each in enumerate(own)}


def most_stages(timelines: Iterable[Timeline]) -> int:
    """How many stages the rank with the most has."""
    return 1 + max((nth for timeline in timelines for nth in nth_stages(timeline).values()), default=0)


def kinds_in(timelines: Iterable[Timeline]) -> list[Kind]:
    """The kinds of action that occur, in the order in which they are listed."""
    found = {span.action.kind for timeline in timelines for span in timeline.spans}
    return [kind for kind in NAMES if kind in found]


def shade(kind: Kind, nth: int, stages: int) -> str:
    """The colour of a kind at the n-th of so many stages of a rank."""
    white = LIGHTEST * nth / max(1, stages - 1)
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in bytes.fromhex(COLORS[kind][1:]))


def is_bright(color: str) -> bool:
    """Whether type on this colour is to be dark."""
    red, green, blue = ((part / 255) ** 2.2 for part in bytes.fromhex(color[1:]))
    luminance: float = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return luminance > BRIGHT


@dataclass(frozen=True, slots=True)
class Scale:
    """From seconds to the x of the picture, the same for all timelines in it."""

    seconds: float
    width: float = WIDTH
    unit: Unit = "ms"

    def __call__(self, seconds: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * seconds / self.seconds

    def ticks(self) -> list[float]:
        """Returns round times from 0 to the end, eleven at most.

        >>> Scale(0.23).ticks()
        [0.0, 0.05, 0.1, 0.15, 0.2]
        """
        decade = 10.0 ** floor(log10(self.seconds / 10))
        step = next(n * decade for n in (1, 2, 5, 10) if n * decade * 10 >= self.seconds)
        return [round(n * step, 12) for n in range(floor(self.seconds / step) + 1)]

    def shown(self, seconds: float) -> float:
        return seconds * 1000 if self.unit == "ms" else seconds


def timeline_svg(timeline: Timeline, title: str = "") -> str:
    """Draws one step as an SVG document: a lane for each rank, a box for each action, time in milliseconds.

    >>> from gpipe.schedule.action import parse_action
    >>> from gpipe.schedule.timeline import Span
    >>> timeline_svg(Timeline(1, (Span(0, parse_action("0F0"), 0.0, 0.1),), 0.2))[:4]
    '<svg'
    """
    return timelines_svg({title: timeline})


def timelines_svg(
    timelines: Mapping[str, Timeline], unit: Unit = "ms", width: int = WIDTH, *, small: bool = False
) -> str:
    """Draws several steps, by title, one above the other on a common time axis, each with its utilization.

    Of a table whose costs are in proportions alone, `unit=""` writes times as they are. A `small` picture, below
    150 kB whatever it is of, has no tips, and of many ranks and actions the first, as its title says then.

    >>> from gpipe.schedule.action import parse_action
    >>> from gpipe.schedule.timeline import Span
    >>> step = Timeline(1, (Span(0, parse_action("0F0"), 0.0, 0.1),), 0.2)
    >>> "200 ms, utilization 50%" in timelines_svg({"before": step, "after": step})
    True

    Raises:
        ValueError: There is nothing to draw, or a timeline is 0 seconds long.
    """
    if not timelines or min(timeline.seconds for timeline in timelines.values()) <= 0:
        raise ValueError("a picture needs at least one timeline, each longer than 0 seconds")
    most = MOST_SPANS // len(timelines)
    parts = [_first(timeline, most) if small else timeline for timeline in timelines.values()]
    scale = Scale(max(part.seconds for part in parts), width, unit)
    said = {}
    panels, y = list[str](), float(PAD)
    for (title, timeline), part in zip(timelines.items(), parts, strict=True):
        said[title] = f"{format_seconds(timeline.seconds, unit)}, utilization {1 - timeline.idle_share():.0%}"
        head = escape(_head(title, timeline, part, scale))
        panels.append(f'<text class="title" x="{PAD}" y="{y + 14:g}">{head}</text>')
        panels.append(f'<text class="right" x="{width - RIGHT:g}" y="{y + 14:g}">{said[title]}</text>')
        panels += _panel(timeline, part, scale, y + TITLE, small=small)
        y += TITLE + part.ranks * (LANE + GAP) + BETWEEN
    y -= BETWEEN
    legend, bottom = _legend(timelines.values(), width, y + AXIS)
    label = "; ".join(f"{title}: {text}" for title, text in said.items())
    ticks = list[str]()
    for tick in scale.ticks():
        text = f"{scale.shown(tick):,.7g}{'' if tick else ' ms' if unit else ' units'}"
        ticks.append(f'<text class="tick soft" x="{scale(tick):.2f}" y="{y + 12:g}">{text}</text>')
    return document((*panels, *ticks, *legend), label, width, ceil(bottom))


def document(elements: Iterable[str], label: str, width: int, height: int) -> str:
    """An SVG on a page of its own colour, with the style of all pictures."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(label)}>'
    style = f"<style>\n{read_own('svg.css')}</style>"
    page = f'<rect class="page" width="{width}" height="{height}" rx="6"/>'
    return "\n".join((head, style, page, *elements, "</svg>\n"))


def read_own(name: str) -> str:
    """A file beside this one."""
    return files("gpipe.profiling").joinpath(name).read_text(encoding="utf-8")


def _first(timeline: Timeline, most: int) -> Timeline:
    """The first ranks of a timeline, for as long as they do so many actions at most."""
    ranks = min(timeline.ranks, MOST_LANES)
    own = sorted((span for span in timeline.spans if span.rank < ranks), key=attrgetter("start"))
    until = own[most].start if len(own) > most else timeline.seconds
    spans = (span._replace(end=min(span.end, until)) for span in own if span.start < until)
    return Timeline(ranks, tuple(spans), until)


def _head(title: str, timeline: Timeline, part: Timeline, scale: Scale) -> str:
    """The title of a part of a timeline, which says that it is one."""
    if part.ranks < timeline.ranks:
        title += f"; ranks 0 to {part.ranks - 1} of {timeline.ranks}"
    if part.seconds < timeline.seconds:
        title += f"; the first {format_seconds(part.seconds, scale.unit)}"
    return title


def _panel(timeline: Timeline, part: Timeline, scale: Scale, y: float, *, small: bool) -> Iterator[str]:
    """Round times as lines, and a lane of boxes for each rank of a part; if small, boxes of a colour are one path."""
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
    """What numbers and shades in a picture mean."""
    return "numbers: micro-batch" + ("; lighter: later stage" if most_stages(timelines) > 1 else "")


def _legend(timelines: Collection[Timeline], width: float, top: float) -> tuple[list[str], float]:
    """A patch and a word for each kind that occurs, what numbers and shades mean, and where the legend ends."""
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
    """Draws the step of median length, and below it what was predicted; the report must have a step.

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
            try:
                from resvg_py import svg_to_bytes
            except ImportError as error:
                raise ImportError(NO_RENDERER) from error
            path.write_bytes(bytes(svg_to_bytes(svg_string=svg, background="white", zoom=SHARPNESS)))
        case other:
            raise ValueError(f"{path} has the suffix {other!r}; a picture has .svg or .png")
