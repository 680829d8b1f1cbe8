"""Timelines in columns of text: a lane for each rank, as wide as its actions take, under the same ruler for all.

Where there are no colours, a letter tells the kind: that of the table at a rank's first stage, small at its second,
and with a mark from its third on. Where there are, the background does, lighter at later stages.
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
TICK = 8  # columns that a time on the axis has at least
EPSILON = 1e-9
MOST_PEAKS = 16  # ranks of which each is told what it holds
IDLE = "dim"  # the style of idle time
ORDINALS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True, slots=True)
class Ruler:
    """From time to columns."""

    unit: int  # the columns of the shortest action
    seconds: float  # how long that takes

    def column(self, seconds: float) -> int:
        """Where something begins that begins at this time."""
        return floor(seconds / self.seconds * self.unit + 0.5 + EPSILON)

    def columns(self, timelines: Collection[Timeline]) -> int:
        """The columns that timelines fill, with the names of their ranks."""
        return max(margin(timeline.ranks) + self.column(timeline.seconds) for timeline in timelines)

    def axis(self, seconds: float) -> str:
        """Round times under the columns where they are, up to the end."""
        steps = (n * 10.0**decade for decade in range(-9, 12) for n in (1, 2, 5))
        step = next(step for step in steps if self.column(step) >= TICK)
        line = ""
        for number in range(floor(seconds / step + EPSILON) + 1):
            line = line.ljust(self.column(number * step)) + f"{number * step:g}"
        return line


def lanes_text(program: Program, costs: Costs | None = None) -> str:
    """Draws a program of forwards and backwards as text; by default F, I and W take one unit each, and B two.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> print(lanes_text(program_of("1f1b", ranks=2, micro_batches=3)))
    rank 0  F0 F1 .. .. B0--- F2 B1--- .. B2---
    rank 1  .. F0 B0--- F1 B1--- F2 B2--- .. ..
    """
    timeline = figures(program, costs).timeline
    return "\n".join(lane.plain.rstrip() for lane in lanes(timeline, find_ruler([timeline])))


def margin(ranks: int) -> int:
    """The columns to the left of the lanes."""
    return len(f"rank {ranks - 1}") + BETWEEN


def find_ruler(timelines: Collection[Timeline], width: float = inf, *, colored: bool = False) -> Ruler:
    """The ruler by which timelines, one above the other, fill so many columns at most; the least if there is none.

    They reach from that by which the shortest action has its whole label and a gap, to that by which the least of it.
    """
    drawn = [each for timeline in timelines for each in _drawn(timeline)]
    labels = [_labels(span, nth, colored) for span, nth in drawn]
    most, least = max(len(each[0]) for each in labels) + 1, max(len(each[-1]) for each in labels)
    shortest = min(span.seconds for span, _ in drawn)
    rulers = (Ruler(unit, shortest) for unit in range(most, least, -1))
    return next((ruler for ruler in rulers if ruler.columns(timelines) <= width), Ruler(least, shortest))


def fitted(timelines: Collection[Timeline], width: int) -> Ruler:
    """The ruler by which the longest of timelines fills so many columns, however little room actions then have."""
    room = max(1, width - max(margin(timeline.ranks) for timeline in timelines))
    return Ruler(1, max(timeline.seconds for timeline in timelines) / room)


def lanes(timeline: Timeline, ruler: Ruler, *, colored: bool = False) -> list[Text]:
    """The lanes of a timeline, one a rank, behind its name; each action has the style of its kind.

    All actions of a kind have labels of one sort: the longest for which there is room. By a ruler of `fitted`, those
    that have no room for any label have none, and those shorter than half a column may not show.
    """
    drawn, stages, before = list(_drawn(timeline)), most_stages([timeline]), margin(timeline.ranks)
    sorts: dict[Kind, int] = {}
    for span, nth in drawn:
        labels, room = _labels(span, nth, colored), ruler.column(span.end) - ruler.column(span.start)
        sort = next((sort for sort, label in enumerate(labels) if len(label) <= room), 0)
        sorts[span.action.kind] = max(sorts.get(span.action.kind, 0), sort)
    found = [Text(f"rank {rank}".ljust(before)) for rank in range(timeline.ranks)]

    def rest(rank: int, until: int) -> None:
        """Dots up to a column, with gaps where shortest actions, one after another, would have them."""
        dots = range(len(found[rank]) - before, until)
        gap = ruler.unit - 1 if ruler.unit > 1 else None
        found[rank].append("".join(" " if column % ruler.unit == gap else "." for column in dots), IDLE)

    for span, nth in drawn:
        kind, lane = span.action.kind, found[span.rank]
        rest(span.rank, ruler.column(span.start))
        room = ruler.column(span.end) - (len(lane) - before)
        label = _labels(span, nth, colored)[sorts[kind]]
        label = label if len(label) <= room else ""
        if len(label) < room:  # the last column is a gap
            label = label.ljust(room - 1, "-" if room > ruler.unit and not colored else " ") + " "
        lane.append(label, style(kind, nth, stages))
    for rank in range(timeline.ranks):
        rest(rank, ruler.column(timeline.seconds))
    return found


def _drawn(timeline: Timeline) -> Iterator[tuple[Span, int]]:
    """What is computed, in the order of time, and at which of its rank's stages."""
    nth = nth_stages(timeline)
    for span in sorted(timeline.spans, key=lambda span: span.start):
        if span.action.kind in COMPUTE and span.seconds > 0:
            yield span, nth[span.rank, span.action.stage]


