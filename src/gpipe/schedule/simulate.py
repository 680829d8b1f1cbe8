"""Predicts the timeline, the bubble and the peak memory of a mini-batch, from its program and its costs."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from gpipe.schedule.action import COMPUTE, MOVES, SHARDS, STREAMS, Action, Kind
from gpipe.schedule.cost import Costs, StageCost, seconds
from gpipe.schedule.lower import join_backwards, place_recompute
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program, notebook_html
from gpipe.schedule.rules import BACKWARD_PARTS, BACKWARDS, crossing, linearize, linearize_with_needs
from gpipe.schedule.timeline import Span, Timeline

BACKWARD_OVER_FORWARD = 2.0
"""The assumed cost of a backward, if a forward costs 1: a backward has twice as many matrix products as a forward."""
UNIT_COST = StageCost(forward=1.0, backward=2.0, backward_input=1.0, backward_weight=1.0)
"""One unit of time for each of F, I and W, and two for B, which is I and W together."""

BOUNDARY, ACTIVATIONS, WORKING, GATHERED, VALUE, GRADIENT, LATE, WORKING_INPUT, WORKING_WEIGHT = range(9)
LOADED, LOADED_GRADIENTS = range(9, 11)
"""Indices into `StageCost.sizes`. VALUE and GRADIENT are forward and backward outputs that a different rank still
needs. LOADED_GRADIENTS are the gradients of loaded weights."""

MicroBatches: TypeAlias = frozenset[int | None]
Recomputed: TypeAlias = Mapping[int, MicroBatches]  # by stage
Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Simulation:
    """The predicted timeline of a program, and the peak memory of each rank.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=4), micro_batches=4)
    >>> simulation = simulate(program, [StageCost(forward=1.0, backward=2.0, boundary=10, activations=100)] * 2)
    >>> simulation.timeline.seconds, simulation.peak_bytes
    (15.0, (440, 440))
    """

    timeline: Timeline
    peak_bytes: tuple[int, ...]


def simulate(program: Program, costs: Costs, duration: Callable[[Action], float] | None = None) -> Simulation:
    """Simulates a program.

    Each rank executes its actions in order, and starts each action as soon as its dependencies are done.

    Some actions do not keep their rank busy:

    - A message arrives `costs[stage].send` seconds after it was sent, or after the preceding message on the same link
      and in the same direction.
    - Each rank runs its OFFLOAD and FETCH actions one after the other.
    - Each rank runs its LOAD actions one after the other, and its FREE actions. A FREE copies only gradients, so it
      takes no time after forwards.
    - Each rank runs its UNSHARD and REDUCE actions one after the other. The timeline shows a REDUCE after all other
      actions, with the time that the rank waits for it.

    Args:
        program: The program.
        costs: The cost of each stage.
        duration: A function that returns the seconds of an action, used instead of `costs`. Default: None.

    Returns:
        The timeline, and the peak memory of each rank. The peak memory is 0 if `costs` have no bytes.

    >>> from gpipe.schedule.cost import unit_costs
    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=4, micro_batches=4), micro_batches=4)
    >>> round(simulate(program, unit_costs(4)).timeline.idle_share(), 6)  # (K-1)/(M+K-1)
    0.428571
    """
    simulator = Simulator(program)
    by_rank = [[costs[stage] for stage in stages] for stages in simulator.stages_of]
    peaks = [simulator.peak_bytes(rank, each, (frozenset(),) * len(each)) for rank, each in enumerate(by_rank)]
    return Simulation(simulator.timeline(costs, duration), tuple(peaks))


class Simulator:
    """Simulates one program with different costs and recomputation.

    Args:
        program: The program. The program can contain RECOMPUTE actions. Otherwise, pass the micro-batches to
            recompute to the methods. So one simulator covers all recomputation modes.
        messages: Whether to add the messages between ranks to a program without transfers, like `place_transfers`.
            Default: False.
    """

    def __init__(self, program: Program, *, messages: bool = False) -> None:
        self.program, self._messages = program, messages
        stages = range(program.stages)
        self.stages_of = [[s for s in stages if program.rank_of[s] == rank] for rank in range(program.ranks)]
        self._held, self._turns = cache(self._find_held), cache(self._find_turns)
        self._taken, self._when = cache(self._find_taken), cache(self._find_when)
        self._held_by_rank = cache(lambda rank, sets: np.hstack([*map(self._held, self.stages_of[rank], sets)]))
        self._actions: list[Action] = []
        self._steps: list[tuple[int, int | None, tuple[int, ...]]] = []  # rank, link if it has one, steps awaited
        self._links: dict[tuple[int, int], int] = {}
        self._list_steps(messages)
        kinds = [(a.kind, a.stage, self._carries_gradient(a)) for a in self._actions]
        by_kind = dict(zip(kinds, self._actions, strict=True))
        self._of_each_cost, place = list(by_kind.values()), {kind: at for at, kind in enumerate(by_kind)}
        self._cost_of = [place[kind] for kind in kinds]  # the index of the action with the same cost
        backwards = ((step, a) for step, a in enumerate(self._actions) if a.kind in BACKWARDS)
        self._backwards = {(a.stage, a.micro_batch): step for step, a in backwards}

    def _carries_gradient(self, action: Action) -> bool:
        if action.kind is Kind.FREE:
            return any(use.kind in BACKWARD_PARTS for use in self.program.uses_of[action._replace(kind=Kind.LOAD)])
        return action.route is not None and action.carries_gradient

    def _find_turns(self, recomputed: bool) -> dict[Action, tuple[int, int]]:
        """Returns the tick and rank of each action, if ranks advance in lockstep, with or without recomputation.

        A SEND takes a tick as well. Messages have the same order as in `place_transfers`.
        """
        bare = self.program.only({Kind.FORWARD, *BACKWARD_PARTS})
        table = place_recompute(bare, ["always" if recomputed else "never"] * bare.stages)
        actions: Iterable[Action] = self._actions
        if not self._messages or table != self.program:
            actions = (each for _, _, action in linearize(table) for each in (action, *crossing(action, bare)))
        turns, tick = dict[Action, tuple[int, int]](), [0] * bare.ranks
        for action in actions:
            rank = bare.rank_of[action.stage]
            tick[rank] += 1
            if action.kind is Kind.SEND:
                receiver = bare.rank_of[action.peer.stage]
                tick[receiver] = max(tick[receiver], tick[rank]) + 1
            elif action.kind is not Kind.RECOMPUTE:  # A recompute receives nothing.
                turns[action] = tick[rank], rank
        return turns

    def _list_steps(self, messages: bool) -> None:
        """Lists the actions in a valid order, without RECEIVEs.

        Actions that need a RECEIVE depend on its SEND instead.
        """
        rank_of = self.program.rank_of
        step_of: dict[Action, int] = {}
        sent: dict[tuple[Action, int], list[int]] = {}  # by source action and receiving stage
        last_move: dict[tuple[int, bool], list[int]] = {}  # by rank, for OFFLOAD and FETCH, and for FREE
        asynchronous = {Kind.RECEIVE, Kind.UNSHARD, *MOVES, *STREAMS}
        for rank, _, action, needed in linearize_with_needs(self.program):
            if action.kind is Kind.RECEIVE:
                step_of.update((action, step_of[need]) for need in needed)
                continue
            awaited = [need for need in needed if need.kind in asynchronous or rank_of[need.stage] != rank]
            steps = [step for need in awaited for step in sent.get((need, action.stage)) or [step_of[need]]]
            if action.kind in {Kind.FREE, *MOVES}:
                key = rank, action.kind is Kind.FREE
                steps, last_move[key] = [*steps, *last_move.get(key, ())], [len(self._actions)]
            step_of[action] = self._add(rank, action, tuple(steps))
            for send in crossing(action, self.program) if messages else ():
                sent.setdefault((action, send.peer.stage), []).append(self._add(rank, send, ()))

    def _add(self, rank: int, action: Action, awaited: tuple[int, ...]) -> int:
        link = None
        if action.kind is Kind.SEND or action.kind in MOVES:
            ends = rank, self.program.rank_of[action.peer.stage] if action.route else rank
            link = self._links.setdefault(ends, len(self._links))
        elif action.kind in STREAMS:  # one link for each direction
            link = self._links.setdefault((rank, -2 if action.kind is Kind.LOAD else -3), len(self._links))
        elif action.kind in (Kind.UNSHARD, Kind.REDUCE):
            link = self._links.setdefault((rank, -1), len(self._links))
        self._steps.append((rank, link, awaited))
        self._actions.append(action)
        return len(self._actions) - 1

    def _seconds(self, costs: Costs) -> list[float]:
        timed = (action.kind is not Kind.FREE or self._carries_gradient(action) for action in self._of_each_cost)
        each = [is_timed and seconds(a, costs) for a, is_timed in zip(self._of_each_cost, timed, strict=True)]
        return [each[index] for index in self._cost_of]

    def _recompute_seconds(self, costs: Costs, recomputed: Recomputed) -> list[float]:
        """Returns the seconds of the recompute before each action."""
        before = [0.0] * len(self._actions)
        for stage, micro_batches in recomputed.items():
            duration = seconds(Action(Kind.RECOMPUTE, stage), costs)
            for micro_batch in micro_batches:
                before[self._backwards[stage, micro_batch]] = duration
        return before

    def _run(self, durations: Sequence[float], recompute_seconds: Sequence[float]) -> tuple[list[float], list[float]]:
        free, idle = [0.0] * self.program.ranks, [0.0] * len(self._links)  # since when each rank and link is free
        starts: list[float] = []
        ends: list[float] = []
        for (rank, link, awaited), duration, before in zip(self._steps, durations, recompute_seconds, strict=True):
            start = free[rank] + before
            for step in awaited:
                if ends[step] > start:
                    start = ends[step]
            if link is None:
                end = free[rank] = start + duration
            else:  # A transfer waits for its link while its rank continues.
                free[rank] = start
                end = idle[link] = max(start, idle[link]) + duration
            starts.append(start)
            ends.append(end)
        return starts, ends

    def seconds(self, costs: Costs, recomputed: Recomputed | None = None) -> float:
        """Returns the seconds of a mini-batch, if `recomputed` is recomputed before the backwards."""
        _, ends = self._run(self._seconds(costs), self._recompute_seconds(costs, recomputed or {}))
        return max(ends, default=0.0)

    def busy(self, costs: Costs, recomputed: Recomputed) -> float:
        """Returns the sum of the computation times of all ranks in seconds."""
        durations = zip(self._actions, self._seconds(costs), strict=True)
        work = sum(duration for action, duration in durations if action.kind in COMPUTE)
        return work + sum(self._recompute_seconds(costs, recomputed))

    def timeline(self, costs: Costs, duration: Callable[[Action], float] | None = None) -> Timeline:
        """Returns the timeline without transfers.

        If `duration` is not None, the function returns the seconds of each action.
        """
        durations = self._seconds(costs) if duration is None else list(map(duration, self._actions))
        starts, ends = self._run(durations, [0.0] * len(durations))
        free, spans = [0.0] * self.program.ranks, []
        timed = sorted(zip(self._actions, starts, ends, strict=True), key=lambda each: each[0].kind is Kind.REDUCE)
        for action, start, end in timed:
            if action.kind is Kind.SEND:
                continue
            rank = self.program.rank_of[action.stage]
            if action.kind is Kind.REDUCE:  # Like the recorder, show only the time that the rank waits, at the end.
                start, end = max(start, free[rank]), max(end, free[rank])
            if action.kind not in {Kind.UNSHARD, *MOVES, *STREAMS}:
                free[rank] = end
            spans.append(Span(rank, action, start, end))
        return Timeline(self.program.ranks, tuple(spans), max(ends, default=0.0))

    def peak_bytes(self, rank: int, costs: Costs, recomputed: tuple[MicroBatches, ...]) -> int:
        """Returns the peak memory of a rank: state, stage inputs in flight, and activations.

        Args:
            rank: The rank.
            costs: The costs of its stages.
            recomputed: The micro-batches that each of its stages recomputes, in addition to RECOMPUTE actions.
        """
        sizes = [size for cost in costs for size in cost.sizes]
        held = (self._held_by_rank(rank, recomputed) @ sizes).max(initial=0) if costs else 0
        return sum(cost.state for cost in costs) + int(held)

    def in_flight(self, stage: int) -> int:
        """Returns the maximum number of micro-batches for which a stage keeps tensors at the same time."""
        return int(self._held(stage, frozenset())[:, [BOUNDARY, LATE]].sum(1).max())

    def _find_held(self, stage: int, recomputed: MicroBatches) -> Counts:
        """Returns, for each action of the rank, how often the stage keeps each entry of `StageCost.sizes`.

        - Activations exist at least until their forward ends. Without a backward, none are kept.
        - Offloaded activations exist until the next OFFLOAD or FETCH of the rank, which waits for the copy. So do the
          offloaded inputs of a micro-batch that is recomputed.
        - Gradients of gathered weights are as large as the weights. These gradients can exist until the end of the
          mini-batch, because they are reduced while the rank continues.
        - Outputs and gradients for a different rank exist until that rank uses them, if ranks advance in lockstep.
          Outputs count only if their stage recomputes: otherwise they are part of the activations.
        - An output for the next stage on the same rank is part of the activations. Such an output does not count
          again as an input.
        - Loaded weights exist from LOAD to FREE. Their gradients exist from the first backward to the next FREE of
          the rank, which waits for the copy. Gradients of earlier mini-batches would exist from LOAD on.
        """
        rank = self.program.rank_of[stage]
        row = self._row(rank)
        moves = [index for index, action in enumerate(row) if action.kind in MOVES]
        places: dict[int, dict[int | None, dict[Kind, int]]] = {stage: {}, stage + 1: {}}  # by micro-batch
        for index, action in enumerate(row):
            if action.stage in places and action.kind not in STREAMS:
                places[action.stage].setdefault(action.micro_batch, {})[action.kind] = index
        here, following = places.values()

        def until_used(index: int) -> slice:
            """Returns the indices at which the output of a finished action still exists on this rank."""
            recomputes = recompute is not None
            return slice(index + 1, bisect_right(self._when(rank, recomputes), self._taken(row[index], recomputes)))

        held = np.zeros((len(row), len(UNIT_COST.sizes)), np.int64)
        if shards := here.pop(None, {}):
            held[shards[Kind.UNSHARD] : shards[Kind.RESHARD], GATHERED] += 1
            backwards = (index for each in here.values() for kind, index in each.items() if kind in BACKWARDS)
            held[min(backwards, default=len(row)) :, GATHERED] += 1
        self._count_loaded(stage, row, held)
        for m, indices in here.items():
            forward, backward, end = _ends(indices)
            weights = indices.get(Kind.BACKWARD_WEIGHT)
            recompute = indices.get(Kind.RECOMPUTE, backward if m in recomputed else None)
            offload, fetch = indices.get(Kind.OFFLOAD), indices.get(Kind.FETCH)
            moved = BOUNDARY if Kind.RECOMPUTE in indices else ACTIVATIONS
            held[forward : end + 1, BOUNDARY] += 1
            held[forward : (end if recompute is None else forward) + 1, ACTIVATIONS] += 1
            if recompute is not None:
                held[recompute : end + 1, ACTIVATIONS] += 1
            if offload is not None:
                held[moves[moves.index(offload) + 1] : end + 1 if fetch is None else fetch, moved] -= 1
            if recompute is not None and Kind.FORWARD in indices:
                held[until_used(forward), VALUE] += 1
            elif recompute is None and offload is None and m in following:
                following_forward, _, following_end = _ends(following[m])
                held[max(following_forward, forward) : min(following_end, end) + 1, VALUE] -= 1
            if backward is not None:
                held[backward, WORKING if weights is None else WORKING_INPUT] += 1
                held[until_used(backward), GRADIENT] += 1
            if weights is not None:
                held[end + 1 : weights + 1, LATE] += 1
                held[weights, WORKING_WEIGHT] += 1
        return held

    def _count_loaded(self, stage: int, row: list[Action], held: Counts) -> None:
        frees = [index for index, action in enumerate(row) if action.kind is Kind.FREE]
        for free, following in pairwise([*frees, len(row)]):
            load = row[free]._replace(kind=Kind.LOAD)
            if load.stage == stage:
                held[row.index(load) : free + 1, LOADED] += 1
                backwards = [use for use in self.program.uses_of[load] if use.kind in BACKWARD_PARTS]
                first = row.index(backwards[0]) if backwards else following
                held[first:following, LOADED_GRADIENTS] += 1

    def _row(self, rank: int) -> list[Action]:
        """Returns the actions of a rank that can change the memory that it holds."""
        kinds = COMPUTE | MOVES | SHARDS | STREAMS
        return [action for action in self.program.table[rank] if action.kind in kinds]

    def _find_when(self, rank: int, recomputed: bool) -> list[tuple[float, int]]:
        """Returns, for each action of a rank, the earliest tick among this action and all later actions."""
        turns = self._turns(recomputed)
        return [*accumulate((turns.get(action, (inf, rank)) for action in reversed(self._row(rank))), min)][::-1]

    def _find_taken(self, action: Action, recomputed: bool) -> tuple[int, int]:
        """Returns the tick and rank of the last use of an output on a different rank; (-1, 0) if there is none."""
        kinds = BACKWARDS if action.kind in BACKWARDS else (Kind.FORWARD,)
        sent = [send.peer.stage for send in crossing(action, self.program)]
        takers = (Action(kind, stage, action.micro_batch) for stage in sent for kind in kinds)
        return max((self._turns(recomputed).get(taker, (-1, 0)) for taker in takers), default=(-1, 0))


def _ends(places: Mapping[Kind, int]) -> tuple[int, int | None, int]:
    """Returns the indices of a micro-batch's forward, its backward, and the last action that needs memory."""
    forward = places.get(Kind.FORWARD, 0)  # 0 if it ran before the program began
    backward = places.get(Kind.BACKWARD, places.get(Kind.BACKWARD_INPUT))
    return forward, backward, forward if backward is None else backward


