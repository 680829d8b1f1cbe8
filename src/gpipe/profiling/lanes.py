"""Draws timelines as text, with one line per rank. The width of an action is proportional to its duration.

With colors, the background shows the kind of an action. The background is lighter at later stages of a rank. Without
colors, a letter shows the kind: for example `F` at the first stage of a rank, `f` at the second, and `F'` at the
third.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import floor, inf

from rich.text import Text

from gpipe.profiling.svg import Unit, is_bright, kinds_in, most_stages, nth_stages, shade
from gpipe.schedule.action import COMPUTE, NAMES, Kind
from gpipe.schedule.cost import Costs
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import Figures, figures
from gpipe.schedule.timeline import Span, Timeline

BETWEEN = 2  # columns between the name of a rank and its lane
TICK = 8  # the minimum number of columns between two times on the axis
EPSILON = 1e-9
MAX_PEAKS = 16  # ranks whose peaks are listed one by one
IDLE = "dim"  # the style of idle time
ORDINALS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True, slots=True)
class Ruler:
    """Converts times to columns of text."""

    unit: int  # the number of columns of the shortest action
    seconds: float  # the duration of the shortest action

    def column(self, seconds: float) -> int:
        """Returns the column at which a time is drawn."""
        return floor(seconds / self.seconds * self.unit + 0.5 + EPSILON)

    def columns(self, timelines: Collection[Timeline]) -> int:
        """Returns the number of columns that timelines need, including the names of ranks."""
        return max(margin(timeline.ranks) + self.column(timeline.seconds) for timeline in timelines)

    def axis(self, seconds: float) -> str:
        """Returns a line with round times below their columns."""
        steps = (n * 10.0**decade for decade in range(-9, 12) for n in (1, 2, 5))
        step = next(step for step in steps if self.column(step) >= TICK)
        line = ""
        for number in range(floor(seconds / step + EPSILON) + 1):
            line = line.ljust(self.column(number * step)) + f"{number * step:g}"
        return line


def lanes_text(program: Program, costs: Costs | None = None) -> str:
    """Draws a program of forward and backward passes as text.

    By default, F, I and W actions take one unit of time each, and B actions take two units.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> print(lanes_text(program_of("1f1b", ranks=2, micro_batches=3)))
    rank 0  F0 F1 .. .. B0--- F2 B1--- .. B2---
    rank 1  .. F0 B0--- F1 B1--- F2 B2--- .. ..
    """
    timeline = figures(program, costs).timeline
    return "\n".join(lane.plain.rstrip() for lane in lanes(timeline, find_ruler([timeline])))


def margin(ranks: int) -> int:
    """Returns the number of columns to the left of the lanes."""
    return len(f"rank {ranks - 1}") + BETWEEN


def find_ruler(timelines: Collection[Timeline], width: float = inf, *, colored: bool = False) -> Ruler:
    """Returns the widest ruler with which timelines fit into a number of columns.

    The widest ruler has room for the longest label of any action and a gap. The narrowest ruler has room for the
    short form of every label. If no ruler fits, this function returns the narrowest ruler.
    """
    drawn = [span for timeline in timelines for span in _drawn(timeline)]
    labels = [_labels(span, nth, colored) for span, nth in drawn]
    widest, narrowest = max(len(each[0]) for each in labels) + 1, max(len(each[-1]) for each in labels)
    shortest = min(span.seconds for span, _ in drawn)
    rulers = (Ruler(unit, shortest) for unit in range(widest, narrowest, -1))
    return next((ruler for ruler in rulers if ruler.columns(timelines) <= width), Ruler(narrowest, shortest))


def fit_ruler(timelines: Collection[Timeline], width: int) -> Ruler:
    """Returns the ruler that makes the longest timeline exactly `width` columns wide, even if labels do not fit."""
    room = max(1, width - max(margin(timeline.ranks) for timeline in timelines))
    return Ruler(1, max(timeline.seconds for timeline in timelines) / room)


def lanes(timeline: Timeline, ruler: Ruler, *, colored: bool = False) -> list[Text]:
    """Returns one line per rank, with the name of the rank and its actions in the style of their kind.

    All actions of a kind have the same form of label: the longest form that fits all of these actions. With a ruler
    from `fit_ruler`, labels that do not fit are omitted, and actions shorter than half a column may be invisible.
    """
    drawn, stages, before = list(_drawn(timeline)), most_stages([timeline]), margin(timeline.ranks)
    sorts: dict[Kind, int] = {}
    for span, nth in drawn:
        labels, room = _labels(span, nth, colored), ruler.column(span.end) - ruler.column(span.start)
        sort = next((sort for sort, label in enumerate(labels) if len(label) <= room), 0)
        sorts[span.action.kind] = max(sorts.get(span.action.kind, 0), sort)
    rows = [Text(f"rank {rank}".ljust(before)) for rank in range(timeline.ranks)]

    def fill_idle(rank: int, until: int) -> None:
        """Appends dots up to a column, with the same gaps as between the shortest actions."""
        dots = range(len(rows[rank]) - before, until)
        gap = ruler.unit - 1 if ruler.unit > 1 else None
        rows[rank].append("".join(" " if column % ruler.unit == gap else "." for column in dots), IDLE)

    for span, nth in drawn:
        kind, lane = span.action.kind, rows[span.rank]
        fill_idle(span.rank, ruler.column(span.start))
        room = ruler.column(span.end) - (len(lane) - before)
        label = _labels(span, nth, colored)[sorts[kind]]
        label = label if len(label) <= room else ""
        if len(label) < room:  # the last column is a gap
            label = label.ljust(room - 1, "-" if room > ruler.unit and not colored else " ") + " "
        lane.append(label, style(kind, nth, stages))
    for rank in range(timeline.ranks):
        fill_idle(rank, ruler.column(timeline.seconds))
    return rows


def _drawn(timeline: Timeline) -> Iterator[tuple[Span, int]]:
    """Yields the computing actions in order of time, each with the index of its stage within the rank."""
    nth = nth_stages(timeline)
    for span in sorted(timeline.spans, key=lambda span: span.start):
        if span.action.kind in COMPUTE and span.seconds > 0:
            yield span, nth[span.rank, span.action.stage]


def _labels(span: Span, nth: int, colored: bool) -> tuple[str, ...]:
    """Returns the possible labels of an action, with the longest label first."""
    number = str(span.action.micro_batch)
    if colored:
        return number, number[-1]
    letter = letter_of(span.action.kind, nth)
    return letter[0] + number + letter[1:], letter


def letter_of(kind: Kind, nth: int) -> str:
    """Returns the letter of an action kind at the n-th stage of a rank, counted from 0."""
    return (kind.value.lower() if nth % 2 else kind.value) + "'" * (nth // 2)


def style(kind: Kind, nth: int, stages: int) -> str:
    """Returns the style of an action kind at the n-th of `stages` stages of a rank, for the library rich."""
    color = shade(kind, nth, stages)
    return f"{'#1f2328' if is_bright(color) else '#ffffff'} on {color}"


def panel(timeline: Timeline, ruler: Ruler, *, colored: bool, unit: Unit = "") -> Iterator[Text]:
    """Yields the lines of a timeline, followed by a time axis in milliseconds or units."""
    for lane in lanes(timeline, ruler, colored=colored):
        yield lane if colored else Text(lane.plain.rstrip())
    factor = 1000 if unit == "ms" else 1
    times = replace(ruler, seconds=ruler.seconds * factor).axis(timeline.seconds * factor)
    yield Text((unit or "time").ljust(margin(timeline.ranks)) + times, IDLE if colored else "")


def legend(timelines: Collection[Timeline], *, colored: bool) -> Iterator[Text]:
    """Yields lines that explain the colors or letters of a timeline."""
    kinds = [kind for kind in kinds_in(timelines) if kind in COMPUTE]
    letters = [(f" {kind.value} ", style(kind, 0, stages=1)) if colored else kind.value for kind in kinds]
    words = [Text.assemble(letter, f" {NAMES[kind]}") for letter, kind in zip(letters, kinds, strict=True)]
    yield Text("   ").join([*words, Text(". idle")])
    stages = most_stages(timelines)
    if stages > 1 and colored:
        yield Text("lighter: later stages of a rank")
    elif stages > 1:
        each = zip(range(1, stages), ORDINALS, strict=False)
        later = (f"{', '.join(letter_of(kind, n) for kind in kinds)}: {name} stage of a rank" for n, name in each)
        yield Text("; ".join(later))


def format_peak(peak: float) -> str:
    """Formats a number of micro-batches with four significant digits, or without decimals if it is large.

    >>> format_peak(2 / 3), format_peak(12.0), format_peak(10240.0)
    ('0.6667', '12', '10240')
    """
    return f"{peak:.4g}" if peak < 1e3 else f"{peak:.0f}"


def describe(result: Figures) -> Iterator[str]:
    """Yields lines with the bubble, the peak memory and the split of a schedule."""
    busiest = f"the busiest rank works {result.work:.7g} of {result.seconds:.7g} units"
    yield f"bubble over all ranks: {result.bubble:.1%} ({busiest})"
    peaks = list(map(format_peak, result.peaks))
    ends = map(format_peak, (min(result.peaks), max(result.peaks)))
    by_rank = ", ".join(peaks) if len(peaks) <= MAX_PEAKS else " to ".join(ends)
    peak = f"{peaks[0]} on each rank" if len(set(peaks)) == 1 else f"{by_rank} (by rank)"
    kept = ", plus inputs kept for recomputation" if Kind.RECOMPUTE in kinds_in([result.timeline]) else ""
    yield f"peak activations in micro-batches: {peak}{kept}"
    share = "" if result.split == 1 else f" ({result.split:.0%} of them)"
    yield f"backward passes: split into I and W{share}" if result.split else "backward passes: whole"
