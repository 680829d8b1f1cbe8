"""Measures training with the weights on the host: memory, time, and bits beside the reference loop.

    python -m bench.weights memory         # weights, gradients and Adam state of 8 times the private memory allowed
    python -m bench.weights time           # beside a step with all weights in memory, with sleeping layers
    python -m bench.weights devices        # peak of a simulated device, from 4 to 32 stages
    python -m bench.weights drawn          # 1,000 drawn models beside the plain loop

Each training of `memory` runs in a process of its own, whose private memory (`RLIMIT_DATA`) is limited. Files that
are mapped into memory do not count. The results of all parts are in `bench/results/weights.md`.
"""

import argparse
import hashlib
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from bench.machine import facts
from bench.report import RESULTS, describe, spread, table, with_time_left, write
from gpipe.features import streamed_weights
from gpipe.schedule.cost import StageCost
from gpipe.schedule.simulate import simulate
from gpipe.stages import memory_layout
from gpipe.stages.host_memory import give_back

MIB = 2**20
LAYERS, WIDTH, ROWS, MICRO_BATCHES, STEPS = 48, 1024, 16, 4, 3
LIMIT = 96  # MiB of private memory beyond what the process has before it builds the model
ENVIRONMENT = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc returns freed memory of this size at once. Otherwise `RLIMIT_DATA` would also count memory that is free."""
LOADS = {"0.1": 0.1, "2": 2.0, "4": 4.0}
"""The duration of a load over the forward passes of its stage."""
SLEEP = 0.02  # seconds of a forward pass of a sleeping layer


def private() -> float:
    """Returns the private memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def data_segment() -> int:
    """Returns the bytes that `RLIMIT_DATA` counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def pipe_of(layers: list[Any], partitions: int, weights: str, **options: Any) -> gpipe.GPipe:
    """Builds a pipe with one layer per stage."""
    schedule = gpipe.BreadthFirst(len(layers) // partitions)
    sizes = [1] * len(layers)
    return gpipe.GPipe(layers, sizes, MICRO_BATCHES, schedule=schedule, weights=weights, seed=0, **options)


def train(weights: str, partitions: int, limit: int) -> dict[str, Any]:
    """Trains some steps under a limit of private memory in MiB, or without a limit if it is 0."""
    threading.stack_size(256 * 1024)
    torch.set_num_threads(1)
    small = [partial(nn.Linear, 8, 8)] * 4  # brings in code and threads
    warm = pipe_of(small, partitions, weights)
    optimizer = torch.optim.Adam(warm.parameters())
    gpipe.offload(optimizer)
    for _ in range(2):
        warm.step(torch.ones(8, 8), torch.ones(8, 8), F.mse_loss)
        optimizer.step()
    give_back(0)
    before, peak, running = private(), 0.0, True
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (data_segment() + limit * MIB,) * 2)

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, private())
            time.sleep(0.005)

    watching = threading.Thread(target=watch)
    try:
        pipe = pipe_of([block] * LAYERS, partitions, weights)
        optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-4)
        if weights == "host":
            gpipe.offload(optimizer)
        x = torch.randn(ROWS * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(1))
        losses, seconds = [], []
        for step in range(STEPS):
            if step == 1:  # The first step is verified, which needs more memory.
                give_back(0)
                watching.start()
            start = time.perf_counter()
            losses.append(float(pipe.step(x, x, F.mse_loss)))
            seconds.append(time.perf_counter() - start)
            optimizer.step()
            optimizer.zero_grad()
    except (RuntimeError, MemoryError) as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:120]}"}
    finally:
        running = False
    watching.join()
    digest = hashlib.sha256()
    for parameter in pipe.parameters():
        digest.update(memoryview(parameter.detach().numpy()))  # type: ignore[arg-type]
    predicted = pipe.prediction.peak_bytes
    size = sum(p.nbytes for p in pipe.parameters())
    return {
        "losses": losses,
        "digest": digest.hexdigest(),
        "seconds": seconds,
        "peak": peak - before,
        "predicted": None if predicted is None else sum(predicted) / MIB,
        "weights": size / MIB,
    }


def memory(rounds: int) -> dict[str, Any]:
    """Trains with and without a limit, on one rank and on two ranks."""
    del rounds
    found: dict[str, Any] = {}
    for partitions in (1, 2):
        for weights, limit in (("device", 0), ("device", LIMIT), ("host", LIMIT)):
            command = [sys.executable, "-m", "bench.weights", "memory", "--process", weights, str(partitions)]
            done = subprocess.run(
                [*command, str(limit)], env=ENVIRONMENT, capture_output=True, text=True, check=False
            )
            lines = done.stdout.strip().splitlines()
            result = json.loads(lines[-1]) if lines else {"failed": f"ended by {done.returncode}"}
            found[f"K={partitions}, weights={weights!r}, {f'{limit} MiB' if limit else 'no limit'}"] = result
    rows = []
    for name, one in found.items():
        if "failed" in one:
            rows.append([name, "fails", one["failed"][:50], "", ""])
            continue
        other = found[f"{name[:3]}, weights='device', no limit"]
        same = one["digest"] == other["digest"] and one["losses"] == other["losses"]
        rows.append(
            [name, "trains", "yes" if same else "NO", f"{one['peak']:.0f}", f"{median(one['seconds'][1:]):.2f}"]
        )
    size = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / MIB
    text = (
        f"{LAYERS} layers of width {WIDTH}: {size:.0f} MiB of weights, {4 * size:.0f} MiB with gradients and "
        f"Adam state, {4 * size / LIMIT:.1f} times the {LIMIT} MiB of private memory that are allowed beyond what "
        f"the process has before. M={MICRO_BATCHES}, {STEPS} steps with `gpipe.offload(optimizer)`."
    )
    header = ["run", "", "bits as without a limit", "peak, MiB of private memory", "seconds a step"]
    return {"text": f"{text}\n\n{table(header, rows)}", "found": found}


class Sleeps(nn.Linear):
    """Sleeps in the forward pass, and twice as long in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEEP)
        output = super().forward(x)
        output.register_hook(lambda _: time.sleep(2 * SLEEP))
        return output


