"""Measures the overhead per cell, a forward or backward of one stage: `python -m bench.cells [--tables loops]`.

Tiny layers make the overhead visible. It is measured relative to the reference loop and, with recomputation, to a
bare engine. The bare engine splits the graph, runs forward passes without a graph and again with one, and checks
nothing. In bare threads, it shows the cost of Python's global interpreter lock. The kinds of a table take turns.
Results are the CPU time of all threads, and how often a thread slept. A step has 2 K M cells, also with
recomputation.

The launches table uses layers that sleep in parts and hold the interpreter lock in between, like code that launches
kernels. It is measured by wall time, also relative to bare threads that do nothing else.
"""

import argparse
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import gpipe
from bench.ideal import makespan
from bench.machine import facts
from bench.report import describe, interval, table

K, M, WIDTH, ROWS = 2, 64, 32, 4
DRIVERS = ("lockstep", "threads")
REMATS = ("never", "always")
LAUNCHES, SLEEP, HELD = 20, 100e-6, 5e-6
"""Parts of a layer that launches, and seconds that each sleeps and holds the lock."""
VOCABULARY, FEATURES, HEADS = 512, 512, 8
Step = Callable[[], object]


def layers() -> list[nn.Module]:
    """Returns the same layers at every call."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2 * K)]


def data(micro_batches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, ROWS * micro_batches, WIDTH)
    return x, y


def plain_loop(micro_batches: int = M) -> tuple[Step, nn.Module]:
    """Runs micro-batch after micro-batch through the whole model."""
    model, (x, y) = nn.Sequential(*layers()), data(micro_batches)

    def step() -> None:
        for a, b in zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True):
            mse_loss(model(a), b).backward(torch.tensor(1 / micro_batches))

    return step, model


def bare_engine(*, recomputes: bool, threads: bool = False, micro_batches: int = M) -> tuple[Step, nn.Module]:
    """Runs all forward passes, then all backward passes, with the graph split between stages."""
    own, (x, y) = layers(), data(micro_batches)
    stages = [nn.Sequential(*own[2 * k : 2 * k + 2]) for k in range(K)]
    values, gradients = ([SimpleQueue[Tensor]() for _ in range(K + 1)] for _ in range(2))
    targets = y.tensor_split(micro_batches)
    kept: list[list[Any]] = [[None] * micro_batches for _ in range(K)]

    def run(stage: int, given: Tensor, m: int) -> tuple[Tensor, Tensor]:
        leaf = given.detach().requires_grad_(stage > 0)
        made = stages[stage](leaf)
        return leaf, mse_loss(made, targets[m]) if stage == K - 1 else made

    def forward(stage: int, m: int) -> None:
        value = values[stage].get()
        if recomputes:
            kept[stage][m] = value
            with torch.no_grad():
                value = stages[stage](value)
        else:
            kept[stage][m] = run(stage, value, m)
            value = kept[stage][m][1]
        if stage < K - 1:
            values[stage + 1].put(value)

    def backward(stage: int, m: int) -> None:
        gradient = gradients[stage].get() if stage < K - 1 else torch.tensor(1 / micro_batches)
        at, kept[stage][m] = kept[stage][m], None
        leaf, made = run(stage, at, m) if recomputes else at
        torch.autograd.Variable._execution_engine.run_backward(
            (made,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        if stage:
            gradients[stage - 1].put(leaf.grad)  # type: ignore[arg-type]  # there is one

    def rank(own: Sequence[int]) -> None:
        for m in range(micro_batches):
            for stage in own:
                forward(stage, m)
        for m in range(micro_batches):
            for stage in reversed(own):
                backward(stage, m)

    pool = ThreadPoolExecutor(K, initializer=torch.set_num_threads, initargs=(1,))  # new threads do not inherit it

    def step() -> None:
        for value in x.tensor_split(micro_batches):
            values[0].put(value)
        if threads:
            list(pool.map(rank, [[stage] for stage in range(K)]))
        else:
            rank(range(K))

    return step, nn.Sequential(*stages)


def piped(driver: str, remat: str, micro_batches: int = M, *, recorded: bool = False) -> tuple[Step, nn.Module]:
    """Returns a step of the pipe."""
    pipe = gpipe.GPipe(layers(), K, micro_batches, remat=remat, driver=driver, seed=1)
    if recorded:
        pipe.recording = gpipe.record(pipe, keep=1)  # kept alive by it
    x, y = data(micro_batches)
    return partial(pipe.step, x, y, mse_loss), pipe


def sleeps() -> int:
    """Returns how often the threads of this process have voluntarily released their CPU."""
    return getrusage(RUSAGE_SELF).ru_nvcsw


def in_turns(
    kinds: dict[str, tuple[Step, nn.Module]], rounds: int, cells: dict[str, int]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Measures, by kind and round, the CPU microseconds per cell and how often a thread slept."""
    found: dict[str, list[float]] = {name: [] for name in kinds}
    slept: dict[str, list[float]] = {name: [] for name in kinds}
    gc.collect()
    gc.freeze()  # what imports have made: full collections of that would fall on now one kind and now another
    for turn in range(rounds + 2):
        for name, (step, model) in kinds.items():
            times = max(1, 3000 // cells[name])
            before, start = sleeps(), time.process_time()
            for _ in range(times):
                step()
                if turn > 1:
                    model.zero_grad()
            if turn > 1:
                found[name].append(1e6 * (time.process_time() - start) / times / cells[name])
                slept[name].append((sleeps() - before) / times / cells[name])
    return found, {name: median(some) for name, some in slept.items()}


def check(kinds: dict[str, tuple[Step, nn.Module]]) -> None:
    """Asserts that all kinds with the same M are bitwise identical."""
    every: list[list[Any]] = []
    for step, model in kinds.values():
        step()
        every.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    for some in every[1:]:
        assert all(torch.equal(*pair) for pair in zip(every[0], some, strict=True))


def ratio(some: Sequence[float], others: Sequence[float]) -> str:
    pairs = [a / b for a, b in zip(some, others, strict=True)]
    low, high = interval(pairs)
    return f"{median(pairs):.3f} ({low:.3f}-{high:.3f})"


def over_loops(rounds: int) -> str:
    """Compares the cells of each driver with the reference loop and the bare engines."""
    kinds = {
        "plain loop": plain_loop(),
        "bare engine": bare_engine(recomputes=False),
        "bare engine that recomputes": bare_engine(recomputes=True),
        "bare threads, never": bare_engine(recomputes=False, threads=True),
        "bare threads, always": bare_engine(recomputes=True, threads=True),
    }
    kinds |= {f"{driver}, {remat}": piped(driver, remat) for driver in DRIVERS for remat in REMATS}
    check(kinds)
    found, slept = in_turns(kinds, rounds, dict.fromkeys(kinds, 2 * K * M))
    plain, bare = found["plain loop"], found["bare engine that recomputes"]
    rows = [
        [
            name,
            f"{median(some):.0f}",
            ratio(some, plain),
            ratio(some, bare) if "always" in name else "",
            ratio(some, found[f"bare {name}"]) if name.startswith("threads") else "",
            f"{slept[name]:.2f}",
        ]
        for name, some in found.items()
    ]
    beside = [f"over {what}" for what in ("the plain loop", "a bare engine that recomputes", "bare threads")]
    return table(["cells", "us", *beside, "sleeps"], rows)


def over_sizes(rounds: int) -> str:
    """Compares cells of steps with many micro-batches and with few."""
    sizes = (64, 256, 1024)
    rows = []
    for remat in REMATS:
        kinds = {f"{d}, {remat}, {m}": piped(d, remat, m) for d in DRIVERS for m in sizes}
        cells = {name: 2 * K * int(name.rpartition(" ")[2]) for name in kinds}
        found, _ = in_turns(kinds, rounds, cells)
        for driver in DRIVERS:
            first, *others = (found[f"{driver}, {remat}, {m}"] for m in sizes)
            rows.append([f"{driver}, {remat}", f"{median(first):.0f}", *(ratio(some, first) for some in others)])
    return table(["cells", "M=64, us", *(f"M={m}, over M=64" for m in sizes[1:])], rows)


def recorded(rounds: int) -> str:
    """Compares cells with and without recording."""
    kinds = {f"{d}{', on' * on}": piped(d, "never", recorded=on) for d in DRIVERS for on in (False, True)}
    found, _ = in_turns(kinds, rounds, dict.fromkeys(kinds, 2 * K * M))
    rows = [[driver, ratio(found[f"{driver}, on"], found[driver])] for driver in DRIVERS]
    return table(["recorder on", "over off"], rows)


def launch() -> None:
    """Simulates the launch of a layer's kernels: short times with the interpreter lock, and releases in between."""
    for _ in range(LAUNCHES):
        until = time.perf_counter() + HELD
        while time.perf_counter() < until:
            pass
        time.sleep(SLEEP)


class Launches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        launch()
        return value + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        launch()
        return gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        return Launches.apply(value * self.weight)


def launched_bare(pool: ThreadPoolExecutor, stages: int, micro_batches: int) -> float:
    """Measures threads that launch and wait for each other like ranks, and do nothing else."""
    into = [SimpleQueue[None]() for _ in range(stages)]

    def rank(stage: int, before: int | None, behind: int | None) -> None:
        for _ in range(micro_batches):
            if before is not None:
                into[stage].get()
            launch()
            if behind is not None:
                into[behind].put(None)

    start = time.perf_counter()
    for row in (range(stages), range(stages)[::-1]):  # forwards, and then backwards
        line = [None, *row, None]
        list(pool.map(rank, row, line[:-2], line[2:]))
    return time.perf_counter() - start


def launches(rounds: int, stages: int = 8, micro_batches: int = 32) -> str:
    """Compares steps of launching layers with the sum of the layer's times, and with bare threads."""
    found, alone, bare = list[float](), list[float](), list[float]()
    x = torch.ones(micro_batches, 1)
    own, pool = [Layer() for _ in range(stages)], ThreadPoolExecutor(stages)
    with gpipe.GPipe(own, stages, micro_batches, remat="never", seed=1) as pipe, pool:
        for turn in range(rounds + 1):
            start = time.perf_counter()
            for _ in range(50):
                launch()
            one = (time.perf_counter() - start) / 50
            start = time.perf_counter()
            pipe.step(x, x, mse_loss)
            if turn:
                alone.append(makespan([one] * stages, [one] * stages, micro_batches, remat=False))
                found.append(time.perf_counter() - start)
                bare.append(launched_bare(pool, stages, micro_batches))
    times = [f"{1e3 * median(some):.1f}" for some in (alone, bare, found)]
    ratios = [ratio(bare, alone), ratio(found, alone), ratio(found, bare)]
    head = ["launches", "ideal, ms", "bare threads, ms", "a step, ms"]
    head += ["bare threads over ideal", "a step over ideal", "over bare threads"]
    return table(head, [[f"K={stages}, M={micro_batches}", *times, *ratios]])


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, FEATURES)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, VOCABULARY)

    def forward(self, value: Tensor) -> Tensor:
        return self.out(self.norm(value))


