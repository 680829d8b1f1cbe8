"""Divides the wall time of recorded steps into parts (the paper's Table 4).

The idle time of a run is divided with simulations, which use the measured durations of actions:

    measured                       |-------------------------------|
    simulated                      |--------------------------|        the difference: actions that started late
    without transfers to the host  |-------------------------|         the difference: moving
    with equal stages              |---------------------|             the difference: imbalance
    computation of a rank          |-----------|                       the difference: the bubble of the schedule

The time between runs is divided with recorded intervals of calls of the pipe, weight updates, and data loading. The
window of a run ends when the next run begins.

call     |--------------|                    |--------------|
run         |--------|                          |--------|
update                    |---|                               |---|
data                           |--------|
window   |----------------------------------|---------------------|
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import floor
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, TypeAlias

from gpipe.schedule.action import CLOSING, COMPUTE, MOVES, SHARDS, STREAMS, TRANSFERS, Action, Kind
from gpipe.schedule.cost import unit_costs
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import equal_bubble, simulate
from gpipe.schedule.timeline import Span, Timeline

if TYPE_CHECKING:  # `gpipe report` prints the table without torch.
    from gpipe.features.recorder import Interval, RecordedRun

    Marks: TypeAlias = Sequence[Interval]

WIDTH = 88
NO_STEPS = "No step was recorded. Call pipe.step() while gpipe.record(pipe) is active. Failed steps are not kept."
ALWAYS = ("forward", "backward", "bubble", "imbalance", "late starts")
KINDS = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    **dict.fromkeys((Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), "backward"),
    **dict.fromkeys(TRANSFERS | SHARDS, "communication"),
    **dict.fromkeys(MOVES | STREAMS, "moving"),
    **dict.fromkeys(CLOSING, "reduction"),
}
MEANING = {  # the parts in their order
    "forward": "forward passes",
    "recompute": "forward passes again (rematerialization)",
    "backward": "backward passes",
    "bubble": "waiting that the schedule causes even with equal stages",
    "imbalance": "waiting because some stages or micro-batches take longer",
    "late starts": "hand-over between ranks although inputs were ready",
    "communication": "waiting for messages and gathered weights",
    "moving": "waiting for transfers to and from host memory",
    "reduction": "summing gradients of replicas and of shared weights",
    "data": "loading the next mini-batch",
    "weight update": "the optimizer",
    "host": "gpipe outside the pipeline: splitting, checks, agreement",
    "between steps": "your code between steps",
}


@dataclass(frozen=True)
class Breakdown:
    """The wall time of recorded steps, divided into parts. Prints as a table.

    >>> from gpipe.schedule.cost import StageCost
    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=4), micro_batches=4)
    >>> print(breakdown([simulate(program, [StageCost(forward=0.1, backward=0.2)] * 2).timeline]))
    part               share        ms  meaning
    forward           26.7 %     400.0  forward passes
    backward          53.3 %     800.0  backward passes
    bubble            20.0 %     300.0  waiting that the schedule causes even with equal stages
    imbalance          0.0 %       0.0  waiting because some stages or micro-batches take longer
    late starts        0.0 %       0.0  hand-over between ranks although inputs were ready
    step             100.0 %    1500.0  one step
    bubble: filling 3.3%, draining 6.7%, stalls 10.0% (with equal stages and no other costs: 20.0%)
    busy or receiving, by rank: 80%, 80%

    Attributes:
        seconds: The mean wall time from the beginning of a step to the beginning of the next step.
        steps: The number of runs. A `step` is one run; a call and its backward pass are two.
        shares: For each part, its share of the wall time, as a mean over ranks. The shares sum to 1.
        bubble: For each part of the bubble, its share of the wall time. The parts are filling, draining, and stalls
            between them.
        theory: The idle share of the schedule with equal stages. For fill-drain, this is the paper's (K-1)/(M+K-1).
        busy: For each rank, the share of the wall time in which it ran actions.
        stage_seconds: For each stage, the computing time of one micro-batch: forward pass, recomputation and backward
            pass.
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
        bubble = f"bubble: {parts} (with equal stages and no other costs: {self.theory:.1%})"
        lines = [*breakdown_lines(self.shares, self.seconds, self.steps), bubble]
        busy = ", ".join(f"{share:.0%}" for share in self.busy)
        return "\n".join([*lines, *wrap(f"busy or receiving, by rank: {busy}", WIDTH)])


