"""Compares schedules in their fixed order with ranks that run whatever is ready: `python -m bench.ready`.

Ranks that follow what is ready keep the laws: each stage runs its forward passes in the order of the micro-batches.
The same holds for its backward passes. A rank keeps at most the micro-batches that it keeps under the schedule. The
times of layers vary by case. A simulation runs both orders on the same times. Sleeping threads check the simulation.
"""

import argparse
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from heapq import heappop, heappush
from statistics import mean
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from bench.machine import facts
from bench.report import describe, table, with_time_left, write
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.lower import join_backwards
from gpipe.schedule.program import Program
from gpipe.schedule.rules import BACKWARDS, linearize, needs
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import program_of

CASES = {
    "a": "the time of each layer varies by micro-batch: log-normal, sigma 0.5",
    "b": "all layers vary alike, as with ragged lengths: one log-normal factor for each micro-batch, sigma 0.5",
    "c": "others use the cores: each rank runs at half speed half of the time, in spells of three forward passes",
    "d": "equal times",
}
SIMULATED = """\
Means over draws. Each rank has two layers, in one or two stages. "best fixed" is the fastest of all schedules in
its fixed order. "best ready" is the fastest schedule whose ranks run what is ready. If several actions are ready,
ranks run the action that the schedule lists first (`listed`), a backward pass (`B first`), or the action with the
longest path to the end (`path`). Speeds are relative to "best fixed". "searched" is the best of 44 to 88 orders for
each draw, with all times known in advance. "bound" is a limit for all orders. "ready 1f1b" is relative to `"1f1b"` in
its fixed order."""
SLEPT = """\
One draw, K=4, M=16, whole backward passes, in units of a forward pass, with the simulated time in parentheses. Each
time is the fastest of three. The last column is a step of gpipe with layers that sleep. Its ranks also pass
tensors."""
SIZES = [(2, 8), (4, 16), (4, 32), (8, 32)]
SEARCHED = 40  # random orders for each draw
TURNS = 3  # of threads that sleep; the fastest counts, because other load can only delay them
UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}  # of a layer's time
SIMULTANEOUS = 1e-9

Order: TypeAlias = Callable[[int, Action], Any] | None
"""The sort key of a ready action and its position in the row, or None for the fixed order of the schedule."""


class Times:
    """The times of 2K layers in one mini-batch. A rank has two layers, in one or two stages."""

    def __init__(self, case: str, ranks: int, micro_batches: int, draw: int) -> None:
        rng = random.Random(f"{case} {ranks} {micro_batches} {draw}")
        self.layers, vary = range(2 * ranks), partial(rng.lognormvariate, -0.125, 0.5)  # the mean is 1
        factors = [vary() if case == "b" else 1.0 for _ in range(micro_batches)]
        self.factor = {
            (layer, m): factors[m] * (vary() if case == "a" else 1.0)
            for layer in self.layers
            for m in range(micro_batches)
        }
        self.slow = [[*_spells(rng, 20 * micro_batches)] if case == "c" else [] for _ in range(ranks)]

    def seconds(self, action: Action, start: float, program: Program) -> float:
        """Returns how long an action takes that starts at this time, if a forward pass of a rank takes 1."""
        per_stage = len(self.layers) // program.stages
        layers = self.layers[action.stage * per_stage : (action.stage + 1) * per_stage]
        work = UNITS[action.kind] / 2 * sum(self.factor[layer, action.micro_batch or 0] for layer in layers)
        now = start
        for begin, end in self.slow[program.rank_of[action.stage]]:
            if end <= now:
                continue
            if now + work <= begin:
                break
            work, now = work - max(0.0, begin - now), max(now, begin)
            if now + 2 * work <= end:
                return now + 2 * work - start
            work, now = work - (end - now) / 2, end
        return now + work - start


def _spells(rng: random.Random, end: float) -> Iterator[tuple[float, float]]:
    now = 0.0
    while now < end:
        begin = now + rng.expovariate(1 / 3)
        now = begin + rng.expovariate(1 / 3)
        yield begin, now


