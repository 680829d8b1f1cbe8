"""Measures the cost of `gpipe.record`, and whether its parts add up to the wall time: `python -m bench.recording`.

Steps with and without recording take turns. The cost of an event is two readings of the clock and an entry in a list.
The sum of all parts is compared with the wall time of the loop.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import gpipe
from bench.machine import facts
from bench.report import describe, interval, table, write
from gpipe.features.recorder import Recorder
from gpipe.runtime.feature import Work
from gpipe.runtime.streams import RankStream
from gpipe.schedule.action import Kind, parse_action

WIDTH, LAYERS, MICRO_BATCHES = 512, 8, 8
DRIVERS = ("threads", "lockstep")


class Nothing:
    """A rank and a run that do nothing."""

    stream = RankStream(torch.device("cpu"))

    def feature(self, kind: type) -> None:
        """Returns no feature."""


class Step:
    """A step of a schedule."""

    action, rank = parse_action("0F0"), 0


def price(events: int = 20_000) -> float:
    """Measures the seconds per event."""
    recorder, step = Recorder(keep=1), Step()
    given: Any = Nothing(), Nothing(), step  # as much of them as it uses
    work: dict[Kind, Work] = {Kind.FORWARD: lambda *_: None}
    start = time.perf_counter()
    for _ in range(events):
        work[Kind.FORWARD](*given)
    without = time.perf_counter() - start
    recorder.wrap_actions(given[0], work)
    start = time.perf_counter()
    for _ in range(events):
        work[Kind.FORWARD](*given)
    return (time.perf_counter() - start - without) / events


def steps(driver: str, rounds: int) -> tuple[list[str], dict[str, object]]:
    """Measures steps with and without recording, and the sum of the parts relative to the wall time."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    batch = torch.randn(64 * MICRO_BATCHES, WIDTH)
    found: dict[str, list[float]] = {"off": [], "on": []}
    sums, events = list[float](), 0
    with gpipe.GPipe(layers, 2, MICRO_BATCHES, driver=driver) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
        for _ in range(rounds + 1):
            for name, seconds in found.items():
                recording = gpipe.record(pipe) if name == "on" else None
                start = time.perf_counter()
                for _ in range(3):
                    pipe.step(batch, batch, mse_loss)
                    optimizer.step()
                    optimizer.zero_grad()
                wall = time.perf_counter() - start
                seconds.append(wall / 3)
                if recording is not None:
                    recording.stop()
                    parts = recording.breakdown()
                    sums.append(parts.seconds * parts.steps / wall)
                    events = len(recording.timelines[-1].spans)
    found = {name: seconds[1:] for name, seconds in found.items()}
    ratios = [on / off for on, off in zip(found["on"], found["off"], strict=True)]
    low, high = interval(ratios)
    cells = [driver, f"{1e3 * median(found['off']):.1f}", f"{events}", f"{median(ratios):.4f} ({low:.4f}-{high:.4f})"]
    return [*cells, f"{min(sums):.4f} to {max(sums):.4f}"], {**found, "sums": sums, "events": events}


def main() -> None:
    """Measures, prints and writes the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.recording", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    about, each = facts(), median(price() for _ in range(5))
    lines: list[Sequence[str]] = []
    raw: dict[str, object] = {"facts": about, "price": each}
    for driver in DRIVERS:
        line, raw[driver] = steps(driver, options.rounds)
        events, off = int(line[2]), float(line[1])
        lines.append([*line, f"{100 * events * each / (off / 1e3):.3f} %"])
    head = ["driver", "step, ms", "events", "with recording / without", "sum of parts / wall", "events x price"]
    parts = [
        "# Recorded steps beside steps that are not",
        describe(about),
        f"An event costs {1e6 * each:.2f} microseconds. {LAYERS} layers of width {WIDTH}, K=2, M={MICRO_BATCHES}.",
        table(head, lines),
    ]
    write("recording", "\n\n".join(parts), raw)


if __name__ == "__main__":
    main()
