"""Predicts a mini-batch from a program and costs: its timeline, its bubble, and the peak bytes of each rank."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from gpipe.schedule.action import COMPUTE, MOVES, SHARDS, Action, Kind
from gpipe.schedule.cost import Costs, StageCost, seconds
from gpipe.schedule.lower import join_backwards, place_recompute
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program, notebook_html
from gpipe.schedule.rules import BACKWARD_PARTS, BACKWARDS, crossing, linearize, linearize_with_needs
from gpipe.schedule.timeline import Span, Timeline

BACKWARD_OVER_FORWARD = 2.0
"""A backward is taken to last two forwards: where a forward multiplies by a weight once, it does so for the gradient
of the input and for that of the weight."""
UNIT_COST = StageCost(forward=1.0, backward=2.0, backward_input=1.0, backward_weight=1.0)
"""F, I and W take one unit each, and B, which is I and W, two."""

BOUNDARY, INSIDE, WORKING, GATHERED, VALUE, GRADIENT, LATE, WORKING_INPUT, WORKING_WEIGHT = range(9)
"""The places of what is held in `StageCost.sizes`; VALUE and GRADIENT wait for another rank to take them."""

MicroBatches: TypeAlias = frozenset[int | None]
Recomputed: TypeAlias = Mapping[int, MicroBatches]  # by stage
Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Simulation:
    """What a run will look like: when, and with how many bytes at the most on each rank.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=4), micro_batches=4)
    >>> simulation = simulate(program, [StageCost(forward=1.0, backward=2.0, boundary=10, activations=100)] * 2)
    >>> simulation.timeline.seconds, simulation.peak_bytes
    (15.0, (440, 440))
    """

    timeline: Timeline
    peak_bytes: tuple[int, ...]


def simulate(program: Program, costs: Costs, duration: Callable[[Action], float] | None = None) -> Simulation:
    """Runs a program on paper: each rank does its actions in order, each as soon as what it needs is done.

    Transfers keep no rank busy; a message arrives `costs[stage].send` seconds after it was sent, or after the one
    before it on the same link and in the same direction arrived. Nor do moves, but a rank waits with one until the
    one before is done; nor do UNSHARD and REDUCE, each of which begins when the rank's last of both is done: of a
    REDUCE the timeline has what the rank waits for it, behind all else. `duration` replaces the seconds that `costs`
    gives, by action.

    >>> from gpipe.schedule.cost import unit_costs
    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=4, micro_batches=4), micro_batches=4)
    >>> round(simulate(program, unit_costs(4)).timeline.idle_share(), 6)  # (K-1)/(M+K-1)
    0.428571
    """
    simulator = Simulator(program)
    costs_of = [[costs[stage] for stage in own] for own in simulator.stages_of]
    peaks = [simulator.peak_bytes(rank, own, (frozenset(),) * len(own)) for rank, own in enumerate(costs_of)]
    return Simulation(simulator.timeline(costs, duration), tuple(peaks))


class Simulator:
    """A program, to be timed with other costs as often as one likes.

    What is recomputed stands in the program, or is said each time: so one serves for every remat of a program. With
    `messages` what crosses ranks is sent, as `place_transfers` has it, in a program that does not say it.
    """

    def __init__(self, program: Program, *, messages: bool = False) -> None:
        self.program, self._messages = program, messages
        stages = range(program.stages)
        self.stages_of = [[s for s in stages if program.rank_of[s] == rank] for rank in range(program.ranks)]
        self._held, self._turns = cache(self._find_held), cache(self._find_turns)
        self._taken, self._when = cache(self._find_taken), cache(self._find_when)
        self._held_by_rank = cache(lambda rank, again: np.hstack([*map(self._held, self.stages_of[rank], again)]))
        self._actions: list[Action] = []
        self._steps: list[tuple[int, int | None, tuple[int, ...]]] = []  # rank, link if it has one, steps awaited
        self._links: dict[tuple[int, int], int] = {}
        self._list_steps(messages)
        self._kinds = [(a.kind, a.stage, a.route is not None and a.carries_gradient) for a in self._actions]
        self._alike = dict(zip(self._kinds, self._actions, strict=True))  # one of those that cost the same
        backwards = ((step, a) for step, a in enumerate(self._actions) if a.kind in BACKWARDS)
        self._backwards = {(a.stage, a.micro_batch): step for step, a in backwards}

    def _find_turns(self, again: bool) -> dict[Action, tuple[int, int]]:
        """When ranks in step do forwards and backwards and, each as an action, what they send; if all is recomputed.

        Or else nothing is. It is the order of `linearize` once `place_transfers` has placed these.
        """
        bare = self.program.only({Kind.FORWARD, *BACKWARD_PARTS})
        table = place_recompute(bare, ["always" if again else "never"] * bare.stages)
        listed: Iterable[Action] = self._actions
        if not self._messages or table != self.program:
            listed = (each for _, _, action in linearize(table) for each in (action, *crossing(action, bare)))
        turns, tick = dict[Action, tuple[int, int]](), [0] * bare.ranks
        for action in listed:
            rank = bare.rank_of[action.stage]
            tick[rank] += 1
            if action.kind is Kind.SEND:
                other = bare.rank_of[action.peer.stage]
                tick[other] = max(tick[other], tick[rank]) + 1
            elif action.kind is not Kind.RECOMPUTE:  # which takes nothing
                turns[action] = tick[rank], rank
        return turns

    def _list_steps(self, messages: bool) -> None:
        """Lists the actions in a legal order. A RECEIVE is none of them: what waits for it waits for its SEND."""
        rank_of = self.program.rank_of
        step_of: dict[Action, int] = {}
        sent: dict[tuple[Action, int], list[int]] = {}  # by what made it and the stage that gets it
        moved: list[list[int]] = [[] for _ in self.program.table]  # the last move of each rank
        beside = {Kind.RECEIVE, Kind.UNSHARD, *MOVES}
        for rank, _, action, needed in linearize_with_needs(self.program):
            if action.kind is Kind.RECEIVE:
                step_of.update((action, step_of[need]) for need in needed)
                continue
            brought = [need for need in needed if need.kind in beside or rank_of[need.stage] != rank]
            others = [step for need in brought for step in sent.get((need, action.stage)) or [step_of[need]]]
            if action.kind in MOVES:
                others, moved[rank] = [*others, *moved[rank]], [len(self._actions)]
            step_of[action] = self._add(rank, action, tuple(others))
            for send in crossing(action, self.program) if messages else ():
                sent.setdefault((action, send.peer.stage), []).append(self._add(rank, send, ()))

    def _add(self, rank: int, action: Action, others: tuple[int, ...]) -> int:
        link = None
        if action.kind is Kind.SEND or action.kind in MOVES:
            ends = rank, self.program.rank_of[action.peer.stage] if action.route else rank
            link = self._links.setdefault(ends, len(self._links))
        elif action.kind in (Kind.UNSHARD, Kind.REDUCE):
            link = self._links.setdefault((rank, -1), len(self._links))
        self._steps.append((rank, link, others))
        self._actions.append(action)
        return len(self._actions) - 1

    def _seconds(self, costs: Costs) -> list[float]:
        by_kind = {kind: seconds(action, costs) for kind, action in self._alike.items()}
        return [by_kind[kind] for kind in self._kinds]

    def _recompute_seconds(self, costs: Costs, again: Recomputed) -> list[float]:
        """How long each recomputes before it begins."""
        found = [0.0] * len(self._actions)
        for stage, micro_batches in again.items():
            took = seconds(Action(Kind.RECOMPUTE, stage), costs)
            for micro_batch in micro_batches:
                found[self._backwards[stage, micro_batch]] = took
        return found

    def _run(self, took: Sequence[float], recomputing: Sequence[float]) -> tuple[list[float], list[float]]:
        free, idle = [0.0] * self.program.ranks, [0.0] * len(self._links)  # from when on ranks and links are
        starts: list[float] = []
        ends: list[float] = []
        for (rank, link, others), seconds_, before in zip(self._steps, took, recomputing, strict=True):
            start = free[rank] + before
            for other in others:
                if ends[other] > start:
                    start = ends[other]
            if link is None:
                end = free[rank] = start + seconds_
            else:  # a message waits for its turn on its link, and its rank goes on; so it does beside others
                free[rank] = start
                end = idle[link] = max(start, idle[link]) + seconds_
            starts.append(start)
            ends.append(end)
        return starts, ends

    def seconds(self, costs: Costs, again: Recomputed | None = None) -> float:
        """How long a mini-batch takes, if `again` is recomputed right before its backward."""
        _, ends = self._run(self._seconds(costs), self._recompute_seconds(costs, again or {}))
        return max(ends, default=0.0)

    def busy(self, costs: Costs, again: Recomputed) -> float:
        """The seconds that all ranks compute together."""
        each = zip(self._actions, self._seconds(costs), strict=True)
        work = sum(took for action, took in each if action.kind in COMPUTE)
        return work + sum(self._recompute_seconds(costs, again))

    def timeline(self, costs: Costs, duration: Callable[[Action], float] | None = None) -> Timeline:
        """When each action is done but for transfers; `duration` replaces the seconds that `costs` gives."""
        took = self._seconds(costs) if duration is None else list(map(duration, self._actions))
        starts, ends = self._run(took, [0.0] * len(took))
        free, spans = [0.0] * self.program.ranks, []
        each = [one for one in zip(self._actions, starts, ends, strict=True) if one[0].kind is not Kind.SEND]
        for action, start, end in sorted(each, key=lambda one: one[0].kind is Kind.REDUCE):
            rank = self.program.rank_of[action.stage]
            if action.kind is Kind.REDUCE:  # as it is recorded: what of it the rank waits for, behind all else
                start, end = max(start, free[rank]), max(end, free[rank])
            if action.kind not in {Kind.UNSHARD, *MOVES}:
                free[rank] = end
            spans.append(Span(rank, action, start, end))
        return Timeline(self.program.ranks, tuple(spans), max(ends, default=0.0))

    def peak_bytes(self, rank: int, own: Costs, again: tuple[MicroBatches, ...]) -> int:
        """The most that a rank holds: its state, boundary tensors in flight, and what forwards keep inside.

        `own` is what each of its stages costs, `again` what each recomputes beside what the program says.
        """
        sizes = [size for cost in own for size in cost.sizes]
        held = (self._held_by_rank(rank, again) @ sizes).max(initial=0) if own else 0
        return sum(cost.state for cost in own) + int(held)

    def in_flight(self, stage: int) -> int:
        """The most micro-batches of which a stage keeps something at once."""
        return int(self._held(stage, frozenset())[:, [BOUNDARY, LATE]].sum(1).max())

    def _find_held(self, stage: int, again: MicroBatches) -> Counts:
        """During each action of its rank, how many of each of `StageCost.sizes` are held for a stage.

        What a forward makes inside lives at least until it ends; without a backward to come it keeps nothing. What is
        offloaded does until the rank's next move, which waits for it. Gradients of gathered weights are as large as
        these, and may be there to the end of the row, beside which they are reduced. What goes to another rank is
        here until it is taken there, in the order in which ranks in step would do it; a value that is not recomputed
        anyway. What goes to the next stage on the same rank is kept inside, and is no second time among what that
        was given.
        """
        rank = self.program.rank_of[stage]
        row = self._row(rank)
        moves = [at for at, action in enumerate(row) if action.kind in MOVES]
        places: dict[int, dict[int | None, dict[Kind, int]]] = {stage: {}, stage + 1: {}}  # by micro-batch
        for at, action in enumerate(row):
            if action.stage in places:
                places[action.stage].setdefault(action.micro_batch, {})[action.kind] = at
        own, behind = places.values()

        def waits(at: int) -> slice:
            """While what an action made is here though it is done."""
            again = redo is not None
            return slice(at + 1, bisect_right(self._when(rank, again), self._taken(row[at], again)))

        held = np.zeros((len(row), len(UNIT_COST.sizes)), np.int64)
        if shards := own.pop(None, {}):
            held[shards[Kind.UNSHARD] : shards[Kind.RESHARD], GATHERED] += 1
            backwards = (at for each in own.values() for kind, at in each.items() if kind in BACKWARDS)
            held[min(backwards, default=len(row)) :, GATHERED] += 1
        for m, at_kind in own.items():
            forward, backward, end = _ends(at_kind)
            weights = at_kind.get(Kind.BACKWARD_WEIGHT)
            redo = at_kind.get(Kind.RECOMPUTE, backward if m in again else None)
            held[forward : end + 1, BOUNDARY] += 1
            back = at_kind.get(Kind.FETCH, redo)
            if (away := at_kind.get(Kind.OFFLOAD)) is not None:
                held[forward : moves[moves.index(away) + 1], INSIDE] += 1
            else:
                held[forward : (end if redo is None else forward) + 1, INSIDE] += 1
            if back is not None:
                held[back : end + 1, INSIDE] += 1
            if redo is not None and Kind.FORWARD in at_kind:
                held[waits(forward), VALUE] += 1
            elif redo is None and away is None and m in behind:
                taken, _, until = _ends(behind[m])
                held[max(taken, forward) : min(until, end) + 1, VALUE] -= 1
            if backward is not None:
                held[backward, WORKING if weights is None else WORKING_INPUT] += 1
                held[waits(backward), GRADIENT] += 1
            if weights is not None:
                held[end + 1 : weights + 1, LATE] += 1
                held[weights, WORKING_WEIGHT] += 1
        return held

    def _row(self, rank: int) -> list[Action]:
        """What a rank does that may change what it holds."""
        kinds = COMPUTE | MOVES | SHARDS
        return [action for action in self.program.table[rank] if action.kind in kinds]

    def _find_when(self, rank: int, again: bool) -> list[tuple[float, int]]:
        """By place in a rank's row, the first turn of what it does there or later."""
        turns = self._turns(again)
        return [*accumulate((turns.get(action, (inf, rank)) for action in reversed(self._row(rank))), min)][::-1]

    def _find_taken(self, action: Action, again: bool) -> tuple[int, int]:
        """The turn in which the last of the other ranks takes what an action made; (-1, 0) if none does."""
        kinds = BACKWARDS if action.kind in BACKWARDS else (Kind.FORWARD,)
        sent = [send.peer.stage for send in crossing(action, self.program)]
        takers = (Action(kind, stage, action.micro_batch) for stage in sent for kind in kinds)
        return max((self._turns(again).get(taker, (-1, 0)) for taker in takers), default=(-1, 0))


