"""Measures the paper's Table 1 at small scale: the largest Transformer that fits in processes with little memory.

    python -m bench.table1_measured

Each process may use 128 MiB (RLIMIT_DATA) more than a network with one layer needs. `naive-1` is the reference loop,
and `pipeline-K` a pipe over K processes with full recomputation. A size counts if all its processes complete a step
and an update by an RMSprop whose state exists already. The planner gets devices with 128 MiB.
"""

import argparse
import multiprocessing
import os
import resource
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import gpipe
from bench.machine import facts
from bench.report import describe, table, write
from bench.table1 import RMSPROP, largest, naive, plan_of
from gpipe.models import transformer_lm
from gpipe.planner.profile import profile_layers
from gpipe.planner.search.device import Device
from gpipe.planner.search.profile import Profile

MEMORY = 128 * 2**20
ROWS, WORDS, VOCABULARY = 16, 64, 128
DIMENSIONS, FFN, HEADS = 128, 512, 4
PAPER: dict[int, int | None] = {0: 3, 1: 13, 2: None, 4: None}
"""The paper's layers by the number of accelerators, 0 for one without a pipeline."""
NO_ROOM = ("allocate", "MemoryError", "bad_alloc", "start new thread")
PATIENCE_SECONDS = 300
SMALL_CHUNKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Settings of glibc with which memory that is freed is the system's again, as an accelerator's is the allocator's."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["bench.table1"])


@dataclass(frozen=True)
class Order:
    """The training of a process.

    Attributes:
        pipelined: Whether to use a pipe.
        layers: Number of layers.
        extra: Bytes that the process may use in addition. 0: no limit.
    """

    pipelined: bool
    layers: int
    extra: int
    rank: int
    world: int
    meeting: str  # a file where processes find each other


@dataclass
class Found:
    """The largest networks on this number of processes (0: without a pipe), and the bytes of the base process."""

    processes: int
    planned: int
    measured: int
    empty: int


def serve(answers: Connection, order: Order) -> None:
    """Trains in a new process. Returns by how many bytes it grew, or why it failed."""
    try:
        answers.send(_train(order))
    except BaseException:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        answers.send(traceback.format_exc())
    os._exit(0)  # threads and process groups need no farewell


def _train(order: Order) -> int:
    torch.set_num_threads(1)
    before = _writable_bytes()
    if order.extra:
        resource.setrlimit(resource.RLIMIT_DATA, (before + order.extra, resource.RLIM_INFINITY))
    if order.world > 1:
        os.environ.update(RANK=f"{order.rank}", LOCAL_RANK=f"{order.rank}", WORLD_SIZE=f"{order.world}")
        dist.init_process_group("gloo", f"file://{order.meeting}", rank=order.rank, world_size=order.world)
    words = torch.randint(VOCABULARY, (ROWS, WORDS), generator=torch.Generator().manual_seed(0))
    builders = [partial(_build, 0), *[partial(_build, 1)] * order.layers, partial(_build, 2)]
    if not order.pipelined:
        network: nn.Module = nn.Sequential(*(build() for build in builders))
        optimizer = _optimizer(network)
        _loss(network(words), words).backward()
    else:
        driver = "process" if order.world > 1 else "lockstep"
        how: Any = {"micro_batches": ROWS, "costs": [1] * len(builders), "balance": "variance"}
        plan = gpipe.find_plan(builders, None, order.world, **how)
        network = pipe = gpipe.GPipe(builders, plan=plan, seed=0, driver=driver)
        optimizer = _optimizer(network)
        pipe.step(words, words, _loss)
    optimizer.step()
    return _writable_bytes() - before


def _layers() -> list[nn.Module]:
    return transformer_lm(1, DIMENSIONS, FFN, HEADS, VOCABULARY)


def _build(which: int) -> nn.Module:
    """Returns a callable that builds the embedding, a block or the head. No process builds the whole network."""
    return _layers()[which]


def _loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def _optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer whose state exists before the step, because a step then needs the most memory."""
    optimizer = torch.optim.RMSprop(network.parameters())
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def _writable_bytes() -> int:
    """Returns what RLIMIT_DATA counts for this process: private writable memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmData"].split()[0])


def train(processes: int, layers: int, extra: int) -> int | None:
    """The most bytes by which a process grew; None if one had no room.

    Raises:
        RuntimeError: One failed for another reason, or does not answer.
    """
    with TemporaryDirectory(dir="/dev/shm") as folder:
        world, listening, started = max(1, processes), [], []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            order = Order(processes > 0, layers, extra, rank, world, f"{folder}/meeting")
            process = _context.Process(target=serve, args=(theirs, order), daemon=True)
            process.start()
            theirs.close()
            listening.append(ours)
            started.append(process)
        try:
            return _hear(listening)
        finally:
            for process in started:
                process.kill()
                process.join()


