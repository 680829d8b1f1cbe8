"""Builds schedules by list scheduling, for stages with any costs and ranks with limited memory.

Each rank always executes the action that can start first. Each stage runs the micro-batches in order. `Knobs`
determine

- which action goes first, if several can start at the same time,
- how many micro-batches a stage may be ahead,
- how long an idle gap must be to be filled by a weight-gradient pass.

A forward starts only if enough memory remains for the later stages of its rank (banker's algorithm). Otherwise
forwards of the first stage could use all memory, and the schedule would deadlock.
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

ROUNDING_FACTOR = 1 + 1e-9  # tolerance for sums in a different order


@dataclass(frozen=True)
class Task:
    """The costs of one micro-batch at each stage, and the memory of each rank.

    Attributes:
        rank_of: The rank of each stage.
        micro_batches: The number of micro-batches.
        forward: Seconds of the forward of each stage.
        backward: Seconds of the whole backward. If the backward is split, seconds of the input-gradient pass.
        weights: Seconds of the weight-gradient pass; 0 if the backward is not split.
        sent: Seconds until the output of each stage arrives at the next stage; 0 within a rank.
        sent_back: Seconds until the gradient of each stage arrives at the preceding stage; 0 within a rank.
        held: Bytes that a micro-batch needs at each stage, from its forward to the end of its backward.
        room: Bytes that each rank has for micro-batches.
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
        """For each stage, the minimum seconds between the end of a forward and the beginning of its backward."""
        last = len(self.rank_of) - 1
        steps = [
            self.forward[s + 1] + self.backward[s + 1] + self.sent[s] + self.sent_back[s + 1] for s in range(last)
        ]
        return [*reversed(list(accumulate(reversed(steps), initial=0.0)))]

    def least_seconds(self) -> float:
        """Returns a lower bound on the seconds of all possible schedules.

        The bound is the maximum of

        - the path of one micro-batch through all stages,
        - the work of each rank, plus the times that must pass before and after this work,
        - for each rank, the memory of all micro-batches times their duration, divided by its memory.
        """
        ahead = list(accumulate(map(sum, zip(self.forward, self.sent, strict=True)), initial=0.0))
        back = list(accumulate(map(sum, zip(self.backward[:-1], self.sent_back[1:], strict=True)), initial=0.0))
        least = ahead[-1] - self.sent[-1] + self.backward[-1] + back[-1] + min(self.weights)
        for stages, room in zip(self.stages_of, self.room, strict=True):
            least = max(least, _one_machine(self._jobs(stages, ahead, back)))
            if 0 < room < inf:
                spans = {s: self.forward[s] + self._turn[s] + self.backward[s] + self.weights[s] for s in stages}
                least = max(least, self.micro_batches * sum(self.held[s] * spans[s] for s in stages) / room)
        return least

    def _jobs(self, stages: list[int], ahead: list[float], back: list[float]) -> list[tuple[float, float, float]]:
        """Returns the earliest start of each job of a rank, the time that must follow the job, and its duration."""
        jobs = []
        for s in stages:
            turned = ahead[s] + self.forward[s] + self._turn[s]
            jobs.append((ahead[s], self._turn[s] + self.backward[s] + back[s], self.forward[s]))
            jobs.append((turned, back[s], self.backward[s]))
            jobs.append((turned + self.backward[s], 0.0, self.weights[s]))
        return [(head, tail, self.micro_batches * duration) for head, tail, duration in jobs if duration]


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Returns the minimum time until all jobs have run on one machine and the times that follow the jobs have passed.

    Jackson's rule with preemption is optimal: run the job with the longest following time.
    """
    now = most = 0.0
    waiting: list[tuple[float, float]] = []  # minus the following time, and the remaining duration
    coming = sorted(jobs, reverse=True)
    while coming or waiting:
        now = now if waiting else max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, tail, duration = coming.pop()
            heappush(waiting, (-tail, duration))
        tail, left = heappop(waiting)
        until = coming[-1][0] if coming else inf
        if now + left <= until:
            now += left
            most = max(most, now - tail)
        else:
            heappush(waiting, (tail, left - (until - now)))
            now = until
    return most


@dataclass(frozen=True)
class Knobs:
    """The parameters of list scheduling.

    Attributes:
        ahead: For each stage, the maximum number of micro-batches between forward and backward.
        forward_first: For each rank, whether a forward precedes a backward that can start at the same time.
        most_owed: For each rank, the maximum number of pending weight-gradient passes.
        least_gap: A weight-gradient pass fills an idle gap of at least this share of its duration. Default: 1.
        later_first: Whether forwards of later stages precede forwards of earlier stages. Default: True.
        bold: Whether a forward may use all memory of its rank if a later stage already has a micro-batch in flight.
            Default: False.
    """

    ahead: tuple[int, ...]
    forward_first: tuple[bool, ...]
    most_owed: tuple[float, ...]
    least_gap: float = 1.0
    later_first: bool = True
    bold: bool = False


def list_table(task: Task, knobs: Knobs) -> tuple[float, Program] | None:
    """Returns the seconds of the schedule that these knobs produce, and its program.

    None if list scheduling deadlocks.
    """
    listing = _Listing(task, knobs)
    if not listing.run(inf):
        return None
    rows = ((Action(*action) for action in row) for row in listing.rows)
    return max(listing.free), join_backwards(Program.of(rows, task.micro_batches, rank_of=task.rank_of))


def list_seconds(task: Task, knobs: Knobs, enough: float) -> float:
    """Returns the seconds of the schedule that these knobs produce; infinity if it deadlocks or exceeds `enough`."""
    listing = _Listing(task, knobs)
    return max(listing.free) if listing.run(enough) else inf


class _Listing:
    """The state of list scheduling: the progress of each stage, its available inputs, and the memory of each rank."""

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
        work = [task.micro_batches * seconds for seconds in each]
        self.due = [sum(work[s] for s in of_rank) for of_rank in task.stages_of]  # the remaining work of each rank
        self.held = [0.0 for _ in ranks]
        self.owed: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self.rows: list[list[tuple[Kind, int, int]]] = [[] for _ in ranks]
        # The memory of one micro-batch at the later stages of the same rank.
        self.reserved = [sum(task.held[t] for t in task.stages_of[task.rank_of[s]] if t > s) for s in stages]

    def run(self, enough: float) -> bool:
        """Lists all actions, the earliest first.

        Returns whether the schedule is complete and takes at most `enough` seconds.
        """
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
        """Returns the start, kind and stage of the next action of a rank.

        The start is infinity if no action is possible.
        """
        knobs, now, owed = self.knobs, self.free[rank], self.owed[rank]
        forward_last = not knobs.forward_first[rank]
        best = inf, False, 0, Kind.FORWARD, 0
        for s in self.stages_of[rank]:
            ahead, done = self.forwards[s], self.backwards[s]
            arrived, returned = self.arrived[s], self.returned[s]
            if ahead < len(arrived) and ahead - done < knobs.ahead[s] and self._has_room(rank, s):
                ready = arrived[ahead]
                forward = ready if ready > now else now, forward_last, -s if knobs.later_first else s, Kind.FORWARD, s
                best = forward if forward < best else best
            if done < len(returned):
                ready = returned[done]
                backward = ready if ready > now else now, not forward_last, s, Kind.BACKWARD, s
                best = backward if backward < best else best
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
        reserved = 0.0 if bold else self.reserved[stage]
        return self.held[rank] + self.task.held[stage] + reserved <= self.room[rank]

    def _do(self, rank: int, start: float, kind: Kind, stage: int) -> int:
        """Lists an action. Returns the rank that receives its output: the next action of that rank may change."""
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