def _ends(places: Mapping[Kind, int]) -> tuple[int, int | None, int]:
    """Where in a row a micro-batch has its forward and backward at a stage, and until when that holds anything."""
    forward = places.get(Kind.FORWARD, 0)  # or done before the program began
    backward = places.get(Kind.BACKWARD, places.get(Kind.BACKWARD_INPUT))
    return forward, backward, forward if backward is None else backward


@dataclass(frozen=True)
class Figures:
    """What a mini-batch costs by its schedule.

    Attributes:
        timeline: What is done when; without spans of what is too much to be listed.
        work: How long the busiest rank computes.
        bubble: The share of rank-seconds in which nothing is computed.
        peaks: By rank, the most micro-batches that it holds; one at one of its v stages counts as 1/v, and one of
            its S slices as 1/S.
        split: The share of backwards that are split in two.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> found = figures(program_of("zb_h1", ranks=4, micro_batches=8))
    >>> found.seconds, found.work, found.peaks, found.split, round(found.bubble, 3)
    (27.0, 24.0, (4.0, 4.0, 4.0, 4.0), 1.0, 0.111)
    """

    timeline: Timeline
    work: float
    bubble: float
    peaks: tuple[float, ...]
    split: float

    @property
    def seconds(self) -> float:
        """From the first action to the end of the last."""
        return self.timeline.seconds


