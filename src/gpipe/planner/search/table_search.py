"""Searches cuts, placement and table together: of the tables that knobs list, changed by chance where they are best.

The chance is seeded and the tries are counted, not timed: the same costs give the same table everywhere. What is
listed is an estimate, in which a stage recomputes all or nothing and messages never wait for each other; the best are
judged as all other plans are, by `Trial`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from operator import attrgetter
from random import Random
from typing import TypeVar

from gpipe.planner.search.candidates import AUTO, Shape
from gpipe.planner.search.device import Device
from gpipe.planner.search.listing import Knobs, Task, list_seconds, list_table
from gpipe.planner.search.profile import SizedProfile
from gpipe.planner.search.trial import StageSizes, Trial, message_costs, most_even  # message_costs
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.cost import StageCost, seconds
from gpipe.schedule.schedules.writing import Placement, line, loops, vee

T = TypeVar("T")
MOST_LISTED = 600_000  # actions, in all tables of one number of ranks and micro-batches
LISTED_PER_RANK = 4  # micro-batches for each rank in the tables that are tried: those of more repeat what these do
KEPT, JUDGED = 12, 4  # of the tables that are listed, how many are changed further, and how many are judged
GAPS, OWED = (0.01, 0.3, 0.5, 0.7, 0.9, 1.0), (0, 1, 2, 3, 4, 6, 8, inf)


@dataclass(frozen=True)
class Candidate:
    """A table by all that it is listed from, and about how long it takes."""

    placement: Placement
    cuts: StageSizes
    split: bool  # backwards in two halves
    again: bool  # all is recomputed
    knobs: Knobs
    seconds: float = inf


class TableSearch:
    """The tables of so many micro-batches on devices, and the stages of which they are listed."""

    def __init__(
        self, sized: SizedProfile, devices: Sequence[Device], speeds: Sequence[float], micro_batches: int
    ) -> None:
        self.sized, self.devices, self.speeds, self.micro_batches = sized, devices, speeds, micro_batches
        self.ranks = len(devices)
        self.tried_micro_batches = min(micro_batches, LISTED_PER_RANK * self.ranks)
        self.costs = cache(partial(message_costs, sized, devices, speeds))
        self._task_of = cache(self._make_task)
        self.best: list[Candidate] = []

    def trials(self, found: Sequence[Trial]) -> Iterator[Trial]:
        """The best tables that fit, each on its own cuts; `found` are trials of pages, from whose cuts it starts."""
        rng, listed = Random(0), 0
        starts = iter(list(self._starts(found)))
        while listed < MOST_LISTED:
            candidate = next(starts, None) or (self._changed(rng) if self.best else None)
            if candidate is None:
                return
            listed += 2 * self.tried_micro_batches * len(candidate.placement)
            self._list(candidate)
        for candidate in self.best[:JUDGED]:
            listing = list_table(self._task(candidate, self.micro_batches), candidate.knobs)
            if listing is not None:
                shape = Shape(self.ranks, self.micro_batches, AUTO, len(candidate.placement) // self.ranks)
                trial = Trial(shape, listing[1], self.sized, self.devices, self.speeds)
                trial.attempt(candidate.cuts)
                yield trial

    def least_seconds(self, placement: Placement, cuts: StageSizes) -> float:
        """A time that no table of these stages goes below, split or not and whatever it recomputes."""
        task = self._task_of(placement, cuts, split=True, again=False, micro_batches=self.micro_batches)
        costs = self.costs(cuts, placement)
        path = tuple(min(half, cost.backward) for half, cost in zip(task.backward, costs, strict=True))
        rest = zip(task.backward, task.weights, path, costs, strict=True)
        weights = tuple(max(0.0, min(half + late, cost.backward) - least) for half, late, least, cost in rest)
        held = tuple(float(cost.boundary) for cost in costs)
        return replace(task, backward=path, weights=weights, held=held).least_seconds()

    def _list(self, candidate: Candidate) -> None:
        enough = self.best[-1].seconds if len(self.best) == KEPT else inf
        took = list_seconds(self._task(candidate, self.tried_micro_batches), candidate.knobs, enough)
        if took < inf and candidate not in (replace(each, seconds=inf) for each in self.best):
            self.best.append(replace(candidate, seconds=took))
            self.best.sort(key=attrgetter("seconds"))
            del self.best[KEPT:]

    def _starts(self, found: Sequence[Trial]) -> Iterator[Candidate]:
        """Every placement with even cuts and those of the pages, a few knobs each."""
        cuts: dict[tuple[Placement, StageSizes], None] = {}
        for trial in found:
            shape = trial.shape.partitions, trial.shape.micro_batches
            if trial.best is not None and shape == (self.ranks, self.micro_batches):
                cuts[trial.program.rank_of, trial.best.layers] = None
        for placement in self._placements():
            stage_speeds = tuple(self.speeds[rank] for rank in placement)
            cuts[placement, most_even(tuple(self.sized.work), stage_speeds)] = None
        limited = any(device.memory < inf for device in self.devices)
        for slack, bold, split, again in (
            (slack, bold, split, again)
            for slack in (0, 1, 2, self.tried_micro_batches)
            for bold in (False, True)
            for split in (True, False)
            for again in ((False, True) if limited else (False,))
        ):
            for placement, layers in cuts:
                yield Candidate(placement, layers, split, again, self._knobs(placement, slack, bold=bold))

    def _placements(self) -> Iterator[Placement]:
        makers: Sequence[Callable[[int, int], Placement | None]] = (line, vee, loops)
        for make in makers:
            for each in (1, 2, 3):
                placement = make(self.ranks, each)
                if placement and len(placement) <= len(self.sized.layers):
                    yield placement
                    if len({*self.devices}) > 1:  # the other way round it is another
                        yield tuple(self.ranks - 1 - rank for rank in placement)

    def _knobs(self, placement: Placement, slack: int, *, bold: bool) -> Knobs:
        stages, ranks = len(placement), self.ranks
        first = [ranks - stage if stages == ranks else 2 * ranks for stage in range(stages)]
        ahead = tuple(min(self.tried_micro_batches, max(1, count) + slack) for count in first)
        return Knobs(ahead, (False,) * ranks, (inf,) * ranks, bold=bold)

    def _changed(self, rng: Random) -> Candidate:
        """One of the best, the first as a rule, with one to three changes."""
        candidate = self.best[0] if rng.random() < 0.5 else rng.choice(self.best)
        for _ in range(rng.choice((1, 1, 2, 3))):
            candidate = self._change(candidate, rng)
        return replace(candidate, seconds=inf)

    def _change(self, candidate: Candidate, rng: Random) -> Candidate:
        knobs, stages = candidate.knobs, len(candidate.placement)
        chance = rng.random()
        if chance < 0.25 and stages > 1:
            at, by = rng.randrange(stages - 1), rng.choice((-1, 1))
            cuts = _put(_put(candidate.cuts, at, lambda n: n + by), at + 1, lambda n: n - by)
            return replace(candidate, cuts=cuts) if min(cuts) else candidate
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

    def _task(self, candidate: Candidate, micro_batches: int) -> Task:
        return self._task_of(candidate.placement, candidate.cuts, candidate.split, candidate.again, micro_batches)

    def _make_task(
        self, placement: Placement, cuts: StageSizes, split: bool, again: bool, micro_batches: int
    ) -> Task:
        costs: Sequence[StageCost] = self.costs(cuts, placement)

        def of(kind: Kind) -> tuple[float, ...]:
            return tuple(seconds(Action(kind, stage), costs) for stage in range(len(costs)))

        weights = of(Kind.BACKWARD_WEIGHT) if split else (0.0,) * len(costs)
        back = of(Kind.BACKWARD_INPUT if split else Kind.BACKWARD)
        back = tuple(map(sum, zip(back, of(Kind.RECOMPUTE), strict=True))) if again else back
        at_once = [cost.working + (cost.activations if again else 0) for cost in costs]
        room = []
        for rank, device in enumerate(self.devices):
            own = [stage for stage, holder in enumerate(placement) if holder == rank]
            used = sum(costs[stage].state for stage in own) + max(at_once[stage] for stage in own)
            room.append(device.memory - used)
        return Task(
            rank_of=placement,
            micro_batches=micro_batches,
            forward=of(Kind.FORWARD),
            backward=back,
            weights=weights,
            sent=tuple(cost.send for cost in costs),
            sent_back=tuple(cost.send_gradient or 0.0 for cost in costs),
            held=tuple(float(cost.boundary + (0 if again else cost.activations)) for cost in costs),
            room=tuple(room),
        )


def _put(values: tuple[T, ...], at: int, change: Callable[[T], T]) -> tuple[T, ...]:
    return (*values[:at], change(values[at]), *values[at + 1 :])
