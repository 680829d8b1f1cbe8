"""Where the time of recorded steps went, as parts of the wall time (the paper's Table 4).

The idle time of a run is told apart by doing its actions again on paper, each as long as it was:

    measured                 |-------------------------------|
    on paper                 |--------------------------|        the rest: actions that began late
    with moves at no time    |-------------------------|         the rest: moving
    with stages all alike    |---------------------|             the rest: imbalance
    what a rank computes     |-----------|                       the rest: the bubble of the table

Whose time it was between runs, by marks of when a caller was inside of the pipe, updated weights, loaded data.

inside   |--------------|                    |--------------|
run         |--------|                          |--------|
update                    |---|                               |---|
data                           |--------|
window   |----------------------------------|---------------------|     a run, and all until the next begins
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import floor
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, TypeAlias

from gpipe.schedule.action import CLOSING, COMPUTE, MOVES, SHARDS, TRANSFERS, Action, Kind
from gpipe.schedule.cost import unit_costs
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import equal_bubble, simulate
from gpipe.schedule.timeline import Span, Timeline

if TYPE_CHECKING:  # the table is printed without torch
    from gpipe.features.recorder import Interval, RecordedRun

    Marks: TypeAlias = Sequence[Interval]

WIDTH = 88
NOTHING = "no step was recorded: make one while gpipe.record(pipe) is on; of a step that fails nothing is kept"
ALWAYS = ("forward", "backward", "bubble", "imbalance", "late starts")
KINDS = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    **dict.fromkeys((Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), "backward"),
    **dict.fromkeys(TRANSFERS | SHARDS, "communication"),
    **dict.fromkeys(MOVES, "moving"),
    **dict.fromkeys(CLOSING, "reduction"),
}
MEANING = {  # the parts, in their order, and what each is
    "forward": "the layers, the first time",
    "recompute": "the layers again (rematerialization)",
    "backward": "the gradients",
    "bubble": "the table has ranks wait, were all stages alike",
    "imbalance": "what some stages and micro-batches take longer",
    "late starts": "hand-over between ranks: what was needed was there",
    "communication": "messages and gathered weights on their way while their rank waited",
    "moving": "to the host and back while their rank waited",
    "reduction": "gradients of replicas and of shared weights put together",
    "data": "making the next mini-batch ready",
    "weight update": "the optimizer",
    "host": "gpipe around the pipeline: splitting, checking, agreeing",
    "between steps": "your own code outside of the pipe",
}


@dataclass(frozen=True)
class Breakdown:
    """Where the time of some steps went. Prints as a table.

    >>> from gpipe.schedule.cost import StageCost
    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=4), micro_batches=4)
    >>> print(breakdown([simulate(program, [StageCost(forward=0.1, backward=0.2)] * 2).timeline]))
    time went to       share        ms  which is
    forward           26.7 %     400.0  the layers, the first time
    backward          53.3 %     800.0  the gradients
    bubble            20.0 %     300.0  the table has ranks wait, were all stages alike
    imbalance          0.0 %       0.0  what some stages and micro-batches take longer
    late starts        0.0 %       0.0  hand-over between ranks: what was needed was there
    a step           100.0 %    1500.0  one step
    bubble: filling 3.3%, draining 6.7%, stalls 10.0%; if stages were equal and all else took no time: 20.0%
    busy or receiving, by rank: 80%, 80%

    Attributes:
        seconds: The wall time of a step, in the mean, with what follows until the next.
        steps: How many runs there were: a `step` is one, a call is one and its backward another.
        shares: What of the wall time went to each part, in the mean over ranks; they sum to 1.
        bubble: The parts of the bubble: filling, draining, and stalls between; they sum to its share.
        theory: The idle share of the pipeline by the table alone, if all stages are equal; of fill-drain it is the
            paper's (K-1)/(M+K-1).
        busy: By rank, the share of the wall time in which it did what is in the table.
        stage_seconds: By stage, what one micro-batch takes, recompute and backward included.
    """

    seconds: float
    steps: int
    shares: Mapping[str, float]
    bubble: Mapping[str, float]
    theory: float
    busy: tuple[float, ...]
    stage_seconds: tuple[float, ...]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {share:.1%}" for name, share in self.bubble.items())
        bubble = f"bubble: {parts}; if stages were equal and all else took no time: {self.theory:.1%}"
        lines = [*breakdown_lines(self.shares, self.seconds, self.steps), bubble]
        busy = ", ".join(f"{share:.0%}" for share in self.busy)
        return "\n".join([*lines, *wrap(f"busy or receiving, by rank: {busy}", WIDTH)])


def breakdown(timelines: Sequence[Timeline]) -> Breakdown:
    """Finds where the time of steps went."""
    if not timelines:
        raise ValueError(NOTHING)
    by_step = [[_of_replica(replica) for replica in replicas_of(timeline)] for timeline in timelines]
    each = [one for replicas in by_step for one in replicas]
    whole = sum(one.seconds for one in each)
    names = [name for name in MEANING if any(name in one.shares for one in each)]
    return Breakdown(
        seconds=whole / len(each),
        steps=len(by_step),
        shares={name: sum(one.shares.get(name, 0.0) * one.seconds for one in each) / whole for name in names},
        bubble={name: sum(one.bubble[name] * one.seconds for one in each) / whole for name in each[0].bubble},
        theory=fmean(one.theory for one in each),
        busy=tuple(map(fmean, zip(*([busy for one in some for busy in one.busy] for some in by_step), strict=True))),
        stage_seconds=tuple(map(fmean, zip(*(one.stage_seconds for one in each), strict=True))),
    )


def replicas_of(timeline: Timeline) -> list[Timeline]:
    """The timeline of each replica of the pipeline, its ranks counted from 0."""
    stages = [{span.action.stage for span in timeline.spans if span.rank == rank} for rank in range(timeline.ranks)]
    ranks = next((rank for rank in range(1, len(stages)) if stages[0] and stages[rank] == stages[0]), len(stages))
    spans: list[list[Span]] = [[] for _ in range(0, timeline.ranks, ranks)]
    for span in timeline.spans:
        spans[span.rank // ranks].append(span._replace(rank=span.rank % ranks))
    return [replace(timeline, ranks=ranks, spans=tuple(own)) for own in spans]


def program_of_run(timeline: Timeline) -> Program:
    """The table of what was done, without transfers."""
    done = [span for span in timeline.spans if span.action.kind not in TRANSFERS]
    ranks = sorted({span.rank for span in done})
    rows = [[span.action for span in _of_rank(done, rank)] for rank in ranks]
    rank_of = {span.action.stage: ranks.index(span.rank) for span in done}
    stages = max(rank_of, default=0) + 1
    micro_batches = 1 + max((span.action.micro_batch or 0 for span in done), default=0)
    placement = [rank_of.get(stage, 0) for stage in range(stages)]
    return Program.of(rows, micro_batches, rank_of=placement, slices=timeline.slices)


def _of_rank(spans: Iterable[Span], rank: int) -> list[Span]:
    return sorted((span for span in spans if span.rank == rank), key=lambda span: (span.start, span.end))


def on_paper(program: Program, seconds: Callable[[Action], float]) -> Timeline:
    """The actions of a program one after another, each as long as is said, as soon as they can be done."""
    return simulate(program, unit_costs(program.stages), seconds).timeline


def _of_replica(timeline: Timeline) -> Breakdown:
    ranks, program = timeline.ranks, program_of_run(timeline)
    wall = timeline.seconds + sum(timeline.other.values())
    seconds = dict.fromkeys(MEANING, 0.0)
    of_stage = [0.0] * program.stages
    working = [span for span in timeline.spans if span.action.kind not in MOVES]  # beside which their rank goes on
    for span in working:
        seconds[KINDS[span.action.kind]] += span.seconds / ranks
        if span.action.kind in COMPUTE:
            of_stage[span.action.stage] += span.seconds / program.micro_batches * program.slices
    occupied = sum(seconds.values())
    took = _durations(timeline)
    kinds = {action.kind for action in took}
    alike = {kind: fmean(own for action, own in took.items() if action.kind is kind) for kind in kinds}
    measured = min(on_paper(program, took.__getitem__).seconds, timeline.seconds)
    unmoved = min(on_paper(bare := program.only({*Kind} - MOVES), took.__getitem__).seconds, measured)
    equal = on_paper(bare, lambda action: alike[action.kind])
    at_best = min(equal.seconds, unmoved)
    seconds["late starts"] = timeline.seconds - measured
    seconds["moving"] = measured - unmoved
    seconds["imbalance"] = unmoved - at_best
    seconds["bubble"] = max(0.0, at_best - occupied)
    for name, other in timeline.other.items():
        seconds[name] += other
    shares = {name: seconds[name] / wall for name in MEANING if seconds[name] or name in ALWAYS}
    return Breakdown(
        seconds=wall,
        steps=1,
        shares=shares,
        bubble=_parts_of_bubble(equal, shares["bubble"]),
        theory=equal_bubble(program),
        busy=tuple(sum(s.seconds for s in working if s.rank == rank) / wall for rank in range(ranks)),
        stage_seconds=tuple(of_stage),
    )


def _durations(timeline: Timeline) -> dict[Action, float]:
    """How long each action took, what it received included."""
    found: dict[Action, float] = {}
    for rank in range(timeline.ranks):
        lead = 0.0
        for span in _of_rank(timeline.spans, rank):
            lead += span.seconds
            if span.action.kind not in TRANSFERS:
                found[span.action], lead = lead, 0.0
    return found


def _parts_of_bubble(equal: Timeline, share: float) -> dict[str, float]:
    """The bubble before the first action of each rank, behind its last, and between."""
    parts = dict.fromkeys(("filling", "draining", "stalls"), 0.0)
    for own in filter(None, (_of_rank(equal.spans, rank) for rank in range(equal.ranks))):
        parts["filling"] += own[0].start
        parts["draining"] += equal.seconds - own[-1].end
        parts["stalls"] += sum(max(0.0, later.start - before.end) for before, later in pairwise(own))
    whole = sum(parts.values())
    return {name: share * part / whole if whole else 0.0 for name, part in parts.items()}


def windows(runs: Sequence["RecordedRun"], inside: "Marks", updates: "Marks", loads: "Marks") -> list[Timeline]:
    """The timelines of runs, each with the seconds that went by outside of it until the next began, by part."""
    if not runs:
        return []
    entries = [_entry(run, inside) for run in runs]
    known = max(end for _, end in (*inside, *updates, *(run.when for run in runs)))
    kinds = [inside], [inside, updates], [inside, updates, loads]  # an optimizer may call the pipe, a loader both
    found = []
    for run, start, end in zip(runs, entries, [*entries[1:], known], strict=True):
        began, ended = run.when
        rest = (start, began), (ended, end)
        marked = [sum(_covered(chain(*marks), part) for part in rest) for marks in kinds]
        host = marked[0] + max(0.0, ended - began - run.timeline.seconds)
        other = {
            "data": marked[2] - marked[1],
            "weight update": marked[1] - marked[0],
            "host": host,
            "between steps": max(0.0, sum(until - since for since, until in rest) - marked[2]),
        }
        found.append(replace(run.timeline, other=other))
    return found


def _entry(run: "RecordedRun", inside: Iterable["Interval"]) -> float:
    """When the call began that a run is of, or another process began it; a backward by autograd is of no call."""
    began = run.when[0]
    return min(began, next((start for start, end in inside if start <= run.when[1] <= end), began))


def _covered(marks: Iterable["Interval"], part: "Interval") -> float:
    """The seconds of a part of time in which there is a mark."""
    seconds, since = 0.0, part[0]
    for start, end in sorted(marks):
        until = min(end, part[1])
        seconds += max(0.0, until - max(start, since))
        since = max(since, until)
    return seconds


def percentages(shares: Mapping[str, float]) -> dict[str, float]:
    """Rounds shares that sum to 1 to tenths of a percent that sum to 100 exactly, by largest remainder.

    >>> percentages({"forward": 1 / 3, "backward": 1 / 3, "bubble": 1 / 3})
    {'forward': 33.4, 'backward': 33.3, 'bubble': 33.3}
    """
    tenths = {name: floor(share * 1000) for name, share in shares.items()}
    left = round(sum(shares.values()) * 1000) - sum(tenths.values())
    for name in sorted(shares, key=lambda name: tenths[name] - shares[name] * 1000)[:left]:
        tenths[name] += 1
    return {name: tenth / 10 for name, tenth in tenths.items()}


def breakdown_lines(shares: Mapping[str, float], seconds: float, steps: int) -> Iterator[str]:
    r"""The table of shares that sum to 1, of steps that last so long in the mean: percent, milliseconds, meaning.

    >>> print(*breakdown_lines({"forward": 0.75, "bubble": 0.25}, seconds=0.1, steps=8), sep="\n")
    time went to       share        ms  which is
    forward           75.0 %      75.0  the layers, the first time
    bubble            25.0 %      25.0  the table has ranks wait, were all stages alike
    a step           100.0 %     100.0  mean of 8
    """
    yield f"{'time went to':<16}{'share':>8}{'ms':>10}  which is"
    rounded = percentages(shares)
    for name, share in shares.items():
        yield f"{name:<16}{rounded[name]:>6.1f} %{share * seconds * 1000:>10.1f}  {MEANING.get(name, '')}".rstrip()
    which = "one step" if steps == 1 else f"mean of {steps}"
    yield f"{'a step':<16}{sum(rounded.values()):>6.1f} %{seconds * 1000:>10.1f}  {which}"