def breakdown(timelines: Sequence[Timeline]) -> Breakdown:
    """Divides the wall time of steps into parts."""
    if not timelines:
        raise ValueError(NO_STEPS)
    by_step = [[_of_replica(replica) for replica in replicas_of(timeline)] for timeline in timelines]
    runs = [run for replicas in by_step for run in replicas]
    wall = sum(run.seconds for run in runs)
    names = [name for name in MEANING if any(name in run.shares for run in runs)]
    busy = ([share for run in replicas for share in run.busy] for replicas in by_step)
    return Breakdown(
        seconds=wall / len(runs),
        steps=len(by_step),
        shares={name: sum(run.shares.get(name, 0.0) * run.seconds for run in runs) / wall for name in names},
        bubble={name: sum(run.bubble[name] * run.seconds for run in runs) / wall for name in runs[0].bubble},
        theory=fmean(run.theory for run in runs),
        busy=tuple(map(fmean, zip(*busy, strict=True))),
        stage_seconds=tuple(map(fmean, zip(*(run.stage_seconds for run in runs), strict=True))),
    )


def replicas_of(timeline: Timeline) -> list[Timeline]:
    """Returns the timeline of each replica of the pipeline, with ranks counted from 0."""
    stages = [{span.action.stage for span in timeline.spans if span.rank == rank} for rank in range(timeline.ranks)]
    ranks = next((rank for rank in range(1, len(stages)) if stages[0] and stages[rank] == stages[0]), len(stages))
    spans: list[list[Span]] = [[] for _ in range(0, timeline.ranks, ranks)]
    for span in timeline.spans:
        spans[span.rank // ranks].append(span._replace(rank=span.rank % ranks))
    return [replace(timeline, ranks=ranks, spans=tuple(each)) for each in spans]


def program_of_run(timeline: Timeline) -> Program:
    """Returns the program that a run executed, without transfers."""
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


def simulate_durations(program: Program, seconds: Callable[[Action], float]) -> Timeline:
    """Simulates a program in which each action takes a given time and starts as early as possible."""
    return simulate(program, unit_costs(program.stages), seconds).timeline


def _of_replica(timeline: Timeline) -> Breakdown:
    ranks, program = timeline.ranks, program_of_run(timeline)
    wall = timeline.seconds + sum(timeline.other.values())
    seconds = dict.fromkeys(MEANING, 0.0)
    stage_seconds = [0.0] * program.stages
    working = [span for span in timeline.spans if span.action.kind not in MOVES]  # A rank works during moves.
    for span in working:
        seconds[KINDS[span.action.kind]] += span.seconds / ranks
        if span.action.kind in COMPUTE:
            stage_seconds[span.action.stage] += span.seconds / program.micro_batches * program.slices
    occupied = sum(seconds.values())
    durations = _durations(timeline)
    kinds = {action.kind for action in durations}
    means = {kind: fmean(time for action, time in durations.items() if action.kind is kind) for kind in kinds}
    measured = min(simulate_durations(program, durations.__getitem__).seconds, timeline.seconds)
    unmoved = min(simulate_durations(bare := program.only({*Kind} - MOVES), durations.__getitem__).seconds, measured)
    equal = simulate_durations(bare, lambda action: means[action.kind])
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
        stage_seconds=tuple(stage_seconds),
    )


def _durations(timeline: Timeline) -> dict[Action, float]:
    """Returns the duration of each action, including the time in which its rank received messages before it."""
    durations: dict[Action, float] = {}
    for rank in range(timeline.ranks):
        lead = 0.0
        for span in _of_rank(timeline.spans, rank):
            lead += span.seconds
            if span.action.kind not in TRANSFERS:
                durations[span.action], lead = lead, 0.0
    return durations


def _parts_of_bubble(equal: Timeline, share: float) -> dict[str, float]:
    """Divides the bubble into times before the first action of a rank, after its last action, and between actions."""
    parts = dict.fromkeys(("filling", "draining", "stalls"), 0.0)
    for spans in filter(None, (_of_rank(equal.spans, rank) for rank in range(equal.ranks))):
        parts["filling"] += spans[0].start
        parts["draining"] += equal.seconds - spans[-1].end
        parts["stalls"] += sum(max(0.0, later.start - before.end) for before, later in pairwise(spans))
    whole = sum(parts.values())
    return {name: share * part / whole if whole else 0.0 for name, part in parts.items()}


def windows(runs: Sequence["RecordedRun"], inside: "Marks", updates: "Marks", loads: "Marks") -> list[Timeline]:
    """Returns the timelines of runs, each with the time until the next run begins, by part of the breakdown."""
    if not runs:
        return []
    entries = [_entry(run, inside) for run in runs]
    known = max(end for _, end in (*inside, *updates, *(run.when for run in runs)))
    kinds = [inside], [inside, updates], [inside, updates, loads]  # An optimizer may call the pipe, a loader both.
    timelines = []
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
        timelines.append(replace(run.timeline, other=other))
    return timelines