def figures(program: Program, costs: Costs | None = None) -> Figures:
    """Times a program of forwards and backwards, and counts what is held; by default a stage costs `UNIT_COST`.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> figures(program_of("1f1b", ranks=2, micro_batches=4)).peaks
    (2.0, 1.0)
    """
    each = [UNIT_COST] * program.stages if costs is None else costs
    simulation = simulate(program, _one_per_micro_batch(each))
    stages, kinds = Counter(program.rank_of), Counter(action.kind for action in program.actions)
    return Figures(
        timeline=simulation.timeline,
        work=max(map(simulation.timeline.busy, range(program.ranks))),
        bubble=simulation.timeline.idle_share(),
        peaks=tuple(peak / stages[rank] / program.slices for rank, peak in enumerate(simulation.peak_bytes)),
        split=kinds[Kind.BACKWARD_INPUT] / max(1, sum(kinds[kind] for kind in BACKWARDS)),
    )


def _one_per_micro_batch(costs: Costs) -> list[StageCost]:
    """The costs, where what is held of a micro-batch at a stage counts as 1."""
    return [replace(cost, boundary=0, activations=1, working=0, state=0) for cost in costs]


@dataclass(frozen=True)
class Prediction:
    """What a pipeline will do, and what is predicted of one mini-batch from the costs of its layers.

    Attributes:
        partition: The layers of each stage, and what they cost.
        program: What each rank does, in order.
        timeline: When, if each rank has a device or a core of its own and all micro-batches are of one size.
        unit: Of costs and timeline: seconds where they were measured; else only proportions have a meaning.
        peak_bytes: The most that each rank holds; None where no bytes were counted.
        verified_peak_bytes: The most that each rank holds in a step that is verified: the first one, above all. The
            step copies what two micro-batches bring to each stage. Its replay computes the gradients of one stage at
            a time, beside those of the step.

    >>> from gpipe.schedule.partition import Partition
    >>> from gpipe.schedule.schedules import fill_drain
    >>> plan = predict(Partition.of_sizes([2, 2], costs=[3, 3, 3, 3]), Program.of(fill_drain(2, 4), micro_batches=4))
    >>> plan.timeline.seconds, plan.bubble
    (30.0, 0.19999999999999996)
    """

    partition: Partition
    program: Program
    timeline: Timeline
    unit: Literal["seconds", "relative"]
    peak_bytes: tuple[int, ...] | None
    verified_peak_bytes: tuple[int, ...] | None = None

    @property
    def bubble(self) -> float:
        """The share of rank-seconds in which nothing will be computed, the imbalance of the stages included."""
        return self.timeline.idle_share()

    def _repr_html_(self) -> str | None:
        return notebook_html("prediction", self)