def _hear(listening: list[Connection]) -> int | None:
    """Collects all answers. If one process runs out of memory, others may fail because of it."""
    grown, failures, waiting = 0, list[str](), {id(connection): connection for connection in listening}
    while waiting:
        there = wait(list(waiting.values()), PATIENCE_SECONDS)
        if not there:
            raise RuntimeError(f"no answer within {PATIENCE_SECONDS} s; heard so far: {failures}")
        for connection in [connection for connection in waiting.values() if connection in there]:
            answer = _answer(connection)
            if isinstance(answer, str) and any(text in answer for text in NO_ROOM):
                return None
            failures += [answer] if isinstance(answer, str) else []
            grown = grown if isinstance(answer, str) else max(grown, answer)
            del waiting[id(connection)]
    if failures:
        raise RuntimeError("\n".join(failures))
    return grown


def _answer(connection: Connection) -> int | str:
    try:
        answer: int | str = connection.recv()
    except EOFError:
        return "bad_alloc: the process ended, as where C++ has no memory to say why"
    return answer


def profiles() -> Profile:
    """Returns the costs of embedding, block and head."""
    with torch.device("meta"):
        layers = _layers()
    samples = {rows: torch.zeros(rows, WORDS, dtype=torch.int64) for rows in (1, 2)}
    return profile_layers(layers, samples, ["embedding", "block", "head"], optimizer_numbers=RMSPROP)


def planned(processes: int) -> int:
    """Returns the maximum number of layers by the planner."""
    embedding, block, head = profiles().layers

    def fits(count: int) -> bool:
        profile = Profile((embedding, *[block] * count, head))
        if not processes:
            return sum(naive(profile, ROWS)) <= MEMORY
        return plan_of(profile, [Device(MEMORY)] * processes, ROWS, [ROWS]) is not None

    return largest(fits, 16)


def measured(processes: int, near: int) -> Found:
    """Returns the maximum number of layers that train, starting the search at the planned number."""
    empty = train(processes, max(1, processes - 2), 0)
    assert empty is not None  # it had no limit

    def trains(layers: int) -> bool:
        room = train(processes, layers, empty + MEMORY) is not None
        print(f"{_name(processes)}: {layers} layers {'train' if room else 'have no room'}", flush=True)
        return room

    return Found(processes, near, _largest_around(near, trains), empty)


def _largest_around(near: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number that fits, in steps of a sixteenth of the guess, because each try is slow."""
    step = max(1, near // 16)
    low, high = near, near + step
    if fits(low):
        while fits(high):
            low, high = high, high + step
    else:
        low, high = near - step, near
        while not fits(low):
            low, high = low - step, low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _name(processes: int) -> str:
    return f"pipeline-{processes}" if processes else "naive-1"


def _line(found: Found, first: Found) -> list[str]:
    paper = PAPER[found.processes]
    shown = [paper, found.planned, found.measured]
    ratios = [
        None if own is None else own / one for own, one in zip(shown, (3, first.planned, first.measured), strict=True)
    ]
    return [
        _name(found.processes),
        *("" if own is None else f"{own} ({ratio:.1f})" for own, ratio in zip(shown, ratios, strict=True)),
        f"{found.empty / 2**20:.0f}",
    ]


def main() -> None:
    """Searches all sizes, and writes the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.table1_measured", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2, 4], choices=[0, 1, 2, 4])
    parser.add_argument("--keep", default="table1_measured", help="write the result under another name")
    options = parser.parse_args()
    os.environ.update(SMALL_CHUNKS)  # for the processes that are forked later
    about, found = facts(), [measured(processes, planned(processes)) for processes in options.processes]
    text = [
        "# Table 1 for real, at small scale",
        describe(about),
        f"Transformer, d={DIMENSIONS}, {ROWS} rows of {WORDS} words, M={ROWS}, float32, RMSprop. Layers, and "
        "in brackets how many times those of naive-1. Each process may have 128 MiB more than it takes for a network "
        "of hardly any layers, which is told beside; the planner has devices of 128 MiB.",
        table(
            ["", "paper L, 16 GiB", "planned L", "measured L", "MiB a process takes beside"],
            [_line(one, found[0]) for one in found],
        ),
        "The limit counts private memory that may be written, whole pages and what an operation needs for itself "
        "included, which the planner leaves out; messages between processes lie in shared memory, which it does not "
        "count.",
    ]
    write(options.keep, "\n\n".join(text), {"facts": about, "found": [asdict(one) for one in found]})


if __name__ == "__main__":
    main()
