"""The floor: K threads, queues between them, the graph cut at the boundaries, the engine called directly.

Nothing else: no checks, no keyed randomness, no snapshot of buffers, no notes on errors, no recorder. What a runtime
takes beyond this is its own. `process_floor` does the same with processes.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from bench.workloads import Loss

Value: TypeAlias = Tensor | tuple[Tensor, ...]
Gradient: TypeAlias = tuple[Tensor | None, ...]
T = TypeVar("T")

run_backward = torch.autograd.Variable._execution_engine.run_backward


class Line(Protocol[T]):
    """What passes from a stage to its neighbour, in order."""

    def put(self, item: T, /) -> None:
        """Sends."""

    def get(self) -> T:
        """Waits for the next."""


def tensors(value: Value) -> tuple[Tensor, ...]:
    """The tensors of what flows between stages."""
    return value if isinstance(value, tuple) else (value,)


def leaf(tensor: Tensor) -> Tensor:
    """The same values, cut from their graph."""
    cut = tensor.detach()
    return cut.requires_grad_() if cut.is_floating_point() else cut


def cut(value: Value) -> Value:
    """The same values, cut from their graph."""
    return tuple(map(leaf, value)) if isinstance(value, tuple) else leaf(value)


def backward(made: Value, gradients: Sequence[Tensor | None], given: Value) -> Gradient:
    """Adds to `.grad` of the weights; gives the gradients of what the stage was given."""
    pairs = [(t, g) for t, g in zip(tensors(made), gradients, strict=True) if g is not None and t.requires_grad]
    run_backward(tuple(t for t, _ in pairs), tuple(g for _, g in pairs), False, False, (), True, True)
    return tuple(t.grad for t in tensors(given))


@dataclass(frozen=True)
class Stage:
    """One stage, and the lines to its neighbours; the first and the last lack two."""

    layers: Callable[[Value], Value]
    loss_fn: Loss
    values: Line[Value] | None = None
    next_values: Line[Value] | None = None
    gradients: Line[Gradient] | None = None
    next_gradients: Line[Gradient] | None = None

    def run(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Runs one mini-batch, given in micro-batches; gives the losses, if this is the last stage."""
        kept: list[Any] = []
        losses = []
        for m in range(len(inputs)):
            given = cut(self.values.get()) if self.values else inputs[m]
            made = self.layers(given)
            if self.next_values:
                self.next_values.put(made)
            else:
                made = self.loss_fn(_one(made), targets[m])
                losses.append(made.detach())
            kept.append((given, made))
        seed = (torch.full((), 1 / len(inputs)),)
        for m in range(len(inputs)):
            (given, made), kept[m] = kept[m], None
            gradients = backward(made, self.next_gradients.get() if self.next_gradients else seed, given)
            if self.gradients:
                self.gradients.put(gradients)
        return losses

    def run_with_remat(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Likewise, but keeps only what the stage was given."""
        kept: list[Any] = []
        losses = []
        with torch.no_grad():
            for m in range(len(inputs)):
                kept.append(cut(self.values.get()) if self.values else inputs[m])
                made = self.layers(kept[-1])
                if self.next_values:
                    self.next_values.put(made)
        seed = (torch.full((), 1 / len(inputs)),)
        for m in range(len(inputs)):
            given, kept[m] = kept[m], None
            made = self.layers(given)
            if not self.next_values:
                made = self.loss_fn(_one(made), targets[m])
                losses.append(made.detach())
            gradients = backward(made, self.next_gradients.get() if self.next_gradients else seed, given)
            if self.gradients:
                self.gradients.put(gradients)
        return losses


def _one(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


Job: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]


class Floor:
    """Threads for stages; `step` runs forward and backward of a mini-batch and returns the sum of the losses."""

    def __init__(self, stages: Sequence[nn.Module], loss_fn: Loss, *, remat: bool) -> None:
        self.remat = remat
        self.jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in stages]
        self.done: SimpleQueue[list[Tensor]] = SimpleQueue()
        values: list[SimpleQueue[Value] | None] = [None, *(SimpleQueue() for _ in stages[1:]), None]
        gradients: list[SimpleQueue[Gradient] | None] = [None, *(SimpleQueue() for _ in stages[1:]), None]
        for at, layers in enumerate(stages):
            stage = Stage(layers, loss_fn, values[at], values[at + 1], gradients[at], gradients[at + 1])
            threading.Thread(target=self._serve, args=(stage, self.jobs[at]), daemon=True).start()

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Runs one mini-batch, given in micro-batches."""
        for jobs in self.jobs:
            jobs.put((inputs, targets))
        return sum((loss for _ in self.jobs for loss in self.done.get()), torch.zeros(()))

    def close(self) -> None:
        """Ends the threads."""
        for jobs in self.jobs:
            jobs.put(None)

    def _serve(self, stage: Stage, jobs: SimpleQueue[Job | None]) -> None:
        torch.set_num_threads(1)
        while (job := jobs.get()) is not None:
            self.done.put(stage.run_with_remat(*job) if self.remat else stage.run(*job))