def _labels(span: Span, nth: int, colored: bool) -> tuple[str, ...]:
    """What may be written on an action, the longest first."""
    number = str(span.action.micro_batch)
    if colored:
        return number, number[-1]
    letter = letter_of(span.action.kind, nth)
    return letter[0] + number + letter[1:], letter


def letter_of(kind: Kind, nth: int) -> str:
    """The letter of a kind at the n-th stage of a rank."""
    return (kind.value.lower() if nth % 2 else kind.value) + "'" * (nth // 2)


def style(kind: Kind, nth: int, stages: int) -> str:
    """How rich is to paint an action of a kind at the n-th of so many stages of a rank."""
    color = shade(kind, nth, stages)
    return f"{'#1f2328' if is_bright(color) else '#ffffff'} on {color}"


def panel(timeline: Timeline, ruler: Ruler, *, colored: bool, unit: Unit = "") -> Iterator[Text]:
    """The lanes of a timeline, and under them the time, in milliseconds or as it is."""
    for lane in lanes(timeline, ruler, colored=colored):
        yield lane if colored else Text(lane.plain.rstrip())
    factor = 1000 if unit == "ms" else 1
    times = replace(ruler, seconds=ruler.seconds * factor).axis(timeline.seconds * factor)
    yield Text((unit or "time").ljust(margin(timeline.ranks)) + times, IDLE if colored else "")


def legend(timelines: Collection[Timeline], *, colored: bool) -> Iterator[Text]:
    """What the colours of lanes mean, or the letters."""
    kinds = [kind for kind in kinds_in(timelines) if kind in COMPUTE]
    letters = [(f" {kind.value} ", style(kind, 0, stages=1)) if colored else kind.value for kind in kinds]
    words = [Text.assemble(letter, f" {NAMES[kind]}") for letter, kind in zip(letters, kinds, strict=True)]
    yield Text("   ").join([*words, Text(". idle")])
    stages = most_stages(timelines)
    if stages > 1 and colored:
        yield Text("lighter at a rank's later stages")
    elif stages > 1:
        each = zip(range(1, stages), ORDINALS, strict=False)
        later = (f"{', '.join(letter_of(kind, n) for kind in kinds)} at a rank's {name} stage" for n, name in each)
        yield Text("; ".join(later))


def peak_in_words(peak: float) -> str:
    """How many micro-batches a rank holds at most, to four digits or to whole ones.

    >>> peak_in_words(2 / 3), peak_in_words(12.0), peak_in_words(10240.0)
    ('0.6667', '12', '10240')
    """
    return f"{peak:.4g}" if peak < 1e3 else f"{peak:.0f}"


def words(found: Figures) -> Iterator[str]:
    """What a schedule costs, in a few lines."""
    yield f"bubble {found.bubble:.1%} over all ranks: the busiest works {found.work:.7g} of {found.seconds:.7g} units"
    peaks = list(map(peak_in_words, found.peaks))
    ends = map(peak_in_words, (min(found.peaks), max(found.peaks)))
    told = ", ".join(peaks) if len(peaks) <= MOST_PEAKS else " to ".join(ends)
    each = f"{peaks[0]} on each rank" if len(set(peaks)) == 1 else f"{told}, by rank"
    kept = "; inputs that are kept for recomputes come on top" if Kind.RECOMPUTE in kinds_in([found.timeline]) else ""
    yield f"activations held at most, in micro-batches: {each}{kept}"
    few = "" if found.split == 1 else f", {found.split:.0%} of them"
    yield f"backwards: split into I and W{few}" if found.split else "backwards: whole"