@dataclass(frozen=True)
class Figures:
    """The key figures of a schedule.

    Attributes:
        timeline: The timeline of a mini-batch. The spans are empty if there are too many actions to list.
        work: The computation time of the busiest rank.
        bubble: The idle share of all ranks.
        peaks: The maximum number of micro-batches that each rank holds. On a rank with v stages, a micro-batch at one
            stage counts as 1/v. One of S slices of a micro-batch counts as 1/S.
        split: The share of backwards that are split.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> zb_h1 = figures(program_of("zb_h1", ranks=4, micro_batches=8))
    >>> zb_h1.seconds, zb_h1.work, zb_h1.peaks, zb_h1.split, round(zb_h1.bubble, 3)
    (27.0, 24.0, (4.0, 4.0, 4.0, 4.0), 1.0, 0.111)
    """

    timeline: Timeline
    work: float
    bubble: float
    peaks: tuple[float, ...]
    split: float

    @property
    def seconds(self) -> float:
        """The seconds of a mini-batch."""
        return self.timeline.seconds


def figures(program: Program, costs: Costs | None = None) -> Figures:
    """Returns the key figures of a program of forwards and backwards. By default, each stage costs `UNIT_COST`.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> figures(program_of("1f1b", ranks=2, micro_batches=4)).peaks
    (2.0, 1.0)
    """
    costs = [UNIT_COST] * program.stages if costs is None else costs
    simulation = simulate(program, count_one_per_micro_batch(costs))
    stages, kinds = Counter(program.rank_of), Counter(action.kind for action in program.actions)
    return Figures(
        timeline=simulation.timeline,
        work=max(map(simulation.timeline.busy, range(program.ranks))),
        bubble=simulation.timeline.idle_share(),
        peaks=tuple(peak / stages[rank] / program.slices for rank, peak in enumerate(simulation.peak_bytes)),
        split=kinds[Kind.BACKWARD_INPUT] / max(1, sum(kinds[kind] for kind in BACKWARDS)),
    )


