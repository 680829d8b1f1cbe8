"""What a cell costs the host: Python and events, in us, on simulated devices beside a CPU.

    python -m tests.accelerator.cost

A cell is one action of the table. What the layer itself takes in a plain loop on the same device, kernels and
autograd, is subtracted; the detector is off. Medians of interleaved runs, of the processor's time of all threads.
"""

from collections import defaultdict
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from gpipe.runtime import executor
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.run import Rank, Run
from tests.accelerator.placing import CPU, DEVICES, FIRST, SIMULATOR, moved

RANKS, M, STEPS, ROUNDS = 4, 16, 4, 15
PLACES = {"CPU": [CPU] * RANKS, "one device": [FIRST] * RANKS, "four devices": DEVICES}
WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "remat": "never"},
    "1f1b, remat": {"schedule": "1f1b", "remat": "always"},
    "zb_h1": {"schedule": "zb_h1", "remat": "never"},
}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def layers() -> list[nn.Module]:
    return [nn.Linear(1, 1) for _ in range(RANKS)]


def plain_seconds(device: torch.device) -> dict[str, float]:
    """What the forward of a layer takes, and its backward, without a pipe."""
    layer = nn.Linear(1, 1)
    moved([layer], device)
    x, forward, backward = torch.ones(1, 1, device=device, requires_grad=True), 0.0, 0.0
    for _ in range(RANKS * M):
        began = process_time()
        y = layer(x)
        between = process_time()
        torch.autograd.backward([y], [y.detach()])
        forward, backward = forward + between - began, backward + process_time() - between
    return {"F": forward / RANKS / M, "R": forward / RANKS / M, "B": backward / RANKS / M}


class Timed:
    """Seconds of each kind of action, in lockstep."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, list[float]](list)
        self._perform = executor.perform

    def perform(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        began = process_time()
        self._perform(run, rank, task)
        self.seconds[str(task.action.kind.value)].append(process_time() - began)


def step_seconds(pipe: gpipe.GPipe, x: Tensor) -> float:
    began = process_time()
    for _ in range(STEPS):
        pipe.step(x, x, loss)
    return (process_time() - began) / STEPS


def main() -> None:
    torch.set_num_threads(1)
    SIMULATOR.watch(False)
    pipes = {
        (place, way, driver): gpipe.GPipe(layers(), RANKS, M, driver=driver, devices=devices, **how)
        for place, devices in PLACES.items()
        for way, how in WAYS.items()
        for driver in ("lockstep", "threads")
    }
    inputs = {place: torch.ones(M, 1, device=devices[0]) for place, devices in PLACES.items()}
    for (place, *_), pipe in pipes.items():
        step_seconds(pipe, inputs[place])
    found = defaultdict[Any, list[float]](list)
    for _ in range(ROUNDS):
        for device in (CPU, FIRST):
            for kind, seconds in plain_seconds(device).items():
                found[device, kind].append(seconds)
        for (place, way, driver), pipe in pipes.items():
            found[place, way, driver].append(step_seconds(pipe, inputs[place]))
            if driver == "lockstep":
                timed = Timed()
                executor.perform = timed.perform
                pipe.step(inputs[place], inputs[place], loss)
                executor.perform = timed._perform
                for kind, each in timed.seconds.items():
                    found[place, way, kind].append(median(each))
    us = {key: median(each) * 1e6 for key, each in found.items()}
    for place, devices in PLACES.items():
        alone = {kind: us[devices[0], kind] for kind in "FRB"}
        print(f"{place}: a layer alone takes {alone['F']:.0f} us forward, {alone['B']:.0f} backward")
        for way in WAYS:
            kinds = {kind: value for kind in "FRBIW" if (value := us.get((place, way, kind)))}
            split = {kind: value - alone[kind] for kind, value in kinds.items() if kind not in "IW"}
            if "W" in kinds:
                split["I and W"] = kinds["I"] + kinds["W"] - alone["B"]
            own = alone["F"] * (1 + ("R" in kinds)) + alone["B"]
            said = ", ".join(f"{kind} {value:.0f}" for kind, value in split.items())
            total = ", ".join(
                f"{name} {us[place, way, name] / RANKS / M - own:.0f}" for name in ("lockstep", "threads")
            )
            print(f"    {way:12} {said}; all of a micro-batch at a stage: {total}")


if __name__ == "__main__":
    main()