class Table:
    """A program, with the needs of its actions and the number of micro-batches that each rank keeps."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.needs = {action: needs(action, program) for action in program.actions}
        self.stages = [[s for s, rank in enumerate(program.rank_of) if rank == r] for r in range(program.ranks)]
        self.most = [max(_kept(row)) for row in program.table]


def _kept(row: Any) -> Iterator[int]:
    kept = 0
    for action in row:
        kept += change(action)
        yield kept


def change(action: Action) -> int:
    """Returns by how much an action changes the number of micro-batches that its stage keeps."""
    return {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0)


class Progress:
    """What the ranks have done in a mini-batch, and what each rank runs next."""

    def __init__(self, table: Table, order: Order) -> None:
        self.table, self.order = table, order
        self.done = set[Action]()
        self.kept = Counter[int]()  # by stage
        self.queues: list[dict[Any, deque[tuple[int, Action]]]] = [{} for _ in table.stages]
        for row, queues in zip(table.program.table, self.queues, strict=True):
            for entry in enumerate(row):
                key = None if order is None else (entry[1].stage, entry[1].kind)
                queues.setdefault(key, deque()).append(entry)

    def take(self, rank: int) -> Action | None:
        """Removes and returns the next action of a rank. Returns None if nothing is ready."""
        heads = [(queue, *queue[0]) for queue in self.queues[rank].values() if queue]
        ready = [
            head for head in heads if self.done.issuperset(self.table.needs[head[2]]) and self._fits(rank, head[2])
        ]
        if not ready:
            return None
        queue, _, action = min(ready, key=lambda head: self.order(*head[1:]) if self.order else 0)
        queue.popleft()
        self.kept[action.stage] += change(action)
        return action

    def _fits(self, rank: int, action: Action) -> bool:
        """Returns whether a rank may keep one more micro-batch.

        Each later stage of the rank can always run its oldest micro-batch, so that no rank waits forever.
        """
        if self.order is None or action.kind is not Kind.FORWARD:
            return True
        stages = self.table.stages[rank]
        reserved = sum(stage > action.stage and not self.kept[stage] for stage in stages)
        return sum(self.kept[stage] for stage in stages) + reserved < self.table.most[rank]

    def ended(self, rank: int) -> bool:
        return not any(self.queues[rank].values())


def simulate(table: Table, times: Times, order: Order) -> float:
    """Returns the time of a mini-batch."""
    progress, idle, running, now = Progress(table, order), set(range(table.program.ranks)), list[Any](), 0.0
    while True:
        for rank in sorted(idle):
            if (action := progress.take(rank)) is not None:
                idle.discard(rank)
                heappush(running, (now + times.seconds(action, now, table.program), rank, action))
        if not running:
            assert len(progress.done) == len(table.program.actions)
            return now
        now = running[0][0]
        while running and running[0][0] <= now + SIMULTANEOUS:
            _, rank, action = heappop(running)
            progress.done.add(action)
            idle.add(rank)


def sleep(table: Table, times: Times, order: Order, unit: float) -> float:
    """Returns the time of a mini-batch in threads that sleep, one for each rank."""
    progress, changed, start = Progress(table, order), threading.Condition(), time.perf_counter()

    def run(rank: int) -> None:
        while not progress.ended(rank):
            with changed:
                while (action := progress.take(rank)) is None:
                    changed.wait()
            time.sleep(unit * times.seconds(action, (time.perf_counter() - start) / unit, table.program))
            with changed:
                progress.done.add(action)
                changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(table.program.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - start) / unit


def least(table: Table, times: Times) -> float:
    """Returns a lower bound for all orders: the work of a rank, with the earlier stages of micro-batch 0 before it.

    The earlier stages of the last micro-batch follow it, after all backward passes of the rank.
    """
    program, bounds = table.program, [0.0]
    last = program.micro_batches - 1
    for stages, row in zip(table.stages, program.table, strict=True):
        before = [Action(Kind.FORWARD, stage, 0) for stage in range(stages[0])]
        after = [Action(kind, s, last) for s in reversed(range(stages[0])) for kind in BACKWARDS]
        after = [action for action in after if action in program.actions]
        late = [action for action in row if action.kind is Kind.BACKWARD_WEIGHT]
        for path in ([*before, *row], [*before, *(a for a in row if a not in late), *after]):
            now = 0.0
            for action in path:
                now += times.seconds(action, now, program)
            bounds.append(now)
    return max(bounds)


def first_listed(_: Table) -> Order:
    """Runs the ready action that the schedule lists first, and weights last."""
    return lambda position, action: (action.kind is Kind.BACKWARD_WEIGHT, position)


def backwards_first(_: Table) -> Order:
    """Runs backward passes first, then forward passes of later stages, and weights last."""
    ranks = {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: 2}
    return lambda position, action: (ranks.get(action.kind, 0), -action.stage, position)


def critical_path(table: Table) -> Order:
    """Runs the ready action with the longest path to the end of the mini-batch, if all times are equal."""
    left, following = Counter[Action](), dict[tuple[int, Kind], Action]()
    for _, _, action in reversed([*linearize(table.program)]):
        later = following.get((action.stage, action.kind))
        following[action.stage, action.kind] = action
        left[action] = UNITS[action.kind] + max(left[action], left[later] if later else 0)
        for need in table.needs[action]:
            left[need] = max(left[need], left[action])
    return lambda position, action: (-left[action], position)


READY = {"listed": first_listed, "B first": backwards_first, "path": critical_path}


def orders(table: Table) -> dict[str, Order]:
    """Returns the order of the schedule, and each order by readiness."""
    return {"fixed": None, **{label: make(table) for label, make in READY.items()}}


def drawn(draw: int) -> Order:
    """Returns a random order: the positions of the schedule, moved by random amounts."""
    rng = random.Random(draw)
    sigma = rng.choice((1, 3, 8))
    move = cache(lambda position: rng.gauss(position, sigma))
    return lambda position, _: move(position)


def tables(ranks: int, micro_batches: int, split: bool) -> dict[str, Table]:
    """Returns the table of each schedule. Without `split`, no backward pass is split."""
    programs = {name: program_of(name, ranks, micro_batches) for name in SCHEDULES}
    return {name: Table(p if split else join_backwards(p, range(p.stages))) for name, p in programs.items()}


def compare(case: str, ranks: int, micro_batches: int, split: bool, draws: int) -> dict[str, Any]:
    """Compares all schedules in both orders. Returns mean times by (schedule, order), and the best of each order."""
    seconds = dict[tuple[str, str], list[float]]()
    by_name = tables(ranks, micro_batches, split)
    for draw in range(1 if case == "d" else draws):
        times = Times(case, ranks, micro_batches, draw)
        for name, each in by_name.items():
            for label, order in orders(each).items():
                seconds.setdefault((name, label), []).append(simulate(each, times, order))
            seconds.setdefault((name, "bound"), []).append(least(each, times))
    means = {key: mean(value) for key, value in seconds.items()}

    def best(*labels: str) -> tuple[str, str]:
        return min((key for key in means if key[1] in labels), key=means.__getitem__)

    fixed, ready, bound = best("fixed"), best(*READY), best("bound")
    searched, random_orders = list[float](), [*map(drawn, range(SEARCHED))]
    for draw in range(1 if case == "d" else draws):  # with the times known in advance: no runtime can do this
        times = Times(case, ranks, micro_batches, draw)
        tried = [
            (by_name[n], o) for n in {fixed[0], ready[0]} for o in (*orders(by_name[n]).values(), *random_orders)
        ]
        searched.append(min(simulate(each, times, order) for each, order in tried))
    return {
        "case": case, "K": ranks, "M": micro_batches, "split": split,
        "means": {", ".join(key): value for key, value in means.items()},
        "fixed": fixed, "ready": ready, "speed of ready": means[fixed] / means[ready],
        "speed of searched": means[fixed] / mean(searched), "speed of the bound": means[fixed] / means[bound],
        "speed of ready 1f1b": means["1f1b", "fixed"] / min(means["1f1b", label] for label in READY),
    }  # fmt: skip


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, nap: Callable[[int, Kind], None]) -> Tensor:
        ctx.nap, ctx.number = nap, int(x[0, 0])
        nap(ctx.number, Kind.FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.nap(ctx.number, Kind.BACKWARD)
        return gradient.clone(), gradient.new_zeros(1), None


class Sleeper(nn.Module):
    """A layer that sleeps as long as the times say. The first column of its input is the micro-batch."""

    def __init__(self, index: int, times: Times, unit: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.index, self.times, self.unit = index, times, unit

    def forward(self, x: Tensor) -> Tensor:
        """Sleeps and copies."""
        made: Tensor = _Sleep.apply(x, self.weight, self.nap)
        return made

    def nap(self, micro_batch: int, kind: Kind) -> None:
        time.sleep(self.unit * UNITS[kind] / 2 * self.times.factor[self.index, micro_batch])


def step(name: str, times: Times, ranks: int, micro_batches: int, unit: float) -> float:
    """Returns the time of a step of gpipe with layers that sleep."""
    layers = [Sleeper(index, times, unit) for index in times.layers]
    x = torch.arange(float(micro_batches))[:, None]
    with gpipe.GPipe(layers, ranks, micro_batches, schedule=name, remat="never", seed=0) as pipe:
        taken = []
        for _ in range(1 + TURNS):
            start = time.perf_counter()
            pipe.step(x, x, F.mse_loss)
            taken.append((time.perf_counter() - start) / unit)
    return min(taken[1:])  # The first step is verified.


def slept(case: str, ranks: int, micro_batches: int, unit: float) -> list[list[str]]:
    """Runs schedules in both orders with sleeping threads, and steps of gpipe with layers that sleep as long."""
    rows, times = [], Times(case, ranks, micro_batches, 0)
    for name, each in tables(ranks, micro_batches, split=False).items():
        if name not in ("gpipe", "1f1b", "zb_h2", "interleaved"):
            continue
        foretold = [simulate(each, times, order) for order in orders(each).values()]
        taken = [min(sleep(each, times, order, unit) for _ in range(TURNS)) for order in orders(each).values()]
        ours = "-" if case == "c" else f"{step(name, times, ranks, micro_batches, unit):.1f}"
        both = (f"{real:.1f} ({table:.1f})" for real, table in zip(taken, foretold, strict=True))
        rows.append([f"{case}: {name}", *both, ours])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ready", description=__doc__)
    parser.add_argument("--draws", type=int, default=8, help="of the times, for each row")
    parser.add_argument("--unit", type=float, default=0.02, help="seconds of a forward pass that sleeps")
    options = parser.parse_args()
    about = facts()
    asked = [(case, *size, split) for case in CASES for size in SIZES for split in (False, True)]
    results = [compare(*each, options.draws) for each in with_time_left(asked, "simulated")]
    header = [
        "case, K, M",
        "backward",
        "best in fixed order",
        "best by readiness",
        "speed",
        "searched",
        "bound",
        "1f1b",
    ]
    rows = [
        [
            f"{r['case']}, {r['K']}, {r['M']}", "split" if r["split"] else "whole", r["fixed"][0],
            ", ".join(r["ready"]),
            *(f"{r[f'speed of {what}']:.2f}" for what in ("ready", "searched", "the bound", "ready 1f1b")),
        ]
        for r in results
    ]  # fmt: skip
    naps = [row for case in CASES for row in slept(case, 4, 16, options.unit)]
    napped = table(["case: schedule", "fixed order", *READY, "a step of gpipe"], naps)
    cases = "\n".join(f"- {case}: {text}" for case, text in CASES.items())
    text = (
        f"# Ranks that run whatever is ready\n\n{describe(about)}\n\n{cases}\n\n"
        f"## Simulated\n\n{SIMULATED}\n\n{table(header, rows)}\n\n"
        f"## With sleeping threads\n\n{SLEPT}\n\n{napped}\n"
    )
    write("ready", text, {"facts": about, "options": vars(options), "results": results, "slept": naps})


if __name__ == "__main__":
    main()
