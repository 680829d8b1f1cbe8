"""Digests of what a fixed set of trainings computes, by the library that PYTHONPATH chooses, to compare two states.

PYTHONPATH=../before/src python -m tests.soak.same_bits --out before.jsonl
PYTHONPATH=src python -m tests.soak.same_bits --out after.jsonl
python -m tests.soak.same_bits --compare before.jsonl after.jsonl

The first line of a file says where it comes from, each other one has the SHA-256 of a training's losses, gradients,
parameters, buffers and evaluation. Digests depend on the processor and on torch: compare files of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils._pytree import tree_leaves

import gpipe

from .results import facts
from .trainings import ROWS, WORLD, Training, trainings, trainings_of_processes

Lines = dict[str, dict[str, str]]


def digests(training: Training, part: int = 0) -> dict[str, str]:
    """Trains, a step for each number of rows, and evaluates; gives the SHA-256 of each kind of result.

    Replicas are given parts of the data that differ.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"seed": 5, **training.options}
    pipe = gpipe.GPipe(training.build(), training.partitions, training.micro_batches, **options)
    found = {kind: hashlib.sha256() for kind in ("losses", "gradients", "parameters", "buffers", "evaluation")}
    parameters = list(pipe.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    scaler = scaler_for(pipe, training)
    torch.manual_seed(1 + part)
    for rows in ROWS:
        update(found["losses"], step(pipe, training, rows, scaler))
        update(found["gradients"], (parameter.grad for parameter in parameters))
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        optimizer.zero_grad()
        update(found["parameters"], parameters)
        update(found["buffers"], pipe.buffers())
    update(found["evaluation"], evaluated(pipe, training))
    pipe.close()
    return {kind: digest.hexdigest() for kind, digest in found.items()}


def scaler_for(pipe: gpipe.GPipe, training: Training) -> torch.amp.GradScaler | None:
    """What scales the gradients, over processes the library's own."""
    if not training.scaled:
        return None
    if training.options.get("driver") == "process":
        return gpipe.GradScaler(pipe, init_scale=2.0**10)
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


def step(pipe: gpipe.GPipe, training: Training, rows: int, scaler: torch.amp.GradScaler | None) -> object:
    """One mini-batch, in the way of the training; gives the loss, and metrics if there are any."""
    inputs, targets = training.batch(rows)
    further = {**training.further, **({"scaler": scaler} if scaler else {})}
    with training.around():
        if training.way == "step":
            return pipe.step(inputs, targets, training.loss, **further)
        gathered = {"gather": True} if training.options.get("driver") == "process" else {}
        loss = training.loss(pipe(inputs, **gathered), targets)
    loss.backward()
    return loss.detach()


def evaluated(pipe: gpipe.GPipe, training: Training) -> object:
    """The loss of a further mini-batch without gradients."""
    inputs, targets = training.batch(ROWS[0])
    pipe.eval()
    with torch.no_grad():
        return pipe.step(inputs, targets, training.loss)


def update(digest: Any, values: object) -> None:
    """Adds shapes, types and bits of all tensors in some values, and what else there is as text."""
    for leaf in tree_leaves(list(values) if isinstance(values, Iterator) else values):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())


def of_rank(rank: int, meeting: str, folder: str) -> None:
    """Trains as one of the processes, and keeps what it found in a file."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    logging.disable()
    torch.set_num_threads(1)
    found = {
        f"{training.name}, rank {rank}": digests(training, part=0 if training.partitions == WORLD else rank)
        for training in trainings_of_processes()
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def over_processes() -> Lines:
    """What two processes found."""
    with TemporaryDirectory() as folder:
        spawn(of_rank, (str(Path(folder, "meeting")), folder), nprocs=WORLD)
        parts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {name: line for part in parts for name, line in part.items()}


def write(path: Path, lines: Lines) -> None:
    """The facts, and the digests by name."""
    rows: Iterable[object] = [facts(), *({"name": name, **lines[name]} for name in sorted(lines))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> Lines:
    """The digests of a file by name."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return {row.pop("name"): row for row in rows}


def differences(before: Lines, after: Lines) -> list[str]:
    """What differs, in words: a line for each training."""
    said = []
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            said.append(f"{name}: only {'after' if name in after else 'before'}")
        elif kinds := [kind for kind in before[name] if before[name][kind] != after[name].get(kind)]:
            said.append(f"{name}: other {', '.join(kinds)}")
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Records, or compares; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.same_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="where to keep the digests")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="two files of digests")
    options = parser.parse_args(arguments)
    if options.compare:
        before, after = map(read, options.compare)
        said = differences(before, after)
        print("\n".join(said) or f"{len(before)} trainings: the same bits")
        return int(bool(said))
    if options.out is None:
        parser.error("give --out, or --compare")
    logging.disable()  # what a pipe finds is not compared
    torch.set_num_threads(1)
    lines = {training.name: digests(training) for training in trainings()} | over_processes()
    write(options.out, lines)
    print(f"{options.out}: {len(lines)} trainings by {Path(str(gpipe.__file__)).parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
