"""Layers that sleep, so that eight stages can work at once on any machine: does the pipeline waste time?

For each t: forward t, backward 2t, K=8, M=32, both ways of training, with remat and without. What is measured is
compared with the ideal makespan of stage times measured one after another, and with what the simulator makes of the
times that the recorder saw in other steps.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

import gpipe
from bench.floor import Floor
from bench.ideal import makespan
from bench.machine import busy_seconds, facts
from bench.report import describe, spread, table, write
from bench.workloads import Workload, sleeping
from gpipe.plan.action import Action, Kind
from gpipe.plan.cost import StageCost
from gpipe.plan.simulate import simulate
from gpipe.plan.timeline import Timeline

PARTITIONS, MICRO_BATCHES = 8, 32
QUIET = 0.2  # of a core


@dataclass
class Row:
    """One way of training the sleeping layers."""

    milliseconds: float
    remat: bool
    way: str
    steps: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    ideals: list[float] = field(default_factory=list)
    predicted: float = 0.0
    replays: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        """The row as it is shown: of the steps, those that others disturbed least."""
        quiet = sorted(zip(self.others, self.steps, self.ideals, strict=True))
        kept = [one for one in quiet if one[0] <= QUIET] or quiet
        kept = kept if len(kept) >= 5 else quiet[:5]
        steps, ideals = [step for _, step, _ in kept], [ideal for _, _, ideal in kept]
        ratios = [step / ideal for step, ideal in zip(steps, ideals, strict=True)]
        prediction = f"{median(steps) / self.predicted - 1:+.1%}" if self.predicted else ""
        replay = f"{median(self.replays) - 1:+.1%}" if self.replays else ""
        return [
            f"{self.milliseconds:g} ms", "on" if self.remat else "off", self.way, spread(steps),
            f"{median(ideals) * 1e3:.1f}", spread(ratios, 1, 4), prediction, replay,
            f"{median(one[0] for one in kept):.2f}",
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sleep", description=__doc__)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[1, 5, 10])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep", default="sleep")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for milliseconds in options.milliseconds for row in measure(milliseconds, options.rounds)]
    about = facts()
    header = [
        "t", "remat", "way", "step ms (min-max)", "ideal ms", "x ideal (min-max)", "against simulation of medians",
        "against simulation of own times", "cores used by others",
    ]  # fmt: skip
    text = (
        f"# {PARTITIONS} sleeping layers, K={PARTITIONS}, M={MICRO_BATCHES}\n\n{describe(about)}\n\n"
        f"{table(header, [row.cells() for row in rows])}"
    )
    write(options.keep, text, {"facts": about, "rows": [asdict(row) for row in rows]})


def measure(milliseconds: float, rounds: int) -> list[Row]:
    """Runs all ways in turn, again and again."""
    work = sleeping(milliseconds / 1e3, PARTITIONS, PARTITIONS, MICRO_BATCHES)
    rows, steps, recorded = [], [], []
    for remat in (False, True):
        pipe = gpipe.GPipe(
            work.layers(), [1] * PARTITIONS, MICRO_BATCHES, remat="always" if remat else "never", seed=0
        )
        ways = {"`step`": step(work, pipe), "`loss.backward()`": call(work, pipe), "bare threads": floor(work, remat)}
        for way, act in ways.items():
            rows.append(Row(milliseconds, remat, way))
            steps.append(act)
            recorded.append((pipe, list[Timeline]()))
    for act in steps:
        act()
    for _ in range(rounds):
        forward, backward = stage_times(work)
        for row, act, (pipe, timelines) in zip(rows, steps, recorded, strict=True):
            busy, cpu, start = busy_seconds(), time.process_time(), time.perf_counter()
            act()
            row.steps.append(time.perf_counter() - start)
            row.others.append((busy_seconds() - busy - time.process_time() + cpu) / row.steps[-1])
            row.ideals.append(makespan(forward, backward, MICRO_BATCHES, remat=row.remat))
            if row.way != "bare threads":
                with gpipe.record(pipe) as recording:
                    act()
                timelines += recording.timelines
    for row, (pipe, timelines) in zip(rows, recorded, strict=True):
        if timelines:
            row.predicted = predict(pipe, timelines)
            row.replays = [replay(pipe, together(runs)) for runs in batched(timelines, len(timelines) // rounds)]
    return rows


def step(work: Workload, pipe: gpipe.GPipe) -> Callable[[], object]:
    """Training by `step`."""
    inputs, targets = work.data()
    return lambda: pipe.step(inputs, targets, work.loss_fn)


def call(work: Workload, pipe: gpipe.GPipe) -> Callable[[], object]:
    """Training by `loss.backward()`."""
    inputs, targets = work.data()
    return lambda: work.loss_fn(pipe(inputs), targets).backward()


def floor(work: Workload, remat: bool) -> Callable[[], object]:
    """Training by bare threads."""
    inputs, targets = (tensor.tensor_split(MICRO_BATCHES) for tensor in work.data())
    threads = Floor([nn.Sequential(layer) for layer in work.layers()], work.loss_fn, remat=remat)
    return lambda: threads.step(inputs, targets)


def stage_times(work: Workload, repeats: int = 4) -> tuple[list[float], list[float]]:
    """Seconds of each layer's forward and backward, one after another in this thread."""
    inputs: Tensor = work.data()[0][:1].requires_grad_()
    forward: list[float] = []
    backward: list[float] = []
    for layer in work.layers():
        ahead, back = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            output = layer(inputs)
            middle = time.perf_counter()
            output.backward(torch.ones_like(output))
            ahead.append(middle - start)
            back.append(time.perf_counter() - middle)
        forward.append(median(ahead))
        backward.append(median(back))
    return forward, backward


def predict(pipe: gpipe.GPipe, timelines: Sequence[Timeline]) -> float:
    """Seconds that the simulator gives a step whose actions take what the recorder saw, medians by stage and kind."""
    seen: dict[tuple[int, Kind], list[float]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            seen.setdefault((span.action.stage, span.action.kind), []).append(span.seconds)
    medians = {what: median(seconds) for what, seconds in seen.items()}
    return simulated(pipe, lambda action: medians.get((action.stage, action.kind), 0.0))


def replay(pipe: gpipe.GPipe, measured: tuple[dict[Action, float], float]) -> float:
    """A step's seconds, relative to what the simulator makes of the times of its own actions."""
    seconds, whole = measured
    return whole / simulated(pipe, lambda action: seconds.get(action, 0.0))


def together(timelines: Sequence[Timeline]) -> tuple[dict[Action, float], float]:
    """The seconds of each action and of the whole step, which is two runs if the loss is computed outside."""
    spans = {span.action: span.seconds for timeline in timelines for span in timeline.spans}
    return spans, sum(timeline.seconds for timeline in timelines)


def simulated(pipe: gpipe.GPipe, duration: Callable[[Action], float]) -> float:
    """Seconds of a step, by the simulator."""
    unused = [StageCost(0.0, 0.0)] * PARTITIONS
    return simulate(pipe.program, unused, duration).timeline.seconds


def batched(timelines: Sequence[Timeline], size: int) -> list[Sequence[Timeline]]:
    """So many at a time."""
    return [timelines[at : at + size] for at in range(0, len(timelines), size)]


if __name__ == "__main__":
    main()