def seconds_of(pipe: gpipe.GPipe, x: Tensor) -> float:
    start = time.perf_counter()
    pipe.step(x, x, F.mse_loss)
    seconds = time.perf_counter() - start
    pipe.zero_grad()
    return seconds


def time_of_steps(rounds: int) -> dict[str, Any]:
    """Compares steps with weights on the host and in memory, in turns."""
    stages, x, copy_of = 8, torch.randn(MICRO_BATCHES, 32), memory_layout.copy_of
    parts, rows = {}, []
    for name, load in LOADS.items():
        seconds = load * MICRO_BATCHES * SLEEP / 2  # of each of the two tensors of a layer

        def slow(tensor: Tensor, seconds: float = seconds) -> Tensor:
            time.sleep(seconds)
            return copy_of(tensor)

        pipes = {
            weights: pipe_of([Sleeps(32, 32) for _ in range(stages)], 1, weights) for weights in ("device", "host")
        }
        streamed_weights.copy_of = slow  # type: ignore[attr-defined]  # It is imported there.
        for pipe in pipes.values():
            pipe.step(x, x, F.mse_loss)
            pipe.zero_grad()
        taken: dict[str, list[float]] = {weights: [] for weights in pipes}
        for _ in range(rounds):
            for weights, pipe in pipes.items():
                taken[weights].append(seconds_of(pipe, x))
        streamed_weights.copy_of = copy_of  # type: ignore[attr-defined]
        loads = sum(action.kind.name == "LOAD" for action in pipes["host"].program.actions)
        compute, transfer = median(taken["device"]), loads * 2 * seconds
        over = median(taken["host"]) / max(compute, transfer)
        parts[name] = {"taken": taken, "transfer": transfer, "loads": loads, "over": over}
        cost = StageCost(SLEEP, 2 * SLEEP, load=2 * seconds)
        simulated = simulate(pipes["host"].program, [cost] * stages).timeline.seconds
        each = [spread(taken[weights], 1.0) for weights in pipes]
        rows.append([name, *each, f"{simulated:.3f}", f"{transfer:.2f}", str(loads), f"{over:.3f}"])
    text = (
        f"K=1, {stages} stages, M={MICRO_BATCHES}; layers sleep {SLEEP * 1e3:.0f} ms in a forward pass and twice as "
        f"long in a backward pass, so that a busy machine does not matter. Loads sleep too. Medians of {rounds} "
        f"steps, in turns. A step needs 2S - 2 = {2 * stages - 2} loads. If "
        f"they take 2 forwards, loads bound the forward passes and compute bounds the backward passes. So the larger "
        f"of both totals is not a bound of the step; the simulated step is."
    )
    header = [
        "load / forwards of a stage",
        "s, all in memory",
        "s, on the host",
        "s, simulated",
        "s of loads",
        "loads",
        "over max(compute, transfer)",
    ]
    return {"text": f"{text}\n\n{table(header, rows)}", "parts": parts}


