"""Finds the fastest way to train layers on devices within their memory.

Where the cuts of a shape are few, all are tried, unless the least time that the shape can take is more than that of
what was found: then the answer is the best of all that there are. Where they are many, the shapes that are likely to
be fast are tried first, with their most even cuts, until `MOST_ACTIONS` were timed; and neighbours of the best cuts.
Of tables of more than `LARGE` actions no others are.
Of those that rounding, or a measurement, cannot tell apart, that of fewest stages is taken: each costs a little more
than is known.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import attrgetter, itemgetter

from gpipe.planner.search.candidates import AUTO, LARGE, Choices, Shape, least_seconds, likely_seconds
from gpipe.planner.search.device import Device
from gpipe.planner.search.fitting import Misfit, choose_offload
from gpipe.planner.search.listing import ROUNDING_FACTOR
from gpipe.planner.search.plan import Plan, Reason, Rejection
from gpipe.planner.search.profile import Profile
from gpipe.planner.search.table_search import TableSearch
from gpipe.planner.search.trial import Trial
from gpipe.planner.search.units import format_bytes, format_seconds
from gpipe.schedule.large_tables import LargeTable
from gpipe.schedule.program import Program

ANYTHING = Choices()
micro_batches = attrgetter("micro_batches")
MOST_ACTIONS, MOST_LARGE = 40_000, 4  # in all tables that fit and have many cuts; or so many tables that are large
ALIKE_FACTOR = 1.05  # how much longer may take, where seconds are measured, what is taken for as fast


def search(
    profile: Profile,
    devices: Sequence[Device],
    global_batch: int,
    choices: Choices = ANYTHING,
    *,
    alternatives: int = 3,
) -> Plan:
    """Finds the fastest plan that fits; a plan of K ranks takes the first K devices, in their order.

    It has so many of the next best as `alternatives`, if there are; `choices` have no `mistakes`. Where the schedule
    is `"auto"`, pages are searched first, and then tables for the ranks and micro-batches of the best of them.
    """
    found = _Search(profile, devices, global_batch, alternatives + 1)
    searched = choices.schedules == (AUTO,)
    choices = replace(choices, schedules=None) if searched else choices
    shapes = partial(choices.shapes, len(devices), global_batch, len(profile.layers))
    found.attempt_all(shapes())
    for _, alike in groupby(sorted(shapes(beyond=True), key=micro_batches), key=micro_batches):
        if not found.fitting:  # smaller micro-batches may
            found.attempt_all(alike)
    return found.best(searched=searched)


class _Search:
    """The fastest of the shapes that were tried so far, `wanted` of them, and what is against the others."""

    def __init__(self, profile: Profile, devices: Sequence[Device], global_batch: int, wanted: int) -> None:
        self.profile, self.devices, self.global_batch, self.wanted = profile, devices, global_batch, wanted
        self.speeds = profile.speeds(devices)
        self.size = cache(lambda m: profile.of_micro_batch(global_batch // m))
        self.actions = 0  # of all tables that fit and have many cuts
        self.fitting: list[tuple[float, Trial]] = []  # by their seconds
        self.rejected: list[Rejection] = []
        self.misfits: list[tuple[Misfit, Shape]] = []

    def attempt_all(self, shapes: Iterable[Shape]) -> None:
        """Finds the best cuts of shapes, the fast first, and of those alike the simple; or what is against them."""

        def of(bound: Callable[..., float], shape: Shape) -> float:
            return bound(shape, self.size(shape.micro_batches), self.speeds[: shape.partitions])

        def due(bound: Callable[..., float], nth: int, shape: Shape) -> tuple[float, int, int, bool, Shape]:
            return float(f"{of(bound, shape):.9g}"), shape.stages, nth, bound is likely_seconds, shape

        # what is likely takes long to say, and is no less than what is least: it is asked of those whose turn it is
        each = [due(least_seconds, nth, shape) for nth, shape in enumerate(filter(self._is_possible, shapes))]
        heapify(each)
        while each:
            seconds, _, nth, likely, shape = heappop(each)
            least, about = of(least_seconds, shape), "about" if likely else "at least"
            if self._is_enough(least):
                self._reject(shape, "slower", f"takes {format_seconds(least)} at least")
            elif self.actions > MOST_ACTIONS:
                self._reject(
                    shape, "slower", f"would take {about} {format_seconds(seconds)}, and faster ones were tried"
                )
            elif not likely:
                heappush(each, due(likely_seconds, nth, shape))
            else:
                self._try(shape)

    def _reject(self, shape: Shape, reason: Reason, detail: str = "") -> None:
        self.rejected.append(Rejection(shape, reason, detail))

    def _is_enough(self, seconds: float) -> bool:
        """Whether as many were found as are wanted, none of which takes longer than this."""
        return len(self.fitting) == self.wanted and seconds >= self.fitting[-1][0]

    def _is_possible(self, shape: Shape) -> bool:
        sized, memory = self.size(shape.micro_batches), sum(each.memory for each in self.devices[: shape.partitions])
        state = sum(layer.state for layer in sized.layers)
        least = state + sum(layer.activations.at(sized.rows) for layer in sized.layers) / shape.stages_per_rank
        if shape.stages > len(sized.layers):
            why = f"{shape.stages} stages, {len(sized.layers)} layers"
            self._reject(shape, "more stages than layers", why)
        elif least > memory:
            inside = f"with one micro-batch inside one stage of each rank {format_bytes(least)}"
            held = f"weights, gradients and optimizer are {format_bytes(state)}"
            why = f"{held}, {inside}, devices {format_bytes(memory)}"
            self._reject(shape, "too big", why)
        else:
            return True
        return False

    def _try(self, shape: Shape) -> None:
        program = shape.large_table() or shape.program()
        if program is None:
            return self._reject(shape, "no table of this size")
        sized, used = self.size(shape.micro_batches), slice(shape.partitions)
        devices, speeds = self.devices[used], self.speeds[used]
        trial = Trial(shape, program, sized, devices, speeds, self._is_enough)
        trial.try_initial()
        if trial.best is not None:
            timed = MOST_ACTIONS // MOST_LARGE if isinstance(program, LargeTable) else shape.actions
            self.actions += 0 if trial.few else timed
            self.fitting.append((trial.best.seconds, trial))
            self.fitting.sort(key=itemgetter(0))
            for seconds, slower in self.fitting[self.wanted :]:
                self._reject(slower.shape, "slower", f"takes {format_seconds(seconds)}")
            del self.fitting[self.wanted :]
        elif trial.misfit is not None:
            self.misfits.append((trial.misfit, shape))
            self._reject(shape, "too big", f"at best {trial.misfit}")
        else:
            self._reject(shape, "slower", "no cuts of it are as fast as the next best")
        return None

    def best(self, *, searched: bool = False) -> Plan:
        """The fastest plan, beside the others, all with the best cuts near those that were found."""
        if not self.fitting:
            raise ValueError(self._why_nothing())
        measured = self.profile.unit == "seconds"
        trials = [trial for _, trial in self.fitting]
        for trial in trials:
            trial.improve()
        plans = [_plan(trial, self.global_batch, measured=measured) for trial in trials]
        plans = self._beside_tables(trials, plans) if searched else plans
        plans.sort(key=attrgetter("seconds"))
        alike = plans[0].seconds * (ALIKE_FACTOR if measured and not searched else ROUNDING_FACTOR)
        simplest = min((plan for plan in plans if plan.seconds <= alike), key=lambda plan: plan.shape.stages)
        plans.remove(simplest)
        return replace(simplest, alternatives=tuple(plans), rejected=tuple(self.rejected))

    def _beside_tables(self, trials: Sequence[Trial], plans: Sequence[Plan]) -> list[Plan]:
        """The plans, and that by the best table for as many ranks and micro-batches as the fastest has.

        Those of as many of both are told what no table of their stages goes below.
        """
        fastest = min(plans, key=attrgetter("seconds")).shape
        used, m = slice(fastest.partitions), fastest.micro_batches
        found = TableSearch(self.size(m), self.devices[used], self.speeds[used], m)
        measured = self.profile.unit == "seconds"

        def told(plan: Plan) -> Plan:
            if (plan.partitions, plan.micro_batches) != (used.stop, m):
                return plan
            least = found.least_seconds(plan.rank_of, plan.layers_per_partition)
            return replace(plan, least_seconds=least)

        tables = found.trials(trials) if fastest.partitions > 1 and fastest.actions <= LARGE else ()
        by_table = [_plan(trial, self.global_batch, measured=measured) for trial in tables if trial.best is not None]
        by_table.sort(key=attrgetter("seconds"))
        return [*map(told, (*plans, *by_table[:1]))]

    def _why_nothing(self) -> str:
        if not self.misfits:
            self._cut_what_is_too_big()
        if self.misfits:
            misfit, shape = min(self.misfits, key=lambda each: each[0].excess)
            remedy = "take more or larger devices, more micro-batches, or divide the largest layers"
            return f"nothing fits; the nearest is {shape}, where {misfit}: {remedy}"
        reasons = "; ".join(map(str, {each.reason: each for each in self.rejected}.values()))
        return f"nothing fits: {reasons}; settle fewer partitions, or another schedule or number of micro-batches"

    def _cut_what_is_too_big(self) -> None:
        """StageSizes shapes of the most ranks and micro-batches, which cannot fit, for how near they come."""
        too_big = [each.shape for each in self.rejected if each.reason == "too big"]
        quick = [shape for shape in too_big if 2 * shape.stages * shape.micro_batches <= MOST_ACTIONS]
        most = max(((shape.partitions, shape.micro_batches) for shape in quick), default=None)
        for shape in quick:
            if (shape.partitions, shape.micro_batches) == most:
                self._try(shape)


def _plan(trial: Trial, global_batch: int, *, measured: bool) -> Plan:
    shape, settled, fitting = trial.shape, trial.best, trial.fitting
    assert settled is not None  # cuts that fit were found
    busy = fitting.busy(settled.costs, settled.kept)
    plan = Plan(
        micro_batches=shape.micro_batches,
        layers_per_partition=settled.layers,
        schedule=shape.schedule,
        rank_of=tuple(trial.program.rank_of),
        remat=fitting.remat(settled.kept),
        seconds=settled.seconds,
        peak_bytes=fitting.peaks(settled.costs, settled.kept),
        bubble=1 - busy / (shape.partitions * settled.seconds) if settled.seconds else 0.0,
        global_batch=global_batch,
        devices=tuple(trial.devices),
        costs=settled.costs,
        names=tuple(layer.name for layer in trial.sized.layers),
        work=tuple(work / trial.speeds[0] for work in trial.sized.work),
        costs_by="time" if measured else "operations",
        table=trial.program if shape.schedule == AUTO and isinstance(trial.program, Program) else None,
    )
    if not isinstance(trial.program, Program):
        return plan
    remat = choose_offload(trial.program, plan.costs, [device.memory for device in trial.devices], plan.remat)
    if remat == plan.remat:
        return plan
    return replace(plan, remat=remat).timed()