def measure_throughput(
    steps: Sequence[Timeline], sizes: Sequence[tuple[int, int]], flops_per_row: float = 0.0, peak: float = 0.0
) -> dict[str, float]:
    """Computes the throughput of training steps on all devices together, over the wall time from step to step.

    Args:
        steps: Timelines, of which calls and evaluations do not count.
        sizes: The numbers of rows and tokens of each timeline.
        flops_per_row: The model FLOPs of one row. Default: 0, unknown.
        peak: The peak FLOPs per second of all devices. Default: 0, unknown.

    Returns:
        The known numbers, by name. Empty without training steps.

    >>> measure_throughput([], [])
    {}
    """
    trained = [(step, size) for step, size in zip(steps, sizes, strict=True) if step.is_step]
    if not trained:
        return {}
    seconds = sum(step.seconds + sum(step.other.values()) for step, _ in trained)
    rate, tokens = (sum(counts) / seconds for counts in zip(*(size for _, size in trained), strict=True))
    numbers = {"rows_per_second": rate}
    if tokens:
        numbers["tokens_per_second"] = tokens
    if flops_per_row:
        numbers["model_flops_per_second"] = rate * flops_per_row
    if flops_per_row and peak:
        numbers["mfu"] = rate * flops_per_row / peak
    return numbers


def throughput_texts(numbers: Mapping[str, float]) -> list[str]:
    """Formats the known numbers of `measure_throughput`, in this order: rows, tokens, FLOPs, MFU.

    >>> throughput_texts({"rows_per_second": 10.0, "tokens_per_second": 5120.0, "mfu": 0.25})
    ['10 rows/s', '5,120 tokens/s', 'MFU 25.0%']
    """
    formats: dict[str, Callable[[float], str]] = {
        "rows_per_second": lambda rate: f"{rate:,.6g} rows/s",
        "tokens_per_second": lambda rate: f"{rate:,.6g} tokens/s",
        "model_flops_per_second": lambda rate: f"{rate / 1e12:.3g} TFLOP/s",
        "mfu": lambda share: f"MFU {share:.1%}",
    }
    return [text(numbers[name]) for name, text in formats.items() if name in numbers]


def _entry(run: "RecordedRun", inside: Iterable["Interval"]) -> float:
    """Returns the time at which the user's call began that contains a run.

    Without a call, returns the beginning of the run. A backward pass that autograd starts has no call.
    """
    began = run.when[0]
    return min(began, next((start for start, end in inside if start <= run.when[1] <= end), began))


def _covered(marks: Iterable["Interval"], part: "Interval") -> float:
    """Returns the number of seconds of an interval that the marked intervals cover."""
    seconds, since = 0.0, part[0]
    for start, end in sorted(marks):
        until = min(end, part[1])
        seconds += max(0.0, until - max(start, since))
        since = max(since, until)
    return seconds


def percentages(shares: Mapping[str, float]) -> dict[str, float]:
    """Rounds shares to tenths of a percent, so that the result sums to exactly 100 percent.

    The shares must sum to 1. The method is the largest remainder method.

    >>> percentages({"forward": 1 / 3, "backward": 1 / 3, "bubble": 1 / 3})
    {'forward': 33.4, 'backward': 33.3, 'bubble': 33.3}
    """
    tenths = {name: floor(share * 1000) for name, share in shares.items()}
    left = round(sum(shares.values()) * 1000) - sum(tenths.values())
    for name in sorted(shares, key=lambda name: tenths[name] - shares[name] * 1000)[:left]:
        tenths[name] += 1
    return {name: tenth / 10 for name, tenth in tenths.items()}


def breakdown_lines(shares: Mapping[str, float], seconds: float, steps: int) -> Iterator[str]:
    r"""Yields the lines of a table with the share, the time and the meaning of each part of a step.

    Args:
        shares: The share of each part. The shares sum to 1.
        seconds: The mean time of a step.
        steps: The number of steps.

    Yields:
        The header, a line for each part in the order of `shares`, and a line for the whole step.

    >>> print(*breakdown_lines({"forward": 0.75, "bubble": 0.25}, seconds=0.1, steps=8), sep="\n")
    part               share        ms  meaning
    forward           75.0 %      75.0  forward passes
    bubble            25.0 %      25.0  waiting that the schedule causes even with equal stages
    step             100.0 %     100.0  mean of 8
    """
    yield f"{'part':<16}{'share':>8}{'ms':>10}  meaning"
    rounded = percentages(shares)
    for name, share in shares.items():
        yield f"{name:<16}{rounded[name]:>6.1f} %{share * seconds * 1000:>10.1f}  {MEANING.get(name, '')}".rstrip()
    which = "one step" if steps == 1 else f"mean of {steps}"
    yield f"{'step':<16}{sum(rounded.values()):>6.1f} %{seconds * 1000:>10.1f}  {which}"
