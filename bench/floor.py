"""The floor: K threads, queues between them, the graph cut at the boundaries, the engine called directly.

Nothing else: no checks, no keyed randomness, no snapshot of buffers, no notes on errors, no recorder. What a runtime
takes beyond this is its own.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor, nn

from bench.workloads import Loss

Value: TypeAlias = Tensor | tuple[Tensor, ...]
Gradient: TypeAlias = tuple[Tensor | None, ...]

run_backward = torch.autograd.Variable._execution_engine.run_backward


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


@dataclass
class Step:
    """One mini-batch: what all stages share."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    losses: list[Tensor] = field(default_factory=list)
    values: list[SimpleQueue[Value]] = field(default_factory=list)
    gradients: list[SimpleQueue[Gradient]] = field(default_factory=list)


class Floor:
    """Threads for stages; `step` runs forward and backward of a mini-batch and returns the sum of the losses."""

    def __init__(self, stages: Sequence[nn.Module], loss_fn: Loss, *, remat: bool) -> None:
        self.stages = stages
        self.loss_fn = loss_fn
        self.remat = remat
        self.jobs: list[SimpleQueue[Step | None]] = [SimpleQueue() for _ in stages]
        self.done: SimpleQueue[None] = SimpleQueue()
        for stage in range(len(stages)):
            threading.Thread(target=self._serve, args=(stage,), daemon=True).start()

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Runs one mini-batch, given in micro-batches."""
        batch = Step(inputs, targets)
        batch.values = [SimpleQueue() for _ in self.stages]
        batch.gradients = [SimpleQueue() for _ in self.stages]
        for jobs in self.jobs:
            jobs.put(batch)
        for _ in self.stages:
            self.done.get()
        return sum(batch.losses, torch.zeros(()))

    def close(self) -> None:
        """Ends the threads."""
        for jobs in self.jobs:
            jobs.put(None)

    def _serve(self, stage: int) -> None:
        torch.set_num_threads(1)
        while (batch := self.jobs[stage].get()) is not None:
            if self.remat:
                self._row_with_remat(stage, batch)
            else:
                self._row(stage, batch)
            self.done.put(None)

    def _row(self, stage: int, batch: Step) -> None:
        layers, last, many = self.stages[stage], stage == len(self.stages) - 1, len(batch.inputs)
        kept: list[tuple[Value, Value]] = []
        for m in range(many):
            given = batch.values[stage].get() if stage else batch.inputs[m]
            made: Value = layers(given)
            if last:
                made = self._loss(made, batch, m)
            else:
                batch.values[stage + 1].put(cut(made))
            kept.append((given, made))
        seed = (torch.full((), 1 / many),)
        while kept:
            given, made = kept.pop()
            gradients = backward(made, seed if last else batch.gradients[stage].get(), given)
            if stage:
                batch.gradients[stage - 1].put(gradients)

    def _row_with_remat(self, stage: int, batch: Step) -> None:
        layers, last, many = self.stages[stage], stage == len(self.stages) - 1, len(batch.inputs)
        kept: list[Value] = []
        with torch.no_grad():
            for m in range(many):
                given = batch.values[stage].get() if stage else batch.inputs[m]
                kept.append(given)
                made = layers(given)
                if not last:
                    batch.values[stage + 1].put(cut(made))
        seed = (torch.full((), 1 / many),)
        while kept:
            given = kept.pop()
            made = layers(given)
            if last:
                made = self._loss(made, batch, len(kept))
            gradients = backward(made, seed if last else batch.gradients[stage].get(), given)
            if stage:
                batch.gradients[stage - 1].put(gradients)

    def _loss(self, made: Value, batch: Step, m: int) -> Tensor:
        assert isinstance(made, Tensor)
        loss = self.loss_fn(made, batch.targets[m])
        batch.losses.append(loss.detach())
        return loss
