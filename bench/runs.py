"""Runs `gpipe train` like a user, and reads its results."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FREE: Mapping[str, Any] = {"partitions": 1, "remat": "never"}
"""What decides no number, and is fastest where a run has one core to itself."""


@dataclass(frozen=True)
class Run:
    """A training with its recipe, folder and options by name."""

    recipe: str
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 0

    @property
    def command(self) -> list[str]:
        """Returns the command line of a user."""
        words = ["train", self.recipe, "--out", str(self.out)]
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            match value:
                case bool():
                    words.append(f"--{flag}" if value else f"--no-{flag}")
                case list() | tuple():
                    words += [f"--{flag}", *map(str, value)]
                case _:
                    words += [f"--{flag}", str(value)]
        return words


@dataclass(frozen=True)
class Outcome:
    """The results of a run: the lines of metrics.jsonl, and evaluation.json."""

    epochs: Sequence[Mapping[str, float]]
    evaluation: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """Returns the duration of the training."""
        return sum(epoch["seconds"] for epoch in self.epochs)


def gpipe(arguments: Sequence[str], processes: int = 0) -> None:
    """Runs the command, with torchrun for several processes."""
    launcher = ["torch.distributed.run", "--nproc-per-node", str(processes), "-m"] if processes else []
    command = [sys.executable, "-m", *launcher, "gpipe", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def carry_out(run: Run, evaluate: Sequence[str] | None = ()) -> Outcome:
    """Trains a run, and evaluates it with these flags unless they are None. A finished run is only read."""
    if not (run.out / "model.safetensors").exists():
        gpipe(run.command, run.processes)
    evaluation = run.out / "evaluation.json"
    if evaluate is not None and not evaluation.exists():
        gpipe(["evaluate", str(run.out), *evaluate])
    lines = (run.out / "metrics.jsonl").read_text().splitlines()
    found = json.loads(evaluation.read_text()) if evaluate is not None else {}
    print(f"{run.out}: {lines[-1]}", flush=True)
    return Outcome([json.loads(line) for line in lines], found)


def carry_out_all(runs: Sequence[Run], at_once: int, evaluate: Sequence[str] | None = ()) -> list[Outcome]:
    """Trains and evaluates runs, with this number of runs at the same time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda run: carry_out(run, evaluate), runs))
