"""What devices hold beside what the table states: what was freed counts until the host knows that no stream uses it.

    python -m tests.accelerator.memory

For every schedule and remat, by the simulator's allocator, three ranks on a device each. What the table states is
what `gpipe.record(pipe, memory=True)` counts on CPUs. Then 1F1B with more micro-batches, which must not hold more.
Last, what the first step holds more than the second, beside what is predicted for its verification.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from gpipe.runtime import streams
from gpipe.schedule.schedules import SCHEDULES
from tests.accelerator.placing import CPU, DEVICES, SIMULATOR
from tests.support.plain_loop import REMATS
from tests.support.planned import pipe_by_costs

WIDTH, ROWS, RANKS, M = 64, 512, 3, 8
FORWARD = 4 * ROWS * WIDTH * 4  # bytes that the forward of a stage makes: of two layers, each two tensors
MOST_ABOVE = streams.MOST_QUEUED
"""Forwards' worth of memory that a device may hold above what is stated: one for each action that may be queued."""


def pipe_of(schedule: str, remat: str, devices: list[torch.device], micro_batches: int = M) -> gpipe.GPipe:
    stages = RANKS * SCHEDULES[schedule].stages_per_rank
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2 * stages)]
    how: dict[str, Any] = {"schedule": schedule, "remat": remat, "devices": devices, "costs": [1.0] * len(layers)}
    return pipe_by_costs(layers, RANKS, micro_batches, **how)


def stated(schedule: str, remat: str) -> list[int]:
    """The bytes of activations of each rank."""
    x = torch.ones(ROWS * M, WIDTH)
    with pipe_of(schedule, remat, [CPU] * RANKS) as pipe, gpipe.record(pipe, memory=True) as recording:
        pipe.step(x, x, F.mse_loss)
        return [held.activations or 0 for _, held in sorted(recording.memory().items())]


def found(schedule: str, remat: str, micro_batches: int = M) -> list[int]:
    """The most bytes on each device in a step, above what is held between steps."""
    devices = DEVICES[:RANKS]
    x, y = (torch.ones(ROWS * micro_batches, WIDTH, device=device) for device in (devices[0], devices[-1]))
    with pipe_of(schedule, remat, devices, micro_batches) as pipe:
        pipe.step(x, y, F.mse_loss)
        for device in devices:
            torch.accelerator.synchronize(device)
            SIMULATOR.reset_peak(device.index)
        before = [SIMULATOR.peak_bytes(device.index) for device in devices]
        pipe.step(x, y, F.mse_loss)
        return [SIMULATOR.peak_bytes(device.index) - base for device, base in zip(devices, before, strict=True)]


def lines(schedules: list[str]) -> Iterator[tuple[str, float]]:
    for schedule in schedules:
        for remat in REMATS:
            pairs = list(zip(stated(schedule, remat), found(schedule, remat), strict=True))
            above = max((there - said) / FORWARD for said, there in pairs)
            numbers = ", ".join(f"{said / 1e6:.2f} {there / 1e6:.2f}" for said, there in pairs)
            yield f"{schedule:12} {remat:12} {numbers}: {above:.2f} forwards above", above


def of_verification() -> Iterator[tuple[float, float]]:
    """What each device holds more in a first step than in the next, in bytes: found, and predicted."""
    x, devices = torch.ones(ROWS * M, WIDTH), DEVICES[:RANKS]
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2 * RANKS)]
    room = [gpipe.Device(memory=10**9, flops=1e9)] * RANKS
    plan = gpipe.find_plan(layers, x, room, micro_batches=M, partitions=RANKS, schedule="gpipe", optimizer_numbers=0)
    given, targets, peaks = x.to(devices[0]), x.to(devices[-1]), list[list[int]]()
    with gpipe.GPipe(layers, plan=plan, devices=devices, driver="lockstep") as pipe:
        for _ in range(2):
            for device in devices:
                torch.accelerator.synchronize(device)
                SIMULATOR.reset_peak(device.index)
            pipe.zero_grad()
            pipe.step(given, targets, F.mse_loss)
            peaks.append([SIMULATOR.peak_bytes(device.index) for device in devices])
        later, first = pipe.prediction.peak_bytes or (), pipe.prediction.verified_peak_bytes or ()
        for found, after, said, without in zip(*peaks, first, later, strict=True):
            yield found - after, said - without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, action="append")
    asked = parser.parse_args()
    most = -1.0
    for line, above in lines(asked.schedule or [*SCHEDULES]):
        most = max(most, above)
        print(line, flush=True)
    few, many = found("1f1b", "always"), found("1f1b", "always", 8 * M)
    paced = streams.MOST_QUEUED
    streams.MOST_QUEUED = 10**9
    free = found("1f1b", "always", 8 * M)
    streams.MOST_QUEUED = paced
    for device in range(RANKS):
        numbers = [f"{each[device] / 1e6:.2f}" for each in (few, many, free)]
        print(f"1f1b, device {device}: {numbers[0]} MB, {numbers[1]} with M={8 * M}, {numbers[2]} if not held back")
    grows = any(m > 1.2 * f for f, m in zip(few, many, strict=True))
    wrong = False
    for device, (more, predicted) in enumerate(of_verification()):
        print(f"verified, device {device}: {more / 1e6:.2f} MB more, {predicted / 1e6:.2f} predicted")
        wrong |= not 0.5 * predicted <= more <= 1.25 * predicted
    is_held = any(f > 2 * m for f, m in zip(free, many, strict=True))
    raise SystemExit(most > MOST_ABOVE or grows or wrong or not is_held)


if __name__ == "__main__":
    main()
