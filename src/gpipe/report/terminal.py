"""Lanes on a terminal: their colours, where it has them, what colours and letters mean, and what is said of them."""

from collections.abc import Collection, Iterator

from rich.text import Text

from gpipe.plan.action import COMPUTE, NAMES, Kind
from gpipe.plan.figures import Figures
from gpipe.plan.timeline import Timeline
from gpipe.report.colors import is_bright, nth_stages, shade
from gpipe.report.lanes import Lane, Ruler, lanes, letter_of, margin, named
from gpipe.report.svg import Unit

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def panel(timeline: Timeline, ruler: Ruler, *, colored: bool, unit: Unit = "") -> Iterator[Text]:
    """The lanes of a timeline, and under them the time, in milliseconds or as it is.

    >>> from gpipe.plan.figures import figures
    >>> from gpipe.plan.schedules.by_name import program_of
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

    >>> from gpipe.plan.figures import figures
    >>> from gpipe.plan.schedules.by_name import program_of
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

    >>> from gpipe.plan.figures import figures
    >>> from gpipe.plan.schedules.by_name import program_of
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
