"""What holds recorded steps back, and what would make them faster: each remedy with the gain that it would give."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from gpipe.planner.search.balance import partition
from gpipe.planner.search.trial import fastest_sizes
from gpipe.profiling.breakdown import Breakdown, on_paper, program_of_run, replicas_of
from gpipe.profiling.memory import OtherProcesses
from gpipe.schedule.action import COMPUTE, Kind
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program
from gpipe.schedule.timeline import Timeline

Seconds = Mapping[tuple[int, Kind], float]  # by stage and kind, the mean time of an action

TINY = 1e-3  # seconds of a forward below which half of it does not take half as long
WORTH, MUCH = 1.02, 1.05  # gains below which nothing is advised, and from which a free remedy comes before others
SOME_CORES = 0.2  # cores used by other processes from which on they are named
MOST_TIMED_ACTIONS, FEWEST_ATTEMPTS = 100_000, 16  # where other cuts of ranks with several stages are tried
APART = 0.1  # the part by which a measured step may differ from its prediction without a word

OTHERS_FIRST = (
    "Other processes used {others.cores:.1f} of this machine's {others.of} cores, and {ranks} ranks had to wait for "
    "theirs: record again without them. Of what is left: "
)
NOTHING = "Nothing to change gives more than {worth:.0%}: ranks are at work for {busy:.0%} of the time"
BY_GUESS = "no cuts are better as far as its layers' sizes tell (with sample=, GPipe measures their time)"
TEXT = "{what} takes {share:.1%} of the time: {remedy} would give {most}{gain:.2f} x"
BY_SHARE = {  # by part of the time what it is, and the remedy that it would be gone with
    "data": ("Making mini-batches ready", "worker processes (DataLoader(num_workers=...)), or doing it ahead,"),
    "weight update": (
        "The optimizer",
        "fewer threads (torch.set_num_threads) or operations (fused=True, foreach=True)",
    ),
    "communication": ("Waiting for messages", "cuts where less crosses, or a faster link,"),
    "reduction": ("Putting gradients together", "larger mini-batches, or fewer replicas,"),
    "host": ("What gpipe does around the pipeline", "larger mini-batches"),
    "between steps": ("Your own code between steps", "less of metrics, logging and loss.item(), or data made ahead,"),
    "late starts": (
        "That actions begin late, though what they need is there,",
        "no other processes, or fewer, larger stages or micro-batches where handing over counts,",
    ),
}
RECOMPUTE = "Recomputing", "remat='never', where memory allows,"
ONE_THREAD = "That all ranks run in one thread (driver='lockstep')", "driver='threads'"
MORE_MICRO_BATCHES = "The bubble", "micro_batches={more}, if halves of these micro-batches take half as long,"
SHARED_LOCK = (
    "ranks as threads take turns at Python's interpreter lock: {waiting:.1f} of {ranks} waited inside of their "
    "actions while {idle:.1f} cores had nothing to do. Processes have a lock each: driver='process', under torchrun; "
    "or let an action do more at once, by larger micro-batches or fewer partitions"
)
AT_WORK, WAITING, IDLE = 0.8, 0.5, 0.5
"""Cores that one process uses, ranks that wait, and cores that idle, from which on the lock is what holds them up."""


@dataclass(frozen=True, order=True)
class Advice:
    """A remedy.

    >>> print(max(Advice(1.1, "load ahead"), Advice(1.3, "partitions=[2, 2]")).text)
    partitions=[2, 2]

    Attributes:
        gain: How many times as fast a step would be.
        text: What holds the step back, and what to do about it.
        is_free: Whether it costs neither memory nor other bits.
    """

    gain: float
    text: str
    is_free: bool = True


@dataclass(frozen=True)
class RecordedSteps:
    """What advice goes by."""

    timelines: Sequence[Timeline]
    breakdown: Breakdown
    partition: Partition
    driver: str
    others: OtherProcesses | None = None  # None: it is not known
    # M, as the pipe was given it, times S; there are fewer where there are fewer rows
    micro_batches: int | None = None
    recomputes: bool = False  # whether more micro-batches would be recomputed, at least in some stages
    measured: bool = True  # whether the costs of layers are their seconds


def advise(steps: RecordedSteps) -> list[Advice]:
    """All that would give at least 2 %, the best first."""
    remedies = [*_by_simulation(steps), *_by_share(steps)]
    return sorted((advice for advice in remedies if advice.gain >= WORTH), reverse=True)


def explain(steps: RecordedSteps) -> str:
    """What holds the steps back most, other processes first, and what to change: free remedies first if they pay."""
    remedies = advise(steps)
    free = [advice for advice in remedies if advice.is_free and advice.gain >= MUCH]
    best = next(iter(free or remedies), None)
    text = NOTHING.format(worth=WORTH - 1, busy=fmean(steps.breakdown.busy)) if best is None else best.text
    others, ranks = steps.others, len(steps.breakdown.busy)
    if others is None or others.cores <= SOME_CORES:
        return f"{text}."
    if ranks > others.of - others.cores:
        return f"{OTHERS_FIRST.format(others=others, ranks=ranks)}{text[0].lower()}{text[1:]}."
    return f"{text} ({others})."


def shared_lock(ranks: int, busy: float, used: float, others: OtherProcesses) -> list[str]:
    """Tells of ranks as threads that wait for each other's Python, where they do.

    `busy` ranks were inside of actions in the mean, for which the process used as many cores as `used`: the rest
    waited. Layers that sleep use fewer; where no core is left, ranks wait for cores.
    """
    waiting, idle = busy - used, others.of - others.cores - used
    is_told = used >= AT_WORK and waiting >= WAITING and idle >= IDLE
    return [SHARED_LOCK.format(ranks=ranks, waiting=waiting, idle=idle)] if is_told else []


def compare(timelines: Sequence[Timeline], predicted: Timeline, why_longer: str) -> str:
    """What was predicted of a step beside what the median took, and why, if they are more than 10 % apart.

    >>> compare([Timeline(1, (), 0.30)], Timeline(1, (), 0.20), "memory was watched")
    'pipeline: 300.0 ms measured, 200.0 ms predicted: 50% more, since memory was watched'
    """
    typical = sorted(timelines, key=lambda timeline: timeline.seconds)[len(timelines) // 2]
    more = typical.seconds / predicted.seconds - 1
    text = f"pipeline: {typical.seconds * 1000:.1f} ms measured, {predicted.seconds * 1000:.1f} ms predicted"
    if abs(more) <= APART:
        return text
    worked, expected = (sum(map(each.busy, range(each.ranks))) for each in (typical, predicted))
    work = worked / (expected or 1.0) - 1
    why = f"what ranks compute took {_than(work)} than when it was measured"
    if more > 0 and why_longer:
        why = why_longer
    elif abs(work) < abs(more) / 2:
        why = "ranks waited otherwise than predicted: see late starts and communication"
    return f"{text}: {_than(more)}, since {why}"


def _than(more: float) -> str:
    return f"{abs(more):.0%} {'more' if more > 0 else 'less'}"


def _by_simulation(steps: RecordedSteps) -> Iterator[Advice]:
    """What other cuts, no recompute and smaller micro-batches would give."""
    if not steps.timelines[-1].is_step:
        return
    runs = [run for timeline in steps.timelines for run in replicas_of(timeline)]
    program = program_of_run(runs[-1])
    if len(steps.partition.layers) != program.stages:
        return
    spans: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in (span for run in runs for span in run.spans if span.action.kind in COMPUTE):
        spans[span.action.stage, span.action.kind].append(span.seconds)
    seconds = {key: fmean(some) for key, some in spans.items()}
    now, wall, shares = _length(program, seconds), steps.breakdown.seconds, steps.breakdown.shares

    def gain(length: float) -> float:
        return wall / (wall - now + length)

    text, moved, is_free = _other_cuts(steps, program, seconds)
    mended = gain(_length(program, moved))
    yield Advice(mended, text.format(gain=mended), is_free)
    bare = gain(_length(program.only({*Kind} - {Kind.RECOMPUTE}), seconds))
    yield _remedy(bare, shares.get("recompute", 0.0), *RECOMPUTE, is_free=False)
    forward = fmean(seconds.get((stage, Kind.FORWARD), 0.0) for stage in range(program.stages))
    has_rows = steps.micro_batches in (None, program.micro_batches)
    recomputes = any(action.kind is Kind.RECOMPUTE for action in program.actions)
    if program.ranks > 1 and forward > TINY and has_rows and (recomputes or not steps.recomputes):
        what, remedy = (text.format(more=2 * program.micro_batches // program.slices) for text in MORE_MICRO_BATCHES)
        yield _remedy(1 / (1 - shares["bubble"] / 2), shares["bubble"], what, remedy, is_free=False)


def _remedy(gain: float, share: float, what: str, remedy: str, *, most: str = "", is_free: bool = True) -> Advice:
    return Advice(gain, TEXT.format(what=what, share=share, remedy=remedy, most=most, gain=gain), is_free)


def _other_cuts(steps: RecordedSteps, program: Program, seconds: Seconds) -> tuple[str, Seconds, bool]:
    """The remedy of the slowest rank: its text, what actions would take, and whether it is free.

    Where each rank has one stage, it is named by that.
    """
    stages, cuts = steps.breakdown.stage_seconds, steps.partition
    one_each = program.ranks == program.stages
    loads = [0.0] * program.ranks
    for rank, some in zip(program.rank_of, stages, strict=True):
        loads[rank] += some
    mean, slowest = fmean(loads), max(range(len(loads)), key=loads.__getitem__)
    name = f"Stage {program.rank_of.index(slowest)}" if one_each else f"Rank {slowest}"
    longer = f"{name} takes {loads[slowest] / mean - 1:.0%} longer than the mean {name.split()[0].lower()}"
    stage_of = [stage for stage, layers in enumerate(cuts.layers) for _ in range(layers)]
    totals = [float(sum(cuts.layer_costs.costs[first:end])) for first, end in cuts.bounds]
    shares = [  # of each layer in its stage
        float(cost) / totals[stage] if totals[stage] else 1 / cuts.layers[stage]
        for cost, stage in zip(cuts.layer_costs.costs, stage_of, strict=True)
    ]
    costs = [stages[stage] * share for stage, share in zip(stage_of, shares, strict=True)]
    each = _backwards_either_way(seconds, program.stages)

    def moved(layers: Sequence[int]) -> Seconds:
        """What actions would take with other cuts."""
        found: defaultdict[tuple[int, Kind], float] = defaultdict(float)
        for stage, (first, end) in enumerate(Partition.of_sizes(layers, costs).bounds):
            for layer, kind in product(range(first, end), COMPUTE):
                found[stage, kind] += each.get((stage_of[layer], kind), 0.0) * shares[layer]
        return found

    best = partition(costs, len(stages), balance="minmax").layers
    if not one_each:
        attempts = max(FEWEST_ATTEMPTS, MOST_TIMED_ACTIONS // len(program.actions))
        best = fastest_sizes([cuts.layers, best], lambda layers: _length(program, moved(layers)), attempts)
    if best == cuts.layers:
        better = "no cuts are better" if steps.measured else BY_GUESS
        rank_of = program.rank_of
        even = {key: some * mean / (loads[rank_of[key[0]]] or 1.0) for key, some in seconds.items()}
        return f"{longer}, and {better}: lighter layers in it would give up to {{gain:.2f}} x", even, False
    text = f"{longer}: partitions={list(best)} in place of {list(cuts.layers)} would give {{gain:.2f}} x"
    return text, moved(best), True


def _backwards_either_way(seconds: Seconds, stages: int) -> Seconds:
    """What backwards would take whole and in two parts, also at stages that only did them one way."""
    found = dict(seconds)
    for stage in range(stages):
        whole, *parts = ((stage, kind) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
        found.setdefault(whole, sum(found.get(part, 0.0) for part in parts))
        for part in parts:
            found.setdefault(part, found[whole] / 2)
    return found


def _length(program: Program, seconds: Seconds) -> float:
    """How long a program takes whose actions take so long, and closing actions no time."""
    return on_paper(program, lambda action: seconds.get((action.stage, action.kind), 0.0)).seconds


def _by_share(steps: RecordedSteps) -> Iterator[Advice]:
    """What each part would give if it were gone."""
    shares, texts = dict(steps.breakdown.shares), dict(BY_SHARE)
    if steps.driver != "process":  # nothing crosses a link: a message that is late is a thread that is late
        shares["late starts"] += shares.pop("communication", 0.0)
    if steps.driver == "lockstep":
        texts["late starts"] = ONE_THREAD
    if not steps.timelines[-1].is_step:
        texts["recompute"] = RECOMPUTE
    for name, text in texts.items():
        if 0 < (share := shares.get(name, 0.0)) < 1:
            yield _remedy(1 / (1 - share), share, *text, most="up to ", is_free=text is not RECOMPUTE)
