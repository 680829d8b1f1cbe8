"""Measures the cost of a checkpoint: how long training stops, and how long until it is on the disk.

The model has 100 MB, without an optimizer, with momentum (200 MB in total) and with AdamW (300 MB). Torch's own
savers are measured for comparison.
"""

import argparse
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from bench.machine import busy_seconds, cpu_seconds, facts
from bench.report import describe, spread, table, write

LAYERS, WIDTH = 25, 1024  # 100 MiB of float32
ROWS, MICRO_BATCHES = 16, 2

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer | None]] = {
    "weights alone": lambda ps: None,
    "with momentum": lambda ps: torch.optim.SGD(ps, lr=1e-4, momentum=0.9),
    "with AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-4),
}

KEPT = 5  # rounds

TEXT = f"""# Checkpoints

{{about}}

{LAYERS} layers of {WIDTH} x {WIDTH} on two partitions. Of {{rounds}} rounds the {KEPT} count in which other processes
used least: {{cores}} cores. Wanted: training stops for less than 300 ms. That is the *pause*: what
`gpipe.save(..., background=True)` takes to return. The first one of a process has to get the memory for the copy.

{{ways}}

The load looks at every hash. torch.save and torch.distributed.checkpoint take none, and training waits for them.
"""


class Run:
    """A pipe with its optimizer and a folder for its checkpoints."""

    def __init__(self, folder: Path, make: Callable[[Any], torch.optim.Optimizer | None]) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.pipe = gpipe.GPipe(layers, 2, MICRO_BATCHES, seed=0)
        self.optimizer = make(self.pipe.parameters())
        self.folder = folder
        self.data = torch.randn(ROWS, WIDTH)
        self.step()

    def step(self) -> None:
        self.pipe.step(self.data, self.data, F.mse_loss)
        if self.optimizer is not None:
            self.optimizer.step()
        self.pipe.zero_grad()

    def state(self) -> dict[str, Any]:
        """Returns the complete state for torch's own savers."""
        optimizer = {} if self.optimizer is None else {"optimizer": self.optimizer.state_dict()}
        return {"model": self.pipe.state_dict(), **optimizer}

    @property
    def megabytes(self) -> float:
        tensors = torch.utils._pytree.tree_leaves(self.state())
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)) / 1e6


def timed(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def torch_save(run: Run) -> None:
    """Saves one file with torch.save, as durably as a checkpoint."""
    with (run.folder / "torch.pt").open("wb") as file:
        torch.save(run.state(), file)
        file.flush()
        os.fsync(file.fileno())


def dcp_save(run: Run) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is used without processes
        save(run.state(), checkpoint_id=str(run.folder / "dcp"), no_dist=True)


def one_round(run: Run) -> dict[str, float]:
    """Measures each way to save and load once."""
    found: dict[str, float] = {}
    run.pipe.step_number += 1
    start = time.perf_counter()
    saving = gpipe.save(run.folder, run.pipe, run.optimizer, background=True, keep=1)
    found["pause"] = time.perf_counter() - start
    saving.wait()
    found["background, until durable"] = time.perf_counter() - start
    run.pipe.step_number += 1
    found["foreground"] = timed(lambda: gpipe.save(run.folder, run.pipe, run.optimizer, keep=1))
    found["load"] = timed(lambda: gpipe.load(run.folder, run.pipe, run.optimizer))
    found["torch.save and fsync"] = timed(lambda: torch_save(run))
    found["torch.distributed.checkpoint.save"] = timed(lambda: dcp_save(run))
    return found


def steps_beside(run: Run) -> tuple[list[float], list[float]]:
    """Measures steps without and during the save of a checkpoint."""
    alone, beside = list[float](), list[float]()
    for _ in range(4):
        alone += [timed(run.step) for _ in range(3)]
        saving = gpipe.save(run.folder, run.pipe, run.optimizer, background=True, keep=1)
        while not saving.done:
            beside.append(timed(run.step))
        saving.wait()
    return alone, beside


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def with_others(run: Run) -> tuple[float, dict[str, float]]:
    """Runs a round, and returns how many cores other processes used in it."""
    own, all_, start = cpu_seconds(os.getpid()), busy_seconds(), time.perf_counter()
    found = one_round(run)
    others = busy_seconds() - all_ - (cpu_seconds(os.getpid()) - own)
    return max(0.0, others) / (time.perf_counter() - start), found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; by default a temporary one")
    options = parser.parse_args()
    folder = Path(mkdtemp(dir=options.folder))
    try:
        measured = measure(folder, options.rounds)
    finally:
        shutil.rmtree(folder)
    report(measured, options.rounds)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Returns all results by optimizer."""
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        run = Run(folder, make)
        first = one_round(run)["pause"]
        quietest = sorted((with_others(run) for _ in range(rounds)), key=lambda pair: pair[0])[:KEPT]
        found[name] = {
            "megabytes": run.megabytes,
            "first pause": first,
            "cores": [cores for cores, _ in quietest],
            "rounds": [one for _, one in quietest],
            "steps": steps_beside(run),
        }
        run.pipe.close()
    return found


def report(measured: dict[str, Any], rounds: int) -> None:
    """Writes and prints the results."""
    about = facts()
    ways = list(measured["with AdamW"]["rounds"][0])
    header = ["ms, median (min-max)", *(f"{name}, {found['megabytes']:.0f} MB" for name, found in measured.items())]
    rows = [
        [way, *(spread([one[way] for one in found["rounds"]], digits=3) for found in measured.values())]
        for way in ways
    ]
    rows.insert(1, ["pause, the first", *(ms(found["first pause"]) for found in measured.values())])
    for at, when in enumerate(("a step, nothing else going on", "a step while it is written")):
        rows.append([when, *(spread(found["steps"][at], digits=3) for found in measured.values())])
    text = TEXT.format(
        about=describe(about),
        rounds=rounds,
        cores=spread([cores for found in measured.values() for cores in found["cores"]], 1, 2),
        ways=table(header, rows),
    )
    write("checkpoint", text, {"facts": about, "measured": measured})


if __name__ == "__main__":
    main()