class Language(nn.Module):
    """A model with its own forward method, not a sequence of layers."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.head = Embedding(), Head()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(FEATURES, HEADS, 4 * FEATURES, dropout=0.1, batch_first=True)
            for _ in range(blocks)
        )

    def forward(self, words: Tensor) -> Tensor:
        value = self.embed(words)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def blocks(rounds: int, blocks: int, rows: int, length: int) -> tuple[list[Sequence[str]], dict[str, object]]:
    """Measures the CPU seconds of steps of the model, and of the same blocks as a list of layers."""
    torch.manual_seed(0)
    model = Language(blocks)
    by_hand = nn.Sequential(model.embed, *model.blocks, model.head)
    words = torch.randint(0, VOCABULARY, (8 * rows, length))
    with torch.no_grad():
        value = model.embed(words[:rows])
        model.blocks[0](value)
        start = time.process_time()
        model.blocks[0](value)
        block = 1e3 * (time.process_time() - start)
    cuts = [blocks // 2 + 1, blocks - blocks // 2 + 1]
    pipes = {
        "by hand": gpipe.GPipe(by_hand, cuts, 8, seed=0),
        "the model": gpipe.GPipe(gpipe.layers_of(model, words[:2]), cuts, 8, seed=0),
    }

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    found: dict[str, list[float]] = {name: [] for name in pipes}
    losses = dict[str, Tensor]()
    for _ in range(rounds + 1):
        for name, pipe in pipes.items():
            pipe.step_number = 0
            start = time.process_time()
            losses[name] = pipe.step(words, words, loss_fn)
            found[name].append(time.process_time() - start)
            model.zero_grad()
    assert torch.equal(*losses.values())
    found = {name: seconds[1:] for name, seconds in found.items()}
    ratios = [one / other for one, other in zip(found["the model"], found["by hand"], strict=True)]
    low, high = interval(ratios)
    seconds = [f"{median(found[name]):.3f}" for name in found]
    return [[f"{block:.0f}", *seconds, f"{median(ratios):.4f} ({low:.4f}-{high:.4f})"]], dict(found)


def beside_a_model(rounds: int) -> str:
    """Compares steps of blocks as a model and as a list of layers."""
    rows, _ = blocks(4 * rounds, blocks=4, rows=1, length=32)
    return table(["block, ms forward", "by hand, CPU s a step", "the model, CPU s a step", "ratio (95 %)"], rows)


ROWS_OF = {
    "loops": over_loops,
    "sizes": over_sizes,
    "recorder": recorded,
    "launches": launches,
    "model": beside_a_model,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.cells", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tables", default=",".join(ROWS_OF), help="which of them")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(describe(facts()), f"\n{gpipe.__file__}")
    for name in options.tables.split(","):
        print(f"\n{ROWS_OF[name](options.rounds)}", flush=True)


if __name__ == "__main__":
    main()
