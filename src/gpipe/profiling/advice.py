"""What holds recorded steps back, and what would make them faster: each remedy with what it would give."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gpipe.profiling.breakdown import Breakdown, program_of_run, replicas_of
from gpipe.profiling.memory import Others
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import Costs, StageCost
from gpipe.schedule.partition import Partition, partition
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import simulate
from gpipe.schedule.timeline import Timeline

TINY = 1e-3
"""Seconds of a forward below which half of it does not take half as long."""
WORTH, MUCH = 1.02, 1.05
"""Gains below which nothing is advised, and from which on a free remedy comes before those that cost something."""
SOME, APART = 0.2, 0.1
"""Cores of others that are worth a word; the part by which a prediction may be off without one."""
SLOWER = 0.2
"""The part by which a rank may take longer than others with the same layers."""
MEASURED = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)


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
class Seen:
    """What is known of recorded steps.

    Attributes:
        timelines: Of the steps.
        found: Where their time went.
        partition: The cuts.
        driver: What runs the ranks.
        others: What other processes used of this machine meanwhile; None if that is not known.
        micro_batches: M, as it was asked for; there are fewer where there are fewer rows.
        recomputes: Whether more micro-batches would be recomputed, at least in some stages.
        measured: Whether the costs of layers are their seconds.
    """

    timelines: Sequence[Timeline]
    found: Breakdown
    partition: Partition
    driver: str
    others: Others | None = None
    micro_batches: int | None = None
    recomputes: bool = False
    measured: bool = True


def advise(seen: Seen) -> list[Advice]:
    """All that would give at least 2 %, the best first."""
    each = [*_by_simulation(seen), *_by_share(seen)]
    return sorted((advice for advice in each if advice.gain >= WORTH), reverse=True)


def explain(seen: Seen) -> str:
    """One sentence: what holds the steps back most, and what to change; first what is free, if it gives much."""
    every = advise(seen)
    free = [advice for advice in every if advice.is_free and advice.gain >= MUCH]
    best = next(iter(free or every), None)
    text = NOTHING.format(worth=WORTH - 1, busy=fmean(seen.found.busy)) if best is None else best.text
    return f"{text} ({seen.others})." if seen.others is not None and seen.others.cores > SOME else f"{text}."


def beside(timelines: Sequence[Timeline], predicted: Timeline, why_longer: str) -> str:
    """What was predicted of a step beside what the median took, and why, if they are more than 10 % apart.

    >>> beside([Timeline(1, (), 0.30)], Timeline(1, (), 0.20), "memory was watched")
    'pipeline: 300.0 ms measured, 200.0 ms predicted: 50% more, since memory was watched'
    """
    typical = sorted(timelines, key=lambda timeline: timeline.seconds)[len(timelines) // 2]
    more = typical.seconds / predicted.seconds - 1
    text = f"pipeline: {typical.seconds * 1000:.1f} ms measured, {predicted.seconds * 1000:.1f} ms predicted"
    if abs(more) <= APART:
        return text
    work = (
        sum(map(typical.busy, range(typical.ranks))) / (sum(map(predicted.busy, range(predicted.ranks))) or 1.0) - 1
    )
    why = f"what ranks compute took {abs(work):.0%} {_than(work)} than when it was measured"
    if more > 0 and why_longer:
        why = why_longer
    elif abs(work) < abs(more) / 2:
        why = "ranks waited otherwise than predicted: see late starts and communication"
    return f"{text}: {abs(more):.0%} {_than(more)}, since {why}"


def _than(more: float) -> str:
    return "more" if more > 0 else "less"


def _by_simulation(seen: Seen) -> Iterator[Advice]:
    """What other cuts, no recompute and smaller micro-batches would give."""
    if not seen.timelines[-1].is_step:
        return
    replica = replicas_of(seen.timelines[-1])[0]
    program = program_of_run(replica)
    if len(seen.partition.layers) != program.stages:
        return
    costs = _costs([one for timeline in seen.timelines for one in replicas_of(timeline)], program.stages)
    wall, now = seen.found.seconds, simulate(program, costs).timeline.seconds
    yield from _other_cuts(seen, program, costs, wall, now)
    yield from _slow_ranks(seen, program, wall)
    bare = program.only({*Kind} - {Kind.RECOMPUTE})
    gain = wall / (wall - now + simulate(bare, costs).timeline.seconds)
    text = RECOMPUTE.format(share=seen.found.shares.get("recompute", 0.0), gain=f"{gain:.2f}")
    yield Advice(gain, text, is_free=False)
    bubble = seen.found.shares["bubble"]
    gain, more = 1 / (1 - bubble / 2), 2 * program.micro_batches
    forward = fmean(cost.forward for cost in costs)
    has_rows = seen.micro_batches in (None, program.micro_batches)
    is_bare = seen.recomputes and not any(action.kind is Kind.RECOMPUTE for action in program.actions)  # as one is
    if program.ranks > 1 and forward > TINY and has_rows and not is_bare:
        yield Advice(
            gain,
            f"The bubble takes {bubble:.1%} of the time: micro_batches={more} would halve it and give {gain:.2f} x, "
            f"if halves of these micro-batches take half as long",
            is_free=False,
        )


def _other_cuts(seen: Seen, program: Program, costs: Costs, wall: float, now: float) -> Iterator[Advice]:
    stages, cuts = seen.found.stage_seconds, seen.partition
    layers, of_layer = _spread(cuts, stages)
    found = partition(layers, len(stages), balance="minmax")
    slowest = max(range(len(stages)), key=stages.__getitem__)
    longer = f"Stage {slowest} takes {stages[slowest] / fmean(stages) - 1:.0%} longer than the mean stage"
    if found.layers == cuts.layers:
        even = [_scaled(cost, fmean(stages) / (own or 1.0)) for cost, own in zip(costs, stages, strict=True)]
        gain = wall / (wall - now + simulate(program, even).timeline.seconds)
        better = "no cuts are better" if seen.measured else BY_GUESS
        text = f"{longer}, and {better}: lighter layers in it would give up to {gain:.2f} x"
        yield Advice(gain, text, is_free=False)
        return
    moved = [
        _sum([_scaled(costs[of_layer[at]], layers[at] / (stages[of_layer[at]] or 1.0)) for at in range(first, end)])
        for first, end in found.bounds
    ]
    gain = wall / (wall - now + simulate(program, moved).timeline.seconds)
    yield Advice(
        gain,
        f"{longer}: partitions={list(found.layers)} in place of {list(cuts.layers)} would give {gain:.2f} x",
    )


def _slow_ranks(seen: Seen, program: Program, wall: float) -> Iterator[Advice]:
    """Ranks that take longer than those of other replicas with the same layers: it is not the layers."""
    by_step = [replicas_of(timeline) for timeline in seen.timelines]
    each = [_costs(own, program.stages) for own in zip(*by_step, strict=True)]
    lengths = [simulate(program, costs).timeline.seconds for costs in each]
    for rank in range(program.ranks):
        held = [stage for stage, own in enumerate(program.rank_of) if own == rank]
        busy = [sum(sum(_parts(costs[stage])) for stage in held) for costs in each]
        for replica, seconds in enumerate(busy):
            others = [own for at, own in enumerate(busy) if at != replica]
            if not others or seconds <= (1 + SLOWER) * max(others):
                continue
            pace = max(others) / seconds
            mended = [_scaled(cost, pace) if stage in held else cost for stage, cost in enumerate(each[replica])]
            then = simulate(program, mended).timeline.seconds
            rest = max(length for at, length in enumerate(lengths) if at != replica)
            gain = wall / (wall - max(lengths) + max(then, rest))
            yield Advice(gain, SLOW.format(rank=replica * program.ranks + rank, more=1 / pace - 1, gain=gain))


def _spread(cuts: Partition, stages: Sequence[float]) -> tuple[list[float], list[int]]:
    """The seconds of each layer, by its cost those of its stage; and its stage."""
    layers, of_layer = list[float](), list[int]()
    for stage, (first, end) in enumerate(cuts.bounds):
        own = [float(cost) for cost in cuts.chain.costs[first:end]]
        own = own if sum(own) else [1.0] * len(own)
        layers += [stages[stage] * cost / sum(own) for cost in own]
        of_layer += [stage] * len(own)
    return layers, of_layer


def _costs(timelines: Sequence[Timeline], stages: int) -> list[StageCost]:
    """What an action of each kind takes at each stage, in the mean."""
    seconds: dict[tuple[int, Kind], list[float]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            seconds.setdefault((span.action.stage, span.action.kind), []).append(span.seconds)
    mean = {key: fmean(some) for key, some in seconds.items()}
    return [_cost([mean.get((stage, kind), 0.0) for kind in MEASURED]) for stage in range(stages)]


def _scaled(cost: StageCost, share: float) -> StageCost:
    return _cost([part * share for part in _parts(cost)])


def _sum(costs: Sequence[StageCost]) -> StageCost:
    return _cost([sum(parts) for parts in zip(*map(_parts, costs), strict=True)])


def _cost(parts: Sequence[float]) -> StageCost:
    forward, backward, inputs, weights, recompute = parts
    return StageCost(forward, backward, inputs, weights, recompute)


def _parts(cost: StageCost) -> tuple[float, ...]:
    return (
        cost.forward,
        cost.backward,
        cost.backward_input or 0.0,
        cost.backward_weight or 0.0,
        cost.recompute or 0.0,
    )


BY_GUESS = "no cuts are better as far as its layers' sizes tell (with sample=, GPipe measures their time)"
REMEDIES: Mapping[str, str] = {
    "data": "Making mini-batches ready takes {share:.1%} of the time: in worker processes "
    "(DataLoader(num_workers=...)), or ahead of time, it would give up to {gain:.2f} x",
    "weight update": "The optimizer takes {share:.1%} of the time: threads of torch's that fight for cores "
    "(torch.set_num_threads), or many small operations (fused=True, foreach=True); all of it gone would give "
    "{gain:.2f} x",
    "communication": "Messages that ranks wait for take {share:.1%} of the time: cuts where less crosses, or a "
    "faster link, would give up to {gain:.2f} x",
    "reduction": "Putting gradients together takes {share:.1%} of the time: larger mini-batches, or fewer replicas, "
    "would give up to {gain:.2f} x",
    "host": "What gpipe does around the pipeline takes {share:.1%} of the time: larger mini-batches would give up to "
    "{gain:.2f} x",
    "between steps": "Your own code between steps takes {share:.1%} of the time: metrics, logging, loss.item(), or "
    "data, of which recording.loading(loader) says how much; all of it gone would give {gain:.2f} x",
}
RECOMPUTE = (
    "Recomputing takes {share:.1%} of the time, for less memory: where memory allows, remat='never' would give "
    "{gain} x"
)
ONE_THREAD = (
    "All ranks run in one thread (driver='lockstep'), one after the other: driver='threads' would give up to "
    "{gain:.2f} x"
)
SLOW = (
    "Rank {rank} takes {more:.0%} longer than ranks with the same layers, so it is its device, or something else "
    "that uses it: as fast as they are, it would give {gain:.2f} x"
)
LATE = (
    "Actions begin late, {share:.1%} of the time in all, though what they need is there: {why}, or layers are so "
    "small that handing over counts; fewer, larger stages or micro-batches would give up to {gain:.2f} x"
)
NOTHING = "Nothing to change gives more than {worth:.0%}: ranks are at work for {busy:.0%} of the time"


def _by_share(seen: Seen) -> Iterator[Advice]:
    """What each part would give if it were gone."""
    for name, text in REMEDIES.items():
        share = seen.found.shares.get(name, 0.0)
        gain = 1 / (1 - share) if share < 1 else 1.0
        yield Advice(gain, text.format(share=share, gain=gain))
    if not seen.timelines[-1].is_step and (share := seen.found.shares.get("recompute", 0.0)):
        gain = 1 / (1 - share)
        yield Advice(gain, RECOMPUTE.format(share=share, gain=f"up to {gain:.2f}"), is_free=False)
    share = seen.found.shares["late starts"]
    gain = 1 / (1 - share)
    if seen.driver == "lockstep":
        yield Advice(gain, ONE_THREAD.format(gain=gain))
    else:
        why = "the interpreter's lock or other processes had the core"
        yield Advice(gain, LATE.format(share=share, gain=gain, why=why))