def devices(rounds: int) -> dict[str, Any]:
    """Measures the peak memory of a simulated device, for a growing number of stages."""
    del rounds
    from tests.accelerator.placing import DEVICES, SIMULATOR

    width, x = 256, torch.randn(MICRO_BATCHES, 256)
    stage, found, rows = (width * width + width) * 4, {}, []
    for stages in (4, 8, 16, 32):
        peaks = {}
        for weights in ("device", "host"):
            layers = [nn.Linear(width, width) for _ in range(stages)]
            pipe = pipe_of(layers, 1, weights, devices=DEVICES[:1], driver="lockstep")
            pipe.step(x, x, F.mse_loss)
            pipe.zero_grad()
            torch.accelerator.synchronize(0)
            SIMULATOR.reset_peak(0)
            base = SIMULATOR.peak_bytes(0) if weights == "host" else 0
            pipe.step(x, x, F.mse_loss)
            peaks[weights] = SIMULATOR.peak_bytes(0) - base
            del pipe
        found[stages] = peaks
        limit = (2 + 1) * 2 * stage
        rows.append([str(stages), *(f"{peaks[w] / stage:.1f}" for w in peaks), f"{limit / stage:.1f}"])
    text = (
        f"One simulated device, a Linear({width}) per stage, M={MICRO_BATCHES}, resident=2. In units of the weights "
        f"of one stage. Activations of {MICRO_BATCHES} rows are small, and count too."
    )
    header = ["stages", "all on the device", "on the host", "(resident + 1) x (weights + gradients)"]
    return {"text": f"{text}\n\n{table(header, rows)}", "found": found}


def drawn(rounds: int) -> dict[str, Any]:
    """Compares drawn models with the plain loop: modules and weights used twice, skips, BatchNorm, dropout."""
    from tests.support.mixed_tasks import generate_task, generate_way, is_statistic, run_pipe, run_plain
    from tests.support.outcomes import differences

    def tries() -> Iterator[tuple[str, str]]:
        for number in range(10**9):
            draw = Random(f"host {number}")
            task, ranks, each = generate_task(draw), draw.randint(1, 3), draw.randint(1, 4)
            way = generate_way(draw, task.model, ranks * each)
            if way is None or (task.model.norms and min(task.rows) < 2 * task.micro_batches):
                continue
            schedule = gpipe.BreadthFirst(each, draw.randint(1, 3))
            remat = (draw.choice(["always", "offload_inputs"]),) * len(way.cut)
            way = replace(way, schedule=schedule, weights="host", remat=remat)
            try:
                wrong = differences(run_pipe(task, way), run_plain(task), leave_out=is_statistic(task))
            except Exception as error:  # Each is counted, and shown.
                yield "failed", f"{number}: {type(error).__name__}: {error}"
            else:
                yield ("differs", f"{number}: {wrong}") if wrong else ("equal", "")

    counts: Counter[str] = Counter()
    for _, (verdict, said) in zip(with_time_left(range(rounds), "drawn"), tries(), strict=False):
        counts[verdict] += 1
        if said:
            print(verdict, said, flush=True)
    text = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
    return {"text": f"{rounds:,} drawn models on 1 to 3 ranks with 1 to 4 stages each: {text}.", "counts": counts}


PARTS = {"memory": memory, "time": time_of_steps, "devices": devices, "drawn": drawn}
TITLES = {
    "memory": "## A network that is larger than the memory",
    "time": "## Time of a step",
    "devices": "## Memory of a device",
    "drawn": "## Bits beside the plain loop",
}


def main() -> None:
    """Measures a part, and writes the results of all parts."""
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each kind, or drawn models")
    parser.add_argument("--process", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    if asked.process:
        weights, partitions, limit = asked.process
        print(json.dumps(train(weights, int(partitions), int(limit))), flush=True)
        return
    kept = RESULTS / "weights.json"
    data: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    data[asked.part] = PARTS[asked.part](asked.rounds) | {"facts": facts()}
    sections = [
        f"{TITLES[part]}\n\n{data[part]['text']}\n\n{describe(data[part]['facts'])}" for part in PARTS if part in data
    ]
    write("weights", "\n\n".join(["# Weights on the host", *sections]), data)


if __name__ == "__main__":
    main()