def equal_bubble(program: Program) -> float:
    """The share of rank-seconds in which nothing is computed if all stages cost the same, without recompute.

    Of fill-drain with a stage a rank it is the paper's (K-1)/(M+K-1).
    """
    return figures(program.only({Kind.FORWARD, *BACKWARD_PARTS})).bubble


def predict(
    partition: Partition,
    program: Program,
    costs: Costs | None = None,
    *,
    in_seconds: bool = False,
    held: Costs | None = None,
) -> Prediction:
    """Predicts one mini-batch from what each stage costs, by default by the rule of `stage_costs`.

    `in_seconds` says whether the costs are seconds; `held` has what stages hold, in bytes, where that was counted.

    >>> from gpipe.schedule.partition import Partition
    >>> from gpipe.schedule.schedules import fill_drain
    >>> partition = Partition.of_sizes([3, 1], [3, 3, 6, 6])
    >>> predict(partition, Program.of(fill_drain(2, 4), micro_batches=4)).timeline.seconds
    54.0
    """
    timeline = simulate(program, stage_costs(partition) if costs is None else costs).timeline
    peaks = None if held is None else simulate(program, held).peak_bytes
    verified = None if held is None or peaks is None else _verified_peaks(program, held, peaks)
    return Prediction(partition, program, timeline, "seconds" if in_seconds else "relative", peaks, verified)


