"""Finds the fastest way to train layers on devices within their memory.

Where the cuts of a shape are few, all are tried, unless the least time that the shape can take is more than that of
what was found: then the answer is the best of all that there are. Where they are many, the shapes that are likely to
be fast are tried first, with their most even cuts, until `MOST_ACTIONS` were timed; and neighbours of the best cuts.
Of those that rounding, or a measurement, cannot tell apart, that of fewest stages is taken: each costs a little more
than is known.
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from operator import attrgetter

from gpipe.planner.search.cutting import Cutter, Settled, Trial, even
from gpipe.planner.search.device import Device, bytes_text
from gpipe.planner.search.fitting import Misfit
from gpipe.planner.search.found import Plan, Rejection
from gpipe.planner.search.profile import Profile, SizedProfile
from gpipe.planner.search.shapes import Choices, Shape, least_seconds, likely_seconds

ANYTHING = Choices()
micro_batches = attrgetter("micro_batches")
MOST_ACTIONS = 40_000
"""In all tables that fit and have many cuts."""
ALIKE_FACTOR = 1.05
"""How much longer may take, where seconds are measured, what is taken for as fast."""
ROUNDING_FACTOR = 1 + 1e-9
"""Likewise where they are counted: sums of the same seconds in another order."""


def search(
    profile: Profile,
    devices: Sequence[Device],
    global_batch: int,
    choices: Choices = ANYTHING,
    *,
    alternatives: int = 3,
) -> Plan:
    """Finds the fastest plan that fits; a plan of K ranks takes the first K devices, in their order.

    Args:
        profile: What the layers cost.
        devices: In the order in which they are linked.
        global_batch: The rows of a mini-batch.
        choices: What the plan may be, if not anything.
        alternatives: How many of the next best are to be found too.

    Raises:
        ValueError: An argument cannot be, or nothing fits; says how near the nearest comes.

    >>> from gpipe.planner.search.profile import LayerProfile, Line
    >>> layer = LayerProfile("layer", forward=Line(per_row=1e9), backward=Line(per_row=2e9))
    >>> plan = search(Profile((layer,) * 4), [Device(flops=1e9)] * 2, global_batch=4)
    >>> plan.layers_per_partition, plan.micro_batches, plan.seconds
    ((1, 1, 1, 1), 4, 25.0)
    """
    _check(profile, devices, global_batch, choices)
    found = _Search(profile, devices, global_batch, alternatives + 1)
    shapes = partial(choices.shapes, len(devices), global_batch, len(profile.layers))
    for shape in sorted(filter(found.is_possible, shapes()), key=found.promise):
        found.attempt(shape)
    for _, alike in groupby(sorted(shapes(beyond=True), key=micro_batches), key=micro_batches):
        if not found.fitting:  # smaller micro-batches may
            for shape in sorted(filter(found.is_possible, alike), key=found.promise):
                found.attempt(shape)
    found.improve()
    return found.best()


class _Search:
    """The fastest of the shapes that were tried so far, `wanted` of them, and what is against the others."""

    def __init__(self, profile: Profile, devices: Sequence[Device], global_batch: int, wanted: int) -> None:
        self.profile, self.devices, self.global_batch, self.wanted = profile, devices, global_batch, wanted
        self.speeds = profile.speeds(devices)
        self.size = cache(lambda m: profile.of_micro_batch(global_batch // m))
        self.even = cache(even)
        self.actions = 0  # of all tables that fit and have many cuts
        self.fitting: list[tuple[Settled, Cutter]] = []
        self.rejected: list[Rejection] = []
        self.misfits: list[tuple[Misfit, Shape]] = []

    def likely(self, shape: Shape) -> float:
        """About the time of a shape."""
        return likely_seconds(shape, self.size(shape.micro_batches), self.speeds[: shape.partitions])

    def promise(self, shape: Shape) -> tuple[float, int]:
        """By this shapes are tried in order: the fast first, and of those that are alike the simple."""
        return float(f"{self.likely(shape):.9g}"), shape.stages

    def least(self, shape: Shape) -> float:
        """A time that no cuts of a shape go below."""
        return least_seconds(shape, self.size(shape.micro_batches), self.speeds[: shape.partitions])

    def is_enough(self, seconds: float) -> bool:
        """Whether as many were found as are wanted, none of which takes longer than this."""
        return len(self.fitting) == self.wanted and seconds >= self.fitting[-1][0].seconds

    def is_possible(self, shape: Shape) -> bool:
        """Whether nothing speaks against a shape at once."""
        why = _why_not(shape, self.size(shape.micro_batches), self.devices[: shape.partitions])
        if why:
            self.rejected.append(why)
        return why is None

    def attempt(self, shape: Shape) -> None:
        """Finds the best cuts of a shape, or what is against it."""
        if self.is_enough(least := self.least(shape)):
            self.rejected.append(Rejection(shape, "slower", f"takes {least:.4g} s at least"))
        elif self.actions > MOST_ACTIONS:
            self.rejected.append(
                Rejection(shape, "slower", f"would take about {self.likely(shape):.4g} s, and faster ones were tried")
            )
        else:
            self._try(shape)

    def _try(self, shape: Shape) -> None:
        if (program := shape.program()) is None:
            self.rejected.append(Rejection(shape, "no table of this size"))
        else:
            used = slice(shape.partitions)
            self._cut(Trial(shape, program, self.size(shape.micro_batches), self.devices[used], self.speeds[used]))

    def _cut(self, trial: Trial) -> None:
        cutter = Cutter(trial, self.is_enough, self.even)
        cutter.begin()
        match cutter.best:
            case Settled() as settled:
                self.actions += 0 if cutter.few else len(trial.program.actions)
                self.fitting.append((settled, cutter))
                self.fitting.sort(key=lambda each: each[0].seconds)
                for slower, other in self.fitting[self.wanted :]:
                    self.rejected.append(Rejection(other.trial.shape, "slower", f"takes {slower.seconds:.4g} s"))
                del self.fitting[self.wanted :]
            case Misfit() as misfit:
                self.misfits.append((misfit, trial.shape))
                self.rejected.append(Rejection(trial.shape, "too big", f"at best {misfit}"))
            case None:
                self.rejected.append(Rejection(trial.shape, "slower", "no cuts of it are as fast as the next best"))

    def improve(self) -> None:
        """Looks for better cuts of the shapes that were taken."""
        for at, (_, cutter) in enumerate(self.fitting):
            cutter.climb()
            assert isinstance(cutter.best, Settled)  # as before, or better
            self.fitting[at] = cutter.best, cutter
        self.fitting.sort(key=lambda each: each[0].seconds)

    def best(self) -> Plan:
        """The fastest plan, beside the others.

        Raises:
            ValueError: Nothing fits.
        """
        if not self.fitting:
            raise ValueError(self._why_nothing())
        measured = self.profile.unit == "seconds"
        self._prefer_fewer_stages(ALIKE_FACTOR if measured else ROUNDING_FACTOR)
        first, *others = (
            _plan(settled, cutter.trial, self.global_batch, measured=measured) for settled, cutter in self.fitting
        )
        return first.with_others(others, self.rejected)

    def _prefer_fewer_stages(self, alike: float) -> None:
        """Puts the shape of fewest stages before others that are faster by less than can be told."""
        alike *= self.fitting[0][0].seconds
        simplest = min(
            (each for each in self.fitting if each[0].seconds <= alike), key=lambda each: each[1].trial.shape.stages
        )
        self.fitting.remove(simplest)
        self.fitting.insert(0, simplest)

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
        """Cuts shapes of the most ranks and micro-batches, which cannot fit, for how near they come."""
        too_big = [each.shape for each in self.rejected if each.reason == "too big"]
        quick = [shape for shape in too_big if 2 * shape.stages * shape.micro_batches <= MOST_ACTIONS]
        most = max(((shape.partitions, shape.micro_batches) for shape in quick), default=None)
        for shape in quick:
            if (shape.partitions, shape.micro_batches) == most:
                self._try(shape)


def _check(profile: Profile, devices: Sequence[Device], global_batch: int, choices: Choices) -> None:
    wrong = []
    if not profile.layers:
        wrong.append("there are no layers; give at least one")
    if not devices:
        wrong.append("there are no devices; give at least one")
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        wrong.append(f"global_batch={global_batch!r}; give the rows of a mini-batch, a whole number of at least 1")
    if wrong:
        raise ValueError("\n".join(wrong))
    choices.check(len(devices), global_batch)


def _why_not(shape: Shape, sized: SizedProfile, devices: Sequence[Device]) -> Rejection | None:
    """What can be said against a shape at once."""
    layers, memory = sized.layers, sum(device.memory for device in devices)
    if shape.stages > len(layers):
        return Rejection(shape, "more stages than layers", f"{shape.stages} stages, {len(layers)} layers")
    state = sum(layer.state for layer in layers)
    if state > memory:
        return Rejection(
            shape,
            "too big",
            f"weights, gradients and optimizer are {bytes_text(state)}, devices {bytes_text(memory)}",
        )
    inside = sum(layer.inside.at(sized.rows) for layer in layers) / shape.stages_per_rank
    if state + inside > memory:
        least = f"{bytes_text(state + inside)} with one micro-batch inside one stage of each rank"
        return Rejection(shape, "too big", f"{least}, devices {bytes_text(memory)}")
    return None


def _plan(settled: Settled, trial: Trial, global_batch: int, *, measured: bool) -> Plan:
    shape = trial.shape
    again = trial.fitting.again(settled.levels)
    busy = trial.simulator.busy(settled.costs, again)
    return Plan(
        partitions=shape.partitions,
        micro_batches=shape.micro_batches,
        layers_per_partition=settled.layers,
        schedule=shape.schedule,
        stages_per_rank=shape.stages_per_rank,
        remat=trial.fitting.remat(settled.levels),
        seconds=settled.seconds,
        peak_bytes=trial.fitting.peaks(settled.costs, settled.levels),
        bubble=1 - busy / (shape.partitions * settled.seconds) if settled.seconds else 0.0,
        global_batch=global_batch,
        devices=tuple(trial.devices),
        costs=settled.costs,
        names=tuple(layer.name for layer in trial.sized.layers),
        work=tuple(work / trial.speeds[0] for work in trial.sized.work),
        measured=measured,
    )
