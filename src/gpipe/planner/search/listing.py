"""Lists tables by a few knobs, for stages of any costs within what ranks may hold; and a time none goes below.

A rank does next what it can begin first. Its stages take the micro-batches in their order; of what can begin at once,
knobs say which goes first, how many micro-batches a stage may be ahead, and how large a gap is filled by a weight
backward. A forward leaves room for the later stages of its rank, as a banker does: else forwards of the first could
take all of it, and no backward would ever come.
"""

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from math import inf

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.lower import join_backwards
from gpipe.schedule.program import Program
from gpipe.schedule.schedules.writing import Placement

ROUNDING_FACTOR = 1 + 1e-9  # sums of the same seconds or bytes in another order


@dataclass(frozen=True)
class Task:
    """What is to be listed: what a micro-batch takes and leaves at each stage, and the room of each rank.

    `weights` are the seconds of the backward's half for the weights, 0 where it is not split; `backward` those of the
    rest. `sent` passes until what a stage gives is at the next, `sent_back` until its gradient is at the one before;
    both are 0 within a rank.
    """

    rank_of: Placement
    micro_batches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    sent: tuple[float, ...]
    sent_back: tuple[float, ...]
    held: tuple[float, ...]
    room: tuple[float, ...]

    @cached_property
    def stages_of(self) -> list[list[int]]:
        stages = range(len(self.rank_of))
        return [[s for s in stages if self.rank_of[s] == rank] for rank in range(max(self.rank_of) + 1)]

    @cached_property
    def _turn(self) -> list[float]:
        """From the end of each stage's forward to the begin of its backward, at least."""
        last = len(self.rank_of) - 1
        steps = [
            self.forward[s + 1] + self.backward[s + 1] + self.sent[s] + self.sent_back[s + 1] for s in range(last)
        ]
        return [*reversed(list(accumulate(reversed(steps), initial=0.0)))]

    def least_seconds(self) -> float:
        """A time that no table goes below.

        It is the longest of one micro-batch's path, each rank's work behind what must come before it and ahead of
        what must come after, and what micro-batches hold for how long, over what there is room for.
        """
        ahead = list(accumulate(map(sum, zip(self.forward, self.sent, strict=True)), initial=0.0))
        back = list(accumulate(map(sum, zip(self.backward[:-1], self.sent_back[1:], strict=True)), initial=0.0))
        found = ahead[-1] - self.sent[-1] + self.backward[-1] + back[-1] + min(self.weights)
        for stages, room in zip(self.stages_of, self.room, strict=True):
            found = max(found, _one_machine(self._jobs(stages, ahead, back)))
            if 0 < room < inf:
                took = {s: self.forward[s] + self._turn[s] + self.backward[s] + self.weights[s] for s in stages}
                found = max(found, self.micro_batches * sum(self.held[s] * took[s] for s in stages) / room)
        return found

    def _jobs(self, stages: list[int], ahead: list[float], back: list[float]) -> list[tuple[float, float, float]]:
        """From when actions of a rank may be done, how much comes behind each, and how long all alike take."""
        jobs = []
        for s in stages:
            turned = ahead[s] + self.forward[s] + self._turn[s]
            jobs.append((ahead[s], self._turn[s] + self.backward[s] + back[s], self.forward[s]))
            jobs.append((turned, back[s], self.backward[s]))
            jobs.append((turned + self.backward[s], 0.0, self.weights[s]))
        return [(head, tail, self.micro_batches * took) for head, tail, took in jobs if took]


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """When the last job is done, and what comes behind it, on a machine that may interrupt them (Jackson's rule)."""
    now = most = 0.0
    waiting: list[tuple[float, float]] = []  # what comes behind, and what is left
    coming = sorted(jobs, reverse=True)
    while coming or waiting:
        now = now if waiting else max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, behind, took = coming.pop()
            heappush(waiting, (-behind, took))
        behind, left = heappop(waiting)
        until = coming[-1][0] if coming else inf
        if now + left <= until:
            now += left
            most = max(most, now - behind)
        else:
            heappush(waiting, (behind, left - (until - now)))
            now = until
    return most


@dataclass(frozen=True)
class Knobs:
    """How a table is listed.

    Attributes:
        ahead: Of each stage, how many micro-batches may have their forward and not yet their backward.
        forward_first: Of each rank, whether a forward goes before a backward that could begin as soon.
        least_gap: The part of a weight backward that a gap must have to be filled by it.
        most_owed: Of each rank, the weight backwards that may wait, however small gaps are.
        later_first: Whether forwards of later stages go first.
        bold: Whether no room is left for a later stage that has a micro-batch under way already.
    """

    ahead: tuple[int, ...]
    forward_first: tuple[bool, ...]
    most_owed: tuple[float, ...]
    least_gap: float = 1.0
    later_first: bool = True
    bold: bool = False


def list_table(task: Task, knobs: Knobs) -> tuple[float, Program] | None:
    """The table that knobs give, as it is run, and how long it takes; None if it gets stuck."""
    listing = _Listing(task, knobs)
    if not listing.run(inf):
        return None
    rows = ((Action(*one) for one in row) for row in listing.rows)
    return max(listing.free), join_backwards(Program.of(rows, task.micro_batches, rank_of=task.rank_of))