def _verified_peaks(program: Program, held: Costs, peaks: Sequence[int]) -> tuple[int, ...]:
    """The most that each rank holds in a step that is verified and in its replay, which recomputes nothing."""
    found = []
    for rank, peak in enumerate(peaks):
        own = [cost for cost, other in zip(held, program.rank_of, strict=True) if other == rank]
        state, recorded = sum(cost.state for cost in own), sum(cost.recorded for cost in own)
        replay = max((cost.gradients + cost.boundary + cost.activations + cost.working for cost in own), default=0)
        found.append(max(peak, state + replay) + recorded)
    return tuple(found)


def stage_costs(partition: Partition) -> tuple[StageCost, ...]:
    """What the actions of each stage cost, where nothing is known but what its layers cost in all for a micro-batch.

    The forward is a third of that, a backward takes twice as long, and a recompute is as long as a forward beside.
    """
    costs = partition.seconds if any(partition.seconds) else partition.layers  # costs of zero count as equal
    each = 1 + BACKWARD_OVER_FORWARD
    return tuple(StageCost(cost / each, BACKWARD_OVER_FORWARD * cost / each) for cost in costs)


def unsplit_stages(program: Program, costs: Costs) -> frozenset[int]:
    """The stages whose backwards had better not be split, by what they cost unsplit and in parts.

    The program has no transfers. Stage after stage is left unsplit if the mini-batch then ends no later, from either
    end.
    """

    @cache
    def seconds(unsplit: frozenset[int]) -> float:
        return Simulator(join_backwards(program, unsplit)).seconds(costs)

    stages = range(program.stages)
    found = [frozenset(stages)]
    for order in (stages, stages[::-1]):
        unsplit = frozenset[int]()
        for stage in order:
            if seconds(unsplit | {stage}) <= seconds(unsplit):
                unsplit |= {stage}
        found.append(unsplit)
    return min(found, key=seconds)
