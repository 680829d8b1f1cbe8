"""Explains what limits the speed of recorded steps, and predicts the speedup of possible changes."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from gpipe.planner.other_processes import SOME_CORES, OtherProcesses
from gpipe.planner.search.balance import partition
from gpipe.planner.search.trial import fastest_sizes
from gpipe.profiling.breakdown import Breakdown, program_of_run, replicas_of, simulate_durations
from gpipe.schedule.action import COMPUTE, Kind
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program
from gpipe.schedule.timeline import Timeline

Seconds = Mapping[tuple[int, Kind], float]  # the mean time of an action, by stage and kind

TINY = 1e-3  # Seconds of a forward pass below which half the rows do not take half the time.
MIN_GAIN, LARGE_GAIN = 1.02, 1.05  # Minimum gain of advice, and minimum gain at which free advice comes first.
MAX_TIMED_ACTIONS, MIN_ATTEMPTS = 100_000, 16  # for the search of other split points
DEVIATION = 0.1  # A larger relative difference between a measured step and its prediction is explained.

OTHER_PROCESSES = (
    "Other processes used {others.cores:.1f} of this machine's {others.of} cores, so {ranks} ranks had to wait for "
    "cores. Record again without them."
)
NOTHING = "No known change speeds up steps by more than {gain:.0%}. Ranks compute {busy:.0%} of the time."
CUTS = (
    "{name} takes {longer:.0%} longer than the mean {place}. Use partitions={better} instead of {now} for a speedup "
    "of {gain:.2f}x."
)
NO_BETTER_CUTS = (
    "{name} takes {longer:.0%} longer than the mean {place}, and no split is better. Make its layers faster for a "
    "speedup of up to {gain:.2f}x."
)
UNMEASURED_CUTS = (
    "{name} takes {longer:.0%} longer than the mean {place}. No split is better if the cost of a layer is its size. "
    "Pass sample= to GPipe to measure the time of layers, or make the layers of {name} faster for a speedup of up to "
    "{gain:.2f}x."
)
BY_SHARE = {  # by part of the breakdown
    "data": "Loading data takes {share:.1%} of the time. Load it ahead of time, or in worker processes, with "
    "DataLoader(num_workers=...), for a speedup of up to {gain:.2f}x.",
    "weight update": "The optimizer takes {share:.1%} of the time. Use fewer threads (torch.set_num_threads) or "
    "fewer operations (fused=True or foreach=True) for a speedup of up to {gain:.2f}x.",
    "communication": "Waiting for messages takes {share:.1%} of the time. Use split points with smaller tensors, or "
    "a faster link, for a speedup of up to {gain:.2f}x.",
    "reduction": "Summing gradients takes {share:.1%} of the time. Use larger mini-batches or fewer replicas for a "
    "speedup of up to {gain:.2f}x.",
    "host": "gpipe's work outside the pipeline takes {share:.1%} of the time. Use larger mini-batches for a speedup "
    "of up to {gain:.2f}x.",
    "between steps": "Your code between steps takes {share:.1%} of the time. Compute fewer metrics, call "
    "loss.item() less often, log less often, or load data ahead of time, for a speedup of up to {gain:.2f}x.",
    "late starts": "Late starts take {share:.1%} of the time: actions start late although their inputs are ready. "
    "Stop other processes, or use fewer, larger stages or micro-batches, for a speedup of up to {gain:.2f}x.",
}
LATE_THREADS = (  # in one process
    "Late starts and communication together take {share:.1%} of the time: threads of ranks start late although their "
    "inputs are ready. Stop other processes, or use fewer, larger stages or micro-batches, for a speedup of up to "
    "{gain:.2f}x."
)
RECOMPUTE = (
    "Recomputation takes {share:.1%} of the time. Pass remat='never', if memory allows, for a speedup of up to "
    "{gain:.2f}x."
)
ONE_THREAD = (
    "All ranks run in one thread (driver='lockstep'), which takes {share:.1%} of the time. Use driver='threads' for "
    "a speedup of up to {gain:.2f}x."
)
MORE_MICRO_BATCHES = (
    "The bubble takes {share:.1%} of the time. Use micro_batches={more} for a speedup of {gain:.2f}x, if "
    "micro-batches of half the size take half as long."
)
SHARED_LOCK = (
    "Python's global interpreter lock (GIL) limits this pipe: on average {waiting:.1f} of {ranks} rank threads "
    "waited for it while {idle:.1f} cores were idle. Use one process per rank (driver='process', with torchrun), "
    "larger micro-batches, or fewer partitions. [interpreter-lock]"
)
MIN_CORES_USED, MIN_WAITING, MIN_IDLE = 0.8, 0.5, 0.5
"""The minimum numbers of used cores, waiting ranks and idle cores for a finding about the interpreter lock."""


@dataclass(frozen=True, order=True)
class Advice:
    """A change that would make steps faster.

    >>> print(max(Advice(1.1, "load ahead"), Advice(1.3, "partitions=[2, 2]")).text)
    partitions=[2, 2]

    Attributes:
        gain: The predicted speedup: 2.0 means that steps take half the time.
        text: The reason for the lost time, and the change that would save time.
        is_free: Whether the change needs no additional memory and leaves results bitwise identical.
    """

    gain: float
    text: str
    is_free: bool = True


@dataclass(frozen=True)
class RecordedSteps:
    """The input of `advise` and `explain`."""

    timelines: Sequence[Timeline]
    breakdown: Breakdown
    partition: Partition
    driver: str
    others: OtherProcesses | None = None  # None if unknown.
    micro_batches: int | None = None  # M of the pipe times S. Steps with fewer rows have fewer micro-batches.
    recomputes: bool = False  # Whether more micro-batches would mean more recomputation, at least in some stages.
    measured: bool = True  # Whether the costs of layers are seconds.


def advise(steps: RecordedSteps) -> list[Advice]:
    """Returns all changes with a predicted speedup of at least 2 %, with the largest speedup first."""
    advice = [*_by_simulation(steps), *_by_share(steps)]
    return sorted((each for each in advice if each.gain >= MIN_GAIN), reverse=True)


def explain(steps: RecordedSteps) -> str:
    """Returns a text about the most useful change.

    This is a free change with a speedup of at least 5 %, otherwise the change with the largest speedup. If ranks had
    to wait for cores that other processes used, the text starts with a sentence about these processes.
    """
    advice = advise(steps)
    free = [each for each in advice if each.is_free and each.gain >= LARGE_GAIN]
    best = next(iter(free or advice), None)
    text = NOTHING.format(gain=MIN_GAIN - 1, busy=fmean(steps.breakdown.busy)) if best is None else best.text
    others, ranks = steps.others, len(steps.breakdown.busy)
    if others is None or others.cores <= SOME_CORES:
        return text
    if ranks > others.of - others.cores:
        return f"{OTHER_PROCESSES.format(others=others, ranks=ranks)} {text}"
    return f"{text} During the recording, {others}."


def shared_lock(ranks: int, busy: float, used: float, others: OtherProcesses) -> list[str]:
    """Returns a finding if rank threads wait for the global interpreter lock.

    Without an idle core, ranks wait for cores, not for the lock. Layers that sleep can cause this finding, because
    they also use fewer cores.

    Args:
        ranks: Number of ranks.
        busy: Mean number of ranks that were running an action.
        used: Mean number of cores that the process used. The remaining busy ranks waited.
        others: Mean number of cores that other processes used.
    """
    waiting, idle = busy - used, others.of - others.cores - used
    if used < MIN_CORES_USED or waiting < MIN_WAITING or idle < MIN_IDLE:
        return []
    return [SHARED_LOCK.format(ranks=ranks, waiting=waiting, idle=idle)]


def compare(timelines: Sequence[Timeline], predicted: Timeline, why_longer: str) -> str:
    """Compares the prediction with the median step, and explains a difference of more than 10 %.

    >>> compare([Timeline(1, (), 0.30)], Timeline(1, (), 0.20), "memory was recorded")
    'pipeline: 300.0 ms measured, 200.0 ms predicted: 50% more, because memory was recorded'
    """
    median = sorted(timelines, key=lambda timeline: timeline.seconds)[len(timelines) // 2]
    difference = median.seconds / predicted.seconds - 1
    text = f"pipeline: {median.seconds * 1000:.1f} ms measured, {predicted.seconds * 1000:.1f} ms predicted"
    if abs(difference) <= DEVIATION:
        return text
    busy, expected = (sum(map(each.busy, range(each.ranks))) for each in (median, predicted))
    work = busy / (expected or 1.0) - 1
    reason = f"the same actions took {_percent(work)} time than when layers were measured"
    if difference > 0 and why_longer:
        reason = why_longer
    elif abs(work) < abs(difference) / 2:
        reason = "ranks waited differently than predicted (see late starts and communication)"
    return f"{text}: {_percent(difference)}, because {reason}"


def _percent(difference: float) -> str:
    return f"{abs(difference):.0%} {'more' if difference > 0 else 'less'}"


def _by_simulation(steps: RecordedSteps) -> Iterator[Advice]:
    """Predicts the speedup by different split points, no recomputation, or smaller micro-batches."""
    if not steps.timelines[-1].is_step:
        return
    runs = [run for timeline in steps.timelines for run in replicas_of(timeline)]
    program = program_of_run(runs[-1])
    if len(steps.partition.layers) != program.stages:
        return
    durations: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in (span for run in runs for span in run.spans if span.action.kind in COMPUTE):
        durations[span.action.stage, span.action.kind].append(span.seconds)
    seconds = {key: fmean(each) for key, each in durations.items()}
    now, wall, shares = _length(program, seconds), steps.breakdown.seconds, steps.breakdown.shares

    def gain(length: float) -> float:
        return wall / (wall - now + length)

    yield _other_cuts(steps, program, seconds, gain)
    no_remat = gain(_length(program.only({*Kind} - {Kind.RECOMPUTE}), seconds))
    yield _advice(RECOMPUTE, no_remat, shares.get("recompute", 0.0), is_free=False)
    forward = fmean(seconds.get((stage, Kind.FORWARD), 0.0) for stage in range(program.stages))
    has_rows = steps.micro_batches in (None, program.micro_batches)
    recomputes = any(action.kind is Kind.RECOMPUTE for action in program.actions)
    if program.ranks > 1 and forward > TINY and has_rows and (recomputes or not steps.recomputes):
        share, more = shares["bubble"], 2 * program.micro_batches // program.slices
        yield _advice(MORE_MICRO_BATCHES, 1 / (1 - share / 2), share, is_free=False, more=more)


def _advice(text: str, gain: float, share: float, *, is_free: bool = True, **values: object) -> Advice:
    return Advice(gain, text.format(gain=gain, share=share, **values), is_free)


def _other_cuts(steps: RecordedSteps, program: Program, seconds: Seconds, gain: Callable[[float], float]) -> Advice:
    """Finds split points with less work for the slowest rank.

    The advice names the slowest stage instead if each rank has only one stage.

    Args:
        steps: The recorded steps.
        program: The program of the steps.
        seconds: The mean measured time of an action, by stage and kind.
        gain: A function from the predicted duration of the program in seconds to the speedup.
    """
    stages, cuts = steps.breakdown.stage_seconds, steps.partition
    one_each = program.ranks == program.stages
    loads = [0.0] * program.ranks
    for rank, load in zip(program.rank_of, stages, strict=True):
        loads[rank] += load
    mean, slowest = fmean(loads), max(range(len(loads)), key=loads.__getitem__)
    name = f"Stage {program.rank_of.index(slowest)}" if one_each else f"Rank {slowest}"
    place, longer = "stage" if one_each else "rank", loads[slowest] / mean - 1
    stage_of = [stage for stage, layers in enumerate(cuts.layers) for _ in range(layers)]
    totals = [float(sum(cuts.layer_costs.costs[first:end])) for first, end in cuts.bounds]
    shares = [  # of each layer in its stage
        float(cost) / totals[stage] if totals[stage] else 1 / cuts.layers[stage]
        for cost, stage in zip(cuts.layer_costs.costs, stage_of, strict=True)
    ]
    costs = [stages[stage] * share for stage, share in zip(stage_of, shares, strict=True)]
    both = _with_split_and_whole_backwards(seconds, program.stages)

    def moved(layers: Sequence[int]) -> Seconds:
        """Predicts the time of each action with different split points."""
        result: defaultdict[tuple[int, Kind], float] = defaultdict(float)
        for stage, (first, end) in enumerate(Partition.of_sizes(layers, costs).bounds):
            for layer, kind in product(range(first, end), COMPUTE):
                result[stage, kind] += both.get((stage_of[layer], kind), 0.0) * shares[layer]
        return result

    best = partition(costs, len(stages), balance="minmax").layers
    if not one_each:
        attempts = max(MIN_ATTEMPTS, MAX_TIMED_ACTIONS // len(program.actions))
        best = fastest_sizes([cuts.layers, best], lambda layers: _length(program, moved(layers)), attempts)
    if best == cuts.layers:
        rank_of, text = program.rank_of, NO_BETTER_CUTS if steps.measured else UNMEASURED_CUTS
        even = {key: time * mean / (loads[rank_of[key[0]]] or 1.0) for key, time in seconds.items()}
        gained = gain(_length(program, even))
        return Advice(gained, text.format(name=name, longer=longer, place=place, gain=gained), is_free=False)
    gained, better, now = gain(_length(program, moved(best))), list(best), list(cuts.layers)
    text = CUTS.format(name=name, longer=longer, place=place, better=better, now=now, gain=gained)
    return Advice(gained, text)


def _with_split_and_whole_backwards(seconds: Seconds, stages: int) -> Seconds:
    """Estimates the missing times: of a whole backward pass from its two parts, and of the parts from the whole."""
    times = dict(seconds)
    for stage in range(stages):
        whole, *parts = ((stage, kind) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
        times.setdefault(whole, sum(times.get(part, 0.0) for part in parts))
        for part in parts:
            times.setdefault(part, times[whole] / 2)
    return times


def _length(program: Program, seconds: Seconds) -> float:
    """Returns the simulated duration of a program in seconds. Actions without a known time take 0 seconds."""
    return simulate_durations(program, lambda action: seconds.get((action.stage, action.kind), 0.0)).seconds


def _by_share(steps: RecordedSteps) -> Iterator[Advice]:
    """Predicts, for each part of the breakdown, the speedup if this part took no time."""
    shares, texts = dict(steps.breakdown.shares), dict(BY_SHARE)
    if steps.driver != "process":  # Nothing crosses a link: a late message means a late thread.
        shares["late starts"] += shares.pop("communication", 0.0)
        texts["late starts"] = LATE_THREADS
    if steps.driver == "lockstep":
        texts["late starts"] = ONE_THREAD
    if not steps.timelines[-1].is_step:
        texts["recompute"] = RECOMPUTE
    for name, text in texts.items():
        if 0 < (share := shares.get(name, 0.0)) < 1:
            yield _advice(text, 1 / (1 - share), share, is_free=text is not RECOMPUTE)