def list_seconds(task: Task, knobs: Knobs, enough: float) -> float:
    """How long the table that knobs give takes; infinity if it gets stuck or takes longer than is `enough`."""
    listing = _Listing(task, knobs)
    return max(listing.free) if listing.run(enough) else inf


class _Listing:
    """A table so far: how far each stage is, when what it needs is there, and what its rank holds."""

    def __init__(self, task: Task, knobs: Knobs) -> None:
        self.task, self.knobs = task, knobs
        stages, ranks = range(len(task.rank_of)), range(len(task.stages_of))
        self.stages_of, self.room = task.stages_of, [room * ROUNDING_FACTOR for room in task.room]
        self.forwards = [0 for _ in stages]
        self.backwards = [0 for _ in stages]
        self.arrived: list[list[float]] = [[0.0] * task.micro_batches if s == 0 else [] for s in stages]
        self.returned: list[list[float]] = [[] for _ in stages]
        self.free = [0.0 for _ in ranks]
        each = map(sum, zip(task.forward, task.backward, task.weights, strict=True))
        took = [task.micro_batches * one for one in each]
        self.due = [sum(took[s] for s in own) for own in task.stages_of]  # the work that is left
        self.held = [0.0 for _ in ranks]
        self.owed: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self.rows: list[list[tuple[Kind, int, int]]] = [[] for _ in ranks]
        self.behind = [sum(task.held[t] for t in task.stages_of[task.rank_of[s]] if t > s) for s in stages]

    def run(self, enough: float) -> bool:
        """Lists all actions, the earliest first; whether it could, in so many seconds."""
        task, enough = self.task, enough * ROUNDING_FACTOR
        left = task.micro_batches * sum(2 + (weights > 0) for weights in task.weights)
        next_of = [self._next(rank) for rank in range(len(self.free))]
        starts = [start for start, *_ in next_of]
        while left:
            start = min(starts)
            rank = starts.index(start)
            if start == inf:
                return False
            changed = self._do(rank, *next_of[rank])
            if self.free[rank] + self.due[rank] > enough:
                return False
            left -= 1
            for other in {rank, changed}:
                next_of[other] = self._next(other)
                starts[other] = next_of[other][0]
        return True

    def _next(self, rank: int) -> tuple[float, Kind, int]:
        """What a rank does next, and when; at infinity if it has to wait for what nobody has begun."""
        knobs, now, owed = self.knobs, self.free[rank], self.owed[rank]
        forward_last = not knobs.forward_first[rank]
        best = inf, False, 0, Kind.FORWARD, 0
        for s in self.stages_of[rank]:
            ahead, done = self.forwards[s], self.backwards[s]
            arrived, returned = self.arrived[s], self.returned[s]
            if ahead < len(arrived) and ahead - done < knobs.ahead[s] and self._has_room(rank, s):
                at = arrived[ahead]
                one = at if at > now else now, forward_last, -s if knobs.later_first else s, Kind.FORWARD, s
                best = one if one < best else best
            if done < len(returned):
                at = returned[done]
                one = at if at > now else now, not forward_last, s, Kind.BACKWARD, s
                best = one if one < best else best
        start, _, _, kind, stage = best
        if owed:
            first = owed[0][0]
            fits = start - now >= self.task.weights[first] * knobs.least_gap * (1 - 1e-9)
            if fits or len(owed) > knobs.most_owed[rank]:
                return now, Kind.BACKWARD_WEIGHT, first
        return start, kind, stage

    def _has_room(self, rank: int, stage: int) -> bool:
        later = (t for t in self.stages_of[rank] if t > stage)
        bold = self.knobs.bold and any(self.forwards[t] > self.backwards[t] for t in later)
        behind = 0.0 if bold else self.behind[stage]
        return self.held[rank] + self.task.held[stage] + behind <= self.room[rank]

    def _do(self, rank: int, start: float, kind: Kind, stage: int) -> int:
        """Lists an action, and gives the rank that may go on by it."""
        task, last = self.task, len(self.task.rank_of) - 1
        other = stage
        if kind is Kind.BACKWARD_WEIGHT:
            stage, micro_batch = self.owed[rank].pop(0)
            end = start + task.weights[stage]
            self.held[rank] -= task.held[stage]
        elif kind is Kind.FORWARD:
            micro_batch = self.forwards[stage]
            end = start + task.forward[stage]
            self.forwards[stage] += 1
            self.held[rank] += task.held[stage]
            if stage == last:
                self.returned[stage].append(end)
            else:
                other = stage + 1
                self.arrived[other].append(end + task.sent[stage])
        else:
            micro_batch = self.backwards[stage]
            end = start + task.backward[stage]
            self.backwards[stage] += 1
            if task.weights[stage]:
                kind = Kind.BACKWARD_INPUT
                self.owed[rank].append((stage, micro_batch))
            else:
                self.held[rank] -= task.held[stage]
            if stage:
                other = stage - 1
                self.returned[other].append(end + task.sent_back[stage])
        self.rows[rank].append((kind, stage, micro_batch))
        self.free[rank] = end
        self.due[rank] -= end - start
        return task.rank_of[other]