def count_one_per_micro_batch(costs: Costs) -> list[StageCost]:
    """Returns costs whose bytes count micro-batches: activations have 1 byte per micro-batch, and the rest has 0."""
    return [replace(cost, boundary=0, activations=1, working=0, state=0) for cost in costs]


@dataclass(frozen=True)
class Prediction:
    """The prediction of one mini-batch from the costs of the layers.

    Attributes:
        partition: The layers of each stage, and their costs.
        program: The actions of each rank, in order.
        timeline: The timeline, if each rank has its own device or core and all micro-batches have the same size.
        unit: The unit of costs and timeline: `"seconds"` if they were measured. With `"relative"`, only proportions
            have a meaning.
        peak_bytes: The peak memory of each rank. None if bytes were not counted.
        verified_peak_bytes: The peak memory of each rank in a verified step, such as the first step. The step copies
            the inputs of two micro-batches at each stage. The replay computes the gradients of one stage at a time,
            while the gradients of the step are kept.

    >>> from gpipe.schedule.partition import Partition
    >>> from gpipe.schedule.schedules import fill_drain
    >>> plan = predict(Partition.of_sizes([2, 2], costs=[3, 3, 3, 3]), Program.of(fill_drain(2, 4), micro_batches=4))
    >>> plan.timeline.seconds, plan.bubble
    (30.0, 0.19999999999999996)
    >>> plan
    Prediction(partitions=2, micro_batches=4, bubble=20.0%)
    """

    partition: Partition
    program: Program
    timeline: Timeline
    unit: Literal["seconds", "relative"]
    peak_bytes: tuple[int, ...] | None
    verified_peak_bytes: tuple[int, ...] | None = None

    @property
    def bubble(self) -> float:
        """The idle share of all ranks. This share includes the imbalance of the stages."""
        return self.timeline.idle_share()

    def __repr__(self) -> str:
        """Returns the predicted time, idle share and memory. `program` and `timeline` have the details."""
        size = f"partitions={self.program.ranks}, micro_batches={self.program.micro_batches // self.program.slices}"
        step = f"seconds={self.timeline.seconds:.4g}, " if self.unit == "seconds" else ""
        peaks = self.peak_bytes and f", peak_bytes={self.peak_bytes}"
        return f"Prediction({size}, {step}bubble={self.bubble:.1%}{peaks or ''})"

    def _repr_html_(self) -> str | None:
        return notebook_html("prediction", self)


