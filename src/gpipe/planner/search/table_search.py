"""Searches for split points, placement and schedule together, by random changes of the best list schedules.

The search is deterministic: its random numbers are seeded, and attempts are counted, not timed. List scheduling is an
estimate: each stage recomputes all micro-batches or none, and messages do not wait for each other. A `Trial` then
evaluates the best schedules, in the same way as all other plans.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import inf
from operator import attrgetter
from random import Random
from typing import TypeVar

from gpipe.planner.search.candidates import AUTO, Shape
from gpipe.planner.search.device import Device
from gpipe.planner.search.listing import Knobs, Task, list_seconds, list_table
from gpipe.planner.search.profile import SizedProfile
from gpipe.planner.search.trial import StageSizes, Trial, message_costs, most_even
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.cost import StageCost, seconds
from gpipe.schedule.schedules.writing import Placement, line, loops, vee

T = TypeVar("T")
MAX_LISTED = 600_000  # actions in all tables that are listed
LISTED_PER_RANK = 4  # micro-batches per rank in these tables; larger tables repeat the same pattern
KEPT, EVALUATED = 12, 4  # the number of best tables that are changed further, and that a `Trial` evaluates
GAPS, OWED = (0.01, 0.3, 0.5, 0.7, 0.9, 1.0), (0, 1, 2, 3, 4, 6, 8, inf)


@dataclass(frozen=True)
class TableCandidate:
    """The inputs of list scheduling, and the estimated seconds of the resulting schedule."""

    placement: Placement
    sizes: StageSizes
    split: bool  # whether backwards are split
    remat: bool  # whether everything is recomputed
    knobs: Knobs
    seconds: float = inf


class TableSearch:
    """A search for the best schedules, for a given number of micro-batches and given devices."""

    def __init__(
        self, sized: SizedProfile, devices: Sequence[Device], speeds: Sequence[float], micro_batches: int
    ) -> None:
        self.sized, self.devices, self.speeds, self.micro_batches = sized, devices, speeds, micro_batches
        self.ranks = len(devices)
        self.tried_micro_batches = min(micro_batches, LISTED_PER_RANK * self.ranks)
        self.costs = cache(partial(message_costs, sized, devices, speeds))
        self._task_of = cache(self._make_task)
        self.best: list[TableCandidate] = []

    def trials(self, named: Sequence[Trial]) -> Iterator[Trial]:
        """Yields trials of the best schedules.

        Starts from the partitions of `named`, the trials of named schedules.
        """
        rng, listed = Random(0), 0
        starts = iter(list(self._starts(named)))
        while listed < MAX_LISTED:
            candidate = next(starts, None) or (self._changed(rng) if self.best else None)
            if candidate is None:
                return
            listed += 2 * self.tried_micro_batches * len(candidate.placement)
            self._list(candidate)
        for candidate in self.best[:EVALUATED]:
            listing = list_table(self._task(candidate, self.micro_batches), candidate.knobs)
            if listing is not None:
                shape = Shape(self.ranks, self.micro_batches, AUTO, len(candidate.placement) // self.ranks)
                trial = Trial(shape, listing[1], self.sized, self.devices, self.speeds)
                trial.attempt(candidate.sizes)
                yield trial

    def least_seconds(self, placement: Placement, sizes: StageSizes) -> float:
        """Returns a lower bound on the seconds of all schedules for these stages, with any recomputation."""
        task = self._task_of(placement, sizes, split=True, remat=False, micro_batches=self.micro_batches)
        costs = self.costs(sizes, placement)
        path = tuple(min(half, cost.backward) for half, cost in zip(task.backward, costs, strict=True))
        parts = zip(task.backward, task.weights, path, costs, strict=True)
        weights = tuple(max(0.0, min(i + w, cost.backward) - least) for i, w, least, cost in parts)
        held = tuple(float(cost.boundary) for cost in costs)
        return replace(task, backward=path, weights=weights, held=held).least_seconds()

    def _list(self, candidate: TableCandidate) -> None:
        enough = self.best[-1].seconds if len(self.best) == KEPT else inf
        seconds_ = list_seconds(self._task(candidate, self.tried_micro_batches), candidate.knobs, enough)
        if seconds_ < inf and candidate not in (replace(each, seconds=inf) for each in self.best):
            self.best.append(replace(candidate, seconds=seconds_))
            self.best.sort(key=attrgetter("seconds"))
            del self.best[KEPT:]

    def _starts(self, named: Sequence[Trial]) -> Iterator[TableCandidate]:
        """Yields each placement with its most even partition, and the partitions of `named`, with some knobs each."""
        partitions: dict[tuple[Placement, StageSizes], None] = {}
        for trial in named:
            shape = trial.shape.partitions, trial.shape.micro_batches
            if trial.best is not None and shape == (self.ranks, self.micro_batches):
                partitions[trial.program.rank_of, trial.best.layers] = None
        for placement in self._placements():
            stage_speeds = tuple(self.speeds[rank] for rank in placement)
            partitions[placement, most_even(tuple(self.sized.work), stage_speeds)] = None
        slacks, limited = (0, 1, 2, self.tried_micro_batches), any(device.memory < inf for device in self.devices)
        options = product(slacks, (False, True), (True, False), (False, True) if limited else (False,))
        for (slack, bold, split, remat), (placement, sizes) in product(options, partitions):
            yield TableCandidate(placement, sizes, split, remat, self._knobs(placement, slack, bold=bold))

    def _placements(self) -> Iterator[Placement]:
        makers: Sequence[Callable[[int, int], Placement | None]] = (line, vee, loops)
        for make in makers:
            for stages_per_rank in (1, 2, 3):
                placement = make(self.ranks, stages_per_rank)
                if placement and len(placement) <= len(self.sized.layers):
                    yield placement
                    if len({*self.devices}) > 1:  # With different devices, the direction matters.
                        yield tuple(self.ranks - 1 - rank for rank in placement)

    def _knobs(self, placement: Placement, slack: int, *, bold: bool) -> Knobs:
        stages, ranks = len(placement), self.ranks
        first = [ranks - stage if stages == ranks else 2 * ranks for stage in range(stages)]
        ahead = tuple(min(self.tried_micro_batches, max(1, count) + slack) for count in first)
        return Knobs(ahead, (False,) * ranks, (inf,) * ranks, bold=bold)

    def _changed(self, rng: Random) -> TableCandidate:
        """Chooses one of the best candidates at random, most often the first, and makes one to three changes."""
        candidate = self.best[0] if rng.random() < 0.5 else rng.choice(self.best)
        for _ in range(rng.choice((1, 1, 2, 3))):
            candidate = self._change(candidate, rng)
        return replace(candidate, seconds=inf)

    def _change(self, candidate: TableCandidate, rng: Random) -> TableCandidate:
        knobs, stages = candidate.knobs, len(candidate.placement)
        chance = rng.random()
        if chance < 0.25 and stages > 1:
            index, by = rng.randrange(stages - 1), rng.choice((-1, 1))
            sizes = _put(_put(candidate.sizes, index, lambda n: n + by), index + 1, lambda n: n - by)
            return replace(candidate, sizes=sizes) if min(sizes) else candidate
        if chance < 0.3:
            return replace(candidate, split=not candidate.split)
        if chance < 0.6:
            most, by = self.tried_micro_batches, rng.choice((-2, -1, 1, 2))
            ahead = _put(knobs.ahead, rng.randrange(stages), lambda n: max(1, min(most, n + by)))
            knobs = replace(knobs, ahead=ahead)
        elif chance < 0.72:
            forward_first = _put(knobs.forward_first, rng.randrange(self.ranks), lambda first: not first)
            knobs = replace(knobs, forward_first=forward_first)
        elif chance < 0.82:
            knobs = replace(knobs, least_gap=rng.choice(GAPS))
        elif chance < 0.95:
            owed = rng.choice(OWED)
            knobs = replace(knobs, most_owed=_put(knobs.most_owed, rng.randrange(self.ranks), lambda _: owed))
        elif chance < 0.975:
            knobs = replace(knobs, later_first=not knobs.later_first)
        else:
            knobs = replace(knobs, bold=not knobs.bold)
        return replace(candidate, knobs=knobs)

    def _task(self, candidate: TableCandidate, micro_batches: int) -> Task:
        return self._task_of(candidate.placement, candidate.sizes, candidate.split, candidate.remat, micro_batches)

    def _make_task(
        self, placement: Placement, sizes: StageSizes, split: bool, remat: bool, micro_batches: int
    ) -> Task:
        costs: Sequence[StageCost] = self.costs(sizes, placement)

        def of(kind: Kind) -> tuple[float, ...]:
            return tuple(seconds(Action(kind, stage), costs) for stage in range(len(costs)))

        weights = of(Kind.BACKWARD_WEIGHT) if split else (0.0,) * len(costs)
        back = of(Kind.BACKWARD_INPUT if split else Kind.BACKWARD)
        back = tuple(map(sum, zip(back, of(Kind.RECOMPUTE), strict=True))) if remat else back
        temporary = [cost.working + (cost.activations if remat else 0) for cost in costs]
        room = []
        for rank, device in enumerate(self.devices):
            stages = [stage for stage, holder in enumerate(placement) if holder == rank]
            used = sum(costs[stage].state for stage in stages) + max(temporary[stage] for stage in stages)
            room.append(device.memory - used)
        return Task(
            rank_of=placement,
            micro_batches=micro_batches,
            forward=of(Kind.FORWARD),
            backward=back,
            weights=weights,
            sent=tuple(cost.send for cost in costs),
            sent_back=tuple(cost.send_gradient or 0.0 for cost in costs),
            held=tuple(float(cost.boundary + (0 if remat else cost.activations)) for cost in costs),
            room=tuple(room),
        )


def _put(values: tuple[T, ...], index: int, change: Callable[[T], T]) -> tuple[T, ...]:
    return (*values[:index], change(values[index]), *values[index + 1 :])
