"""Timelines as lanes of characters, for terminals and docstrings: a lane for each rank, time from left to right.

    rank 0  F0 .. .. B0---
    rank 1  .. F0 B0--- ..

Where there are no colours, a letter tells the kind: that of the table at a rank's first stage, small at its second,
and with a mark from its third on. Where there are, the background does, lighter at later stages.

Lanes on a terminal: their colours, where it has them, what colours and letters mean, and what is said of them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import floor
from typing import TypeAlias

from rich.text import Text

from gpipe.profiling.svg import Unit, is_bright, nth_stages, shade
from gpipe.schedule.action import COMPUTE, NAMES, Kind
from gpipe.schedule.cost import Costs
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import Figures, figures
from gpipe.schedule.timeline import Span, Timeline

BETWEEN = 2
"""Columns between the name of a rank and its lane."""
TICK = 8
"""Columns that a time on the axis has at least."""
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Piece:
    """Some columns of a lane: an action, or where there is no kind idle time.

    >>> Piece("F0 ", Kind.FORWARD).text
    'F0 '
    """

    text: str
    kind: Kind | None = None
    nth: int = 0  # which of its rank's stages it is, from 0


Lane: TypeAlias = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Ruler:
    """From time to columns.

    >>> Ruler(unit=3, seconds=1.0).column(2.0)
    6
    """

    unit: int
    """The columns of the shortest action."""
    seconds: float
    """How long that takes."""

    def column(self, seconds: float) -> int:
        """Where something begins that begins at this time."""
        return floor(seconds / self.seconds * self.unit + 0.5 + EPSILON)

    def axis(self, seconds: float) -> str:
        """Round times under the columns where they are, up to the end.

        >>> Ruler(unit=3, seconds=1.0).axis(12.0)
        '0              5              10'
        """
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
    ruler = widest([timeline])
    return "\n".join(text for text, _ in named(lanes(timeline, ruler)))


def named(drawn: Iterable[Lane]) -> Iterator[tuple[str, Lane]]:
    """Each lane as text, behind the name of its rank, and as pieces, of which the first is that name."""
    drawn = tuple(drawn)
    names = [f"rank {rank}" for rank in range(len(drawn))]
    for name, lane in zip(names, drawn, strict=True):
        pieces = (Piece(name.ljust(margin(len(drawn)))), *lane)
        yield "".join(piece.text for piece in pieces).rstrip(), pieces


def margin(ranks: int) -> int:
    """The columns to the left of the lanes."""
    return len(f"rank {ranks - 1}") + BETWEEN


def widest(timelines: Collection[Timeline], *, colored: bool = False) -> Ruler:
    """The ruler by which the shortest action has its whole label and a gap."""
    labels = [_labels(span, nth, colored)[0] for timeline in timelines for span, nth in _drawn(timeline)]
    shortest = min(span.seconds for timeline in timelines for span, _ in _drawn(timeline))
    return Ruler(max(map(len, labels)) + 1, shortest)


def find_ruler(timelines: Collection[Timeline], width: int, *, colored: bool = False) -> Ruler | None:
    """The ruler by which timelines, one above the other, fill no more than so many columns; None if there is none.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> timeline = figures(program_of("1f1b", ranks=2, micro_batches=3)).timeline
    >>> find_ruler([timeline], width=40).unit, find_ruler([timeline], width=19)
    (2, None)
    """
    ruler = widest(timelines, colored=colored)
    units = (Ruler(unit, ruler.seconds) for unit in range(ruler.unit, _narrowest(timelines, colored) - 1, -1))
    return next((ruler for ruler in units if columns(timelines, ruler) <= width), None)


def fitted(timelines: Collection[Timeline], width: int) -> Ruler:
    """The ruler by which the longest of timelines fills so many columns, however little room its actions then have.

    >>> fitted([Timeline(1, (), seconds=0.66)], width=41)
    Ruler(unit=1, seconds=0.02)
    """
    room = max(1, width - max(margin(timeline.ranks) for timeline in timelines))
    return Ruler(1, max(timeline.seconds for timeline in timelines) / room)


def needed(timelines: Collection[Timeline], *, colored: bool = False) -> int:
    """The columns that timelines fill at the least."""
    shortest = widest(timelines, colored=colored).seconds
    return columns(timelines, Ruler(_narrowest(timelines, colored), shortest))


def columns(timelines: Collection[Timeline], ruler: Ruler) -> int:
    """The columns that timelines fill, with the names of their ranks."""
    return max(margin(timeline.ranks) + ruler.column(timeline.seconds) for timeline in timelines)


def _narrowest(timelines: Collection[Timeline], colored: bool) -> int:
    return max(len(_labels(span, nth, colored)[-1]) for timeline in timelines for span, nth in _drawn(timeline))


def lanes(timeline: Timeline, ruler: Ruler, *, colored: bool = False) -> tuple[Lane, ...]:
    """The lanes of a timeline, one a rank.

    All actions of a kind have labels of one sort: the longest for which there is room. By a ruler of `fitted`, those
    that have no room for any label have none, and those shorter than half a column may not show.
    """
    drawn = list(_drawn(timeline))
    sorts = _sorts(drawn, ruler, colored)
    found: list[list[Piece]] = [[] for _ in range(timeline.ranks)]
    ends = [0] * timeline.ranks
    for span, nth in drawn:
        start = max(ruler.column(span.start), ends[span.rank])
        end = max(ruler.column(span.end), start)
        kind, lane = span.action.kind, found[span.rank]
        lane.append(Piece(_idle(ends[span.rank], start, ruler.unit)))
        filling = "-" if end - start > ruler.unit and not colored else " "
        label = _labels(span, nth, colored)[sorts.get(kind, 0)]
        text = _filled(label if len(label) <= end - start else "", end - start, filling)
        lane.append(Piece(text, kind, nth))
        ends[span.rank] = end
    for end, lane in zip(ends, found, strict=True):
        lane.append(Piece(_idle(end, ruler.column(timeline.seconds), ruler.unit)))
    return tuple(tuple(piece for piece in lane if piece.text) for lane in found)


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
    """The letter of a kind at the n-th stage of a rank.

    >>> [letter_of(Kind.FORWARD, nth) for nth in range(4)]
    ['F', 'f', "F'", "f'"]
    """
    return (kind.value.lower() if nth % 2 else kind.value) + "'" * (nth // 2)


def _sorts(drawn: Iterable[tuple[Span, int]], ruler: Ruler, colored: bool) -> Mapping[Kind, int]:
    """By kind, which of its labels there is room for at each of its actions that has room for one."""
    found: dict[Kind, int] = {}
    for span, nth in drawn:
        labels, room = _labels(span, nth, colored), ruler.column(span.end) - ruler.column(span.start)
        sort = next((sort for sort, label in enumerate(labels) if len(label) <= room), 0)
        found[span.action.kind] = max(found.get(span.action.kind, 0), sort)
    return found


def _filled(label: str, room: int, filling: str) -> str:
    """A label in so many columns, the last of which is a gap if it can be spared."""
    return label if len(label) >= room else label.ljust(room - 1, filling) + " "


def _idle(start: int, end: int, unit: int) -> str:
    """Dots, with gaps where shortest actions, one after another, would have them."""
    return "".join(" " if unit > 1 and column % unit == unit - 1 else "." for column in range(start, end))


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def panel(timeline: Timeline, ruler: Ruler, *, colored: bool, unit: Unit = "") -> Iterator[Text]:
    """The lanes of a timeline, and under them the time, in milliseconds or as it is.

    >>> from gpipe.schedule.simulate import figures
    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> timeline = figures(program_of("gpipe", ranks=2, micro_batches=2)).timeline
    >>> for line in panel(timeline, Ruler(unit=3, seconds=1.0), colored=False):
    ...     print(line)
    rank 0  F0 F1 .. .. .. B0--- B1---
    rank 1  .. F0 F1 B0--- B1--- .. ..
    time    0              5
    """
    stages = 1 + max(nth_stages(timeline).values(), default=0)
    for text, lane in named(lanes(timeline, ruler, colored=colored)):
        yield _colored(lane, stages) if colored else Text(text)
    factor = 1000 if unit == "ms" else 1
    times = Ruler(ruler.unit, ruler.seconds * factor).axis(timeline.seconds * factor)
    yield Text((unit or "time").ljust(margin(timeline.ranks)) + times, "dim" if colored else "")


def _colored(lane: Lane, stages: int) -> Text:
    name, *pieces = lane
    text = Text(name.text)
    for piece in pieces:
        text.append(piece.text, "dim" if piece.kind is None else _style(piece.kind, piece.nth, stages))
    return text


def _style(kind: Kind, nth: int, stages: int) -> str:
    color = shade(kind, nth, stages)
    return f"{'#1f2328' if is_bright(color) else '#ffffff'} on {color}"


def legend(timelines: Collection[Timeline], *, colored: bool) -> Iterator[Text]:
    r"""What the colours of lanes mean, or the letters.

    >>> from gpipe.schedule.simulate import figures
    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> print(*legend([figures(program_of("zb_v", 2, 2)).timeline], colored=False), sep="\n")
    F forward   I backward, inputs   W backward, weights   . idle
    f, i, w at a rank's second stage
    """
    found = {span.action.kind for timeline in timelines for span in timeline.spans} & COMPUTE
    kinds = [kind for kind in NAMES if kind in found]
    stages = 1 + max((nth for timeline in timelines for nth in nth_stages(timeline).values()), default=0)
    letters = [(f" {kind.value} ", _style(kind, 0, stages)) if colored else kind.value for kind in kinds]
    words = [Text.assemble(letter, f" {NAMES[kind]}") for letter, kind in zip(letters, kinds, strict=True)]
    yield Text("   ").join([*words, Text(". idle")])
    if stages > 1 and colored:
        yield Text("lighter at a rank's later stages")
    elif stages > 1:
        later = [", ".join(letter_of(kind, nth) for kind in kinds) for nth in range(1, stages)]
        names = (f"at a rank's {name} stage" for name in ORDINALS[1:])
        yield Text("; ".join(f"{some} {name}" for some, name in zip(later, names, strict=False)))


def words(found: Figures) -> Iterator[str]:
    r"""What a schedule costs, in a few lines.

    >>> from gpipe.schedule.simulate import figures
    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> print(*words(figures(program_of("1f1b", ranks=4, micro_batches=8))), sep="\n")
    bubble 27.3%: 33 from beginning to end, of which a rank works 24
    micro-batches held at most: 4, 3, 2, 1, by rank
    backwards: whole
    """
    yield f"bubble {found.bubble:.1%}: {found.seconds:g} from beginning to end, of which a rank works {found.work:g}"
    peaks = [f"{peak:.3g}" for peak in found.peaks]
    each = f"{peaks[0]} on each rank" if len(set(peaks)) == 1 else f"{', '.join(peaks)}, by rank"
    yield f"micro-batches held at most: {each}"
    few = "" if found.split == 1 else f", {found.split:.0%} of them"
    yield f"backwards: split into I and W{few}" if found.split else "backwards: whole"