def equal_bubble(program: Program) -> float:
    """Returns the idle share of all ranks for equal stages without recomputation.

    For fill-drain with one stage per rank, the share is (K-1)/(M+K-1), as in the paper.
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
    """Predicts one mini-batch from the costs of the stages.

    Args:
        partition: The layers of each stage, and their costs.
        program: The program.
        costs: The cost of each stage. Default: computed by `stage_costs`.
        in_seconds: Whether the costs are seconds. Default: False.
        held: Costs that contain the bytes of each stage. None (default) if bytes were not counted.

    Returns:
        The prediction. Its `peak_bytes` is None without `held`.

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
    """Returns the peak memory of each rank in a verified step and its replay, which does not recompute."""
    verified = []
    for rank, peak in enumerate(peaks):
        costs = [cost for cost, other in zip(held, program.rank_of, strict=True) if other == rank]
        state, recorded = sum(cost.state for cost in costs), sum(cost.recorded for cost in costs)
        inside = (c.loaded + c.gradients + c.boundary + c.activations + c.working for c in costs)
        replay = max(inside, default=0)
        verified.append(max(peak, state + replay) + recorded)
    return tuple(verified)


def stage_costs(partition: Partition) -> tuple[StageCost, ...]:
    """Returns the cost of each stage, if only the total cost per micro-batch is known for each layer.

    The forward takes a third of the total, and the backward two thirds. A recompute takes as long as a forward. Its
    cost is not part of the total.
    """
    costs = partition.seconds if any(partition.seconds) else partition.layers  # If all costs are 0, layers are equal.
    parts = 1 + BACKWARD_OVER_FORWARD
    return tuple(StageCost(cost / parts, BACKWARD_OVER_FORWARD * cost / parts) for cost in costs)


def unsplit_stages(program: Program, costs: Costs) -> frozenset[int]:
    """Returns the stages whose backwards should not be split, for a program without transfers.

    Tries all stages in order, and in reverse order. In each pass, a stage is left unsplit if this does not slow down
    the mini-batch. Returns the fastest of three results: both passes, and all stages unsplit.
    """

    @cache
    def seconds(unsplit: frozenset[int]) -> float:
        return Simulator(join_backwards(program, unsplit)).seconds(costs)

    stages = range(program.stages)
    candidates = [frozenset(stages)]
    for order in (stages, stages[::-1]):
        unsplit = frozenset[int]()
        for stage in order:
            if seconds(unsplit | {stage}) <= seconds(unsplit):
                unsplit |= {stage}
        candidates.append(unsplit)
    return min(candidates, key=seconds)
