"""Finds the fastest plan for layers on devices, within their memory.

- If a shape has few partitions, all its partitions are tried, so the result is the optimum. A partition is skipped if
  a lower bound shows that it cannot be fast enough.
- If a shape has many partitions, only the most even partitions are tried at first. Promising shapes come first, until
  `MAX_ACTIONS` actions were simulated. Then neighbors of the best partitions are tried as well, except for schedules
  with more than `LARGE` actions.

If rounding or measurement errors are larger than the difference between plans, the plan with the fewest stages is
chosen, because every stage has a small overhead that the costs do not include.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import attrgetter, itemgetter

from gpipe.planner.search.candidates import AUTO, LARGE, Choices, Shape, least_seconds, likely_seconds
from gpipe.planner.search.device import Device
from gpipe.planner.search.fitting import HOST, Misfit, choose_offload
from gpipe.planner.search.host_weights import HostWeightsSearch
from gpipe.planner.search.listing import ROUNDING_FACTOR
from gpipe.planner.search.plan import Plan, Reason, Rejection
from gpipe.planner.search.profile import Profile
from gpipe.planner.search.table_search import TableSearch
from gpipe.planner.search.trial import Trial
from gpipe.planner.search.units import format_bytes, format_seconds
from gpipe.schedule.large_tables import LargeTable
from gpipe.schedule.program import Program

ANYTHING = Choices()
NO_HOST_SPEED = (
    "weights='host': the speed of copies is unknown. Pass host= of each gpipe.Device, in bytes per second, or "
    "--host-bandwidth, in GB/s."
)
micro_batches = attrgetter("micro_batches")
MAX_ACTIONS, MAX_LARGE = 40_000, 4  # simulated actions of shapes with many partitions; or number of large tables
ALIKE_FACTOR = 1.05  # measured plans that are slower by at most this factor count as equally fast


def search(
    profile: Profile,
    devices: Sequence[Device],
    global_batch: int,
    choices: Choices = ANYTHING,
    *,
    alternatives: int = 3,
) -> Plan:
    """Returns the fastest plan that fits. A plan with K ranks uses the first K devices, in order.

    With schedule `"auto"`, named schedules are tried first. Then new schedules are searched for, with the best K and
    M.

    Args:
        profile: The costs of the layers.
        devices: The devices.
        global_batch: The rows of a mini-batch.
        choices: The allowed values, which must be valid (no `mistakes`). Default: all.
        alternatives: The maximum number of alternatives in the plan. Default: 3.

    Raises:
        ValueError: If no plan fits. The message describes the plan that is closest to fitting.
    """
    search = _Search(profile, devices, global_batch, alternatives + 1)
    searches_tables = choices.schedules == (AUTO,)
    choices = replace(choices, schedules=None) if searches_tables else choices
    shapes = partial(choices.shapes, len(devices), global_batch, len(profile.layers))
    if choices.weights != "host":
        search.attempt_all(shapes())
        for _, same_size in groupby(sorted(shapes(beyond=True), key=micro_batches), key=micro_batches):
            if not search.fitting:  # Smaller micro-batches need less memory.
                search.attempt_all(same_size)
    if not search.fitting and choices.weights != "device" and (plan := search.with_host_weights(choices)):
        return plan
    return search.best(searches_tables=searches_tables)


class _Search:
    """Tries shapes. Keeps the fastest `wanted` shapes, and the reasons against all other shapes."""

    def __init__(self, profile: Profile, devices: Sequence[Device], global_batch: int, wanted: int) -> None:
        self.profile, self.devices, self.global_batch, self.wanted = profile, devices, global_batch, wanted
        self.speeds = profile.speeds(devices)
        self.size = cache(lambda m: profile.of_micro_batch(global_batch // m))
        self.actions = 0  # of all tables that fit and have many partitions
        self.fitting: list[tuple[float, Trial]] = []  # sorted by seconds
        self.rejected: list[Rejection] = []
        self.misfits: list[tuple[Misfit, Shape]] = []

    def attempt_all(self, shapes: Iterable[Shape]) -> None:
        """Tries shapes in the order of their estimated time and number of stages. Rejects slow shapes."""

        def estimate(bound: Callable[..., float], shape: Shape) -> float:
            return bound(shape, self.size(shape.micro_batches), self.speeds[: shape.partitions])

        def entry(bound: Callable[..., float], nth: int, shape: Shape) -> tuple[float, int, int, bool, Shape]:
            return float(f"{estimate(bound, shape):.9g}"), shape.stages, nth, bound is likely_seconds, shape

        # The likely seconds are expensive, and never below the least seconds. So they are computed only when a shape
        # is first in the queue by its least seconds.
        queue = [entry(least_seconds, nth, shape) for nth, shape in enumerate(filter(self._is_possible, shapes))]
        heapify(queue)
        while queue:
            seconds, _, nth, is_likely, shape = heappop(queue)
            least = estimate(least_seconds, shape)
            if self._is_enough(least):
                self._reject(shape, "slower", f"takes at least {format_seconds(least)}")
            elif self.actions > MAX_ACTIONS:
                about = "about" if is_likely else "at least"
                self._reject(shape, "slower", f"not tried, as it takes {about} {format_seconds(seconds)}")
            elif not is_likely:
                heappush(queue, entry(likely_seconds, nth, shape))
            else:
                self._try(shape)

    def _reject(self, shape: Shape, reason: Reason, detail: str = "") -> None:
        self.rejected.append(Rejection(shape, reason, detail))

    def _is_enough(self, seconds: float) -> bool:
        """Returns whether `wanted` shapes were found that all take at most this time."""
        return len(self.fitting) == self.wanted and seconds >= self.fitting[-1][0]

    def _is_possible(self, shape: Shape) -> bool:
        sized, memory = self.size(shape.micro_batches), sum(each.memory for each in self.devices[: shape.partitions])
        least = sized.state + sized.activations / shape.stages_per_rank
        if shape.stages > len(sized.layers):
            self._reject(shape, "more stages than layers", f"{shape.stages} stages, {len(sized.layers)} layers")
        elif least > memory:
            detail = (
                f"weights, gradients and optimizer state need {format_bytes(sized.state)}, and {format_bytes(least)} "
                f"with the activations of one micro-batch; the devices have {format_bytes(memory)}"
            )
            self.misfits.append((Misfit(0, least, memory, "the model", is_bound=True), shape))
            self._reject(shape, "too big", detail)
        else:
            return True
        return False

    def _try(self, shape: Shape) -> None:
        program = shape.large_table() or shape.program()
        if program is None:
            return self._reject(shape, "no table of this size")
        sized, used = self.size(shape.micro_batches), slice(shape.partitions)
        trial = Trial(shape, program, sized, self.devices[used], self.speeds[used], self._is_enough)
        trial.try_initial()
        if trial.best is not None:
            simulated = MAX_ACTIONS // MAX_LARGE if isinstance(program, LargeTable) else shape.actions
            self.actions += 0 if trial.few else simulated
            self.fitting.append((trial.best.seconds, trial))
            self.fitting.sort(key=itemgetter(0))
            for seconds, slower in self.fitting[self.wanted :]:
                self._reject(slower.shape, "slower", f"takes {format_seconds(seconds)}")
            del self.fitting[self.wanted :]
        elif trial.misfit is not None:
            self.misfits.append((trial.misfit, shape))
            self._reject(shape, "too big", f"at best {trial.misfit}")
        else:
            self._reject(shape, "slower", "no partition is as fast as the alternatives")
        return None

    def best(self, *, searches_tables: bool) -> Plan:
        """Improves the partitions of the fastest shapes. Returns the fastest plan, with its alternatives."""
        if not self.fitting:
            raise ValueError(self._explain_no_fit())
        measured = self.profile.unit == "seconds"
        trials = [trial for _, trial in self.fitting]
        for trial in trials:
            trial.improve()
        plans = [_plan(trial, self.global_batch, measured=measured) for trial in trials]
        plans = self._with_tables(trials, plans) if searches_tables else plans
        plans.sort(key=attrgetter("seconds"))
        alike = plans[0].seconds * (ALIKE_FACTOR if measured and not searches_tables else ROUNDING_FACTOR)
        simplest = min((plan for plan in plans if plan.seconds <= alike), key=lambda plan: plan.shape.stages)
        plans.remove(simplest)
        return replace(simplest, alternatives=tuple(plans), rejected=tuple(self.rejected))

    def _with_tables(self, trials: Sequence[Trial], plans: Sequence[Plan]) -> list[Plan]:
        """Adds a plan to the plans: the best new schedule for the K and M of the fastest plan.

        All plans with this K and M get a lower bound on the seconds of all schedules for their stages.
        """
        fastest = min(plans, key=attrgetter("seconds")).shape
        used, m = slice(fastest.partitions), fastest.micro_batches
        search = TableSearch(self.size(m), self.devices[used], self.speeds[used], m)
        measured = self.profile.unit == "seconds"

        def bounded(plan: Plan) -> Plan:
            if (plan.partitions, plan.micro_batches) != (fastest.partitions, m):
                return plan
            return replace(plan, least_seconds=search.least_seconds(plan.rank_of, plan.layers_per_partition))

        tables = search.trials(trials) if fastest.partitions > 1 and fastest.actions <= LARGE else ()
        by_table = [_plan(trial, self.global_batch, measured=measured) for trial in tables if trial.best is not None]
        by_table.sort(key=attrgetter("seconds"))
        return [*map(bounded, (*plans, *by_table[:1]))]

    def with_host_weights(self, choices: Choices) -> Plan | None:
        """Returns the fastest plan with weights on the host. None if no such plan fits."""
        if not all(device.host for device in self.devices):
            if choices.weights == "host":
                raise ValueError(NO_HOST_SPEED)
            return None
        search = HostWeightsSearch(self.profile, self.devices, self.global_batch, choices)
        plans = search.best(self.wanted)
        self.rejected += search.rejected
        self.misfits += search.misfits
        return replace(plans[0], alternatives=tuple(plans[1:]), rejected=tuple(self.rejected)) if plans else None

    def _explain_no_fit(self) -> str:
        if self.misfits:
            misfit, shape = min(self.misfits, key=lambda each: each[0].distance)
            hosts = (
                "" if all(device.host for device in self.devices) else ", Device(host=...) for weights on the host"
            )
            remedy = "a larger host_memory=" if HOST in str(misfit) else f"more micro-batches{hosts}"
            return (
                f"No plan fits in memory. The closest is {shape}, in which {misfit}. Use more or larger devices, "
                f"{remedy}, or smaller layers. [nothing-fits]"
            )
        reasons = "; ".join(map(str, {each.reason: each for each in self.rejected}.values()))
        return (
            f"No plan fits ({reasons}). Use fewer partitions, or a different schedule or number of "
            "micro-batches. [nothing-fits]"
        )


def _plan(trial: Trial, global_batch: int, *, measured: bool) -> Plan:
    shape, solution, fitting = trial.shape, trial.best, trial.fitting
    assert solution is not None
    busy = fitting.busy(solution.costs, solution.kept)
    plan = Plan(
        micro_batches=shape.micro_batches,
        layers_per_partition=solution.layers,
        schedule=shape.schedule,
        rank_of=tuple(trial.program.rank_of),
        remat=fitting.remat(solution.kept),
        seconds=solution.seconds,
        peak_bytes=fitting.peaks(solution.costs, solution.kept),
        bubble=1 - busy / (shape.partitions * solution.seconds) if solution.seconds else 0.0,
        global_batch=global_batch,
        devices=tuple(trial.devices),
        costs=solution.costs,
        names=tuple(layer.name for layer in trial.sized.layers),
        work=tuple(work / trial.speeds[0] for work in trial.sized.work),
        costs_by="time" if measured else "operations",
        table=trial.program if shape.schedule == AUTO and isinstance(trial.program, Program) else None,
    )
    if not isinstance(trial.program, Program):
        return plan
    remat = choose_offload(trial.program, plan.costs, [device.memory for device in trial.devices], plan.remat)
    return plan if remat == plan.remat else replace(plan, remat=remat).timed()
