"""Jobs with all that layers may hand on to the next: what leaves a process, what comes into another."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gpipe
from tests.support.kinds.values import WIDTH, Makes, Uses, loss_of
from tests.support.odd_layers import Apply
from tests.support.outcomes import Outcome, noted
from tests.support.plain_loop import Tree, weights_of
from tests.support.processes.digests import Digests, digest, digests
from tests.support.said import said
from tests.support.same_bits_stories import Make

SEED, MICRO_BATCHES = 5, 3
Json = Any


def describe(value: Tree) -> Json:
    """What must arrive: the tree, and of its tensors type, layout, bits, and which are the same one."""
    leaves, spec = pytree.tree_flatten(value)
    first = {id(leaf): at for at, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, Tensor)}
    return [str(spec), [_describe_leaf(leaf, first) for leaf in leaves]]


def _describe_leaf(leaf: object, first: dict[int, int]) -> Json:
    if not isinstance(leaf, Tensor):
        return [type(leaf).__name__, repr(leaf)]
    return [
        digest(torch.empty(leaf.shape, dtype=leaf.dtype).copy_(leaf)),
        list(leaf.stride()),
        leaf.requires_grad,
        first[id(leaf)],
    ]


def inputs(rows: int = 3 * MICRO_BATCHES) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(6))


def run_value(make: Make, kind: str) -> tuple[list[Json], list[Json], Outcome]:
    """A value over all stages: what was made, what was given, and what the step left."""
    seen: tuple[list[Json], list[Json]] = ([], [])
    with weights_of(4):
        layers = [
            Makes(kind, lambda v: seen[0].append(describe(v))),
            Apply(lambda value: value),
            Uses(lambda v: seen[1].append(describe(v))),
        ]
    pipe = make(layers)
    found: Outcome = {"loss": pipe.step(inputs(), inputs().cos(), loss_of)}
    return *seen, found | noted(pipe, "end")


def expected(kind: str) -> Digests:
    return digests(run_value(locally, kind)[2])


def carry(rank: int, world: int, kind: str) -> Json:
    made, given, found = run_value(maker(world), kind)
    return [made, given, digests(found)]


def maker(world: int) -> Make:
    return partial(gpipe.GPipe, partitions=world, micro_batches=MICRO_BATCHES, seed=SEED, driver="process")


locally: Make = partial(gpipe.GPipe, partitions=1, micro_batches=MICRO_BATCHES, seed=SEED, driver="lockstep")


# What cannot travel.


@dataclass
class Held:
    tensor: Tensor


class Marked(Tensor):
    """A tensor of a class of its own."""


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "set": (lambda y: {1, 2}, "[cannot-be-sent]"),
    "array": (lambda y: np.ones(3), "[cannot-be-sent]"),
    "module": (lambda y: nn.Tanh(), "[cannot-be-sent]"),
    "dataclass": (lambda y: Held(y), "[tensors-in-unregistered-class]"),
    "sparse": (lambda y: y.detach().to_sparse(), "[cannot-be-sent]"),
    "subclass": (lambda y: y.detach().as_subclass(Marked), "[cannot-be-sent]"),
    "key": (lambda y: {frozenset(): y}, "[cannot-be-sent]"),
    "metrics": (lambda y: None, "[cannot-be-sent]"),
}


class Sometimes(nn.Module):
    """Hands on something that cannot travel when told to."""

    def __init__(self, kind: str, when: int) -> None:
        super().__init__()
        self.kind, self.when = kind, when
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tree:
        y = self.linear(x)
        self.calls += 1
        return (y, REFUSED[self.kind][0](y) if self.calls == self.when else None)


class First(nn.Module):
    def forward(self, value: tuple[Tensor, object]) -> Tensor:
        return value[0]


def with_an_object(output: Tensor, target: Tensor) -> tuple[Tensor, object]:
    return F.mse_loss(output, target), object()


def refuse(rank: int, world: int, kind: str) -> Json:
    """A step, one in which a micro-batch cannot travel, and another: losses, and what was raised."""
    with weights_of(4):
        layers = [
            Sometimes(kind, MICRO_BATCHES + 2),
            *(Apply(lambda value: value) for _ in range(world - 2)),
            First(),
        ]
    pipe = maker(world)(layers, remat="never")
    losses = [pipe.step(inputs(), inputs().cos(), F.mse_loss)]
    raised = said(lambda: pipe.step(inputs(), inputs().cos(), with_an_object if kind == "metrics" else F.mse_loss))
    pipe.zero_grad()
    losses.append(pipe.step(inputs(), inputs().cos(), F.mse_loss))
    found: Outcome = {f"{step} loss": loss for step, loss in enumerate(losses)}
    found |= noted(pipe, "end")
    return [raised, digests(found)]


def unrefused() -> Digests:
    with weights_of(4):
        layers = [Sometimes("set", 0), First()]
    pipe = locally(layers)
    found: Outcome = {"0 loss": pipe.step(inputs(), inputs().cos(), F.mse_loss)}
    pipe.zero_grad()
    found["1 loss"] = pipe.step(inputs(), inputs().cos(), F.mse_loss)
    found |= noted(pipe, "end")
    return digests(found)


# What waits.


class Slow(nn.Module):
    """Takes its time, and notes what lies waiting for this process meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.most = [0, 0]
        self.look: Callable[[], list[int]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        if self.look is not None:
            self.most = list(map(max, self.most, self.look()))
        return self.linear(x)


def shared_bytes() -> int:
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:gpipe" in line]
    return sum(int(row[0].split("-")[1], 16) - int(row[0].split("-")[0], 16) for row in rows)


def wait(rank: int, world: int, micro_batches: int, rows: int) -> list[int]:
    """Steps of many micro-batches with a slow last stage: the most shared memory, and messages taken too early."""
    slow = Slow()
    layers = [nn.Linear(WIDTH, WIDTH), *(nn.Tanh() for _ in range(world - 2)), slow]
    pipe = gpipe.GPipe(layers, world, micro_batches, seed=0, driver="process")
    before = shared_bytes()
    slow.look = lambda: [shared_bytes() - before, len(pipe._processes.linked()._early)]  # type: ignore[attr-defined]  # over processes
    x = torch.ones(rows * micro_batches, WIDTH)
    for _ in range(2):
        pipe.step(x, x, F.mse_loss)
    found = list(map(max, slow.most, slow.look()))
    pipe.close()
    return found
