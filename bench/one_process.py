"""Defines the runtimes that use one process."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor, nn

import gpipe
from bench.setup import Setup

Value: TypeAlias = Tensor | tuple[Tensor, ...]
"""What flows between stages."""


def tensors(value: Value) -> tuple[Tensor, ...]:
    """Returns the tensors in a value that stages exchange."""
    return value if isinstance(value, tuple) else (value,)


def cut(value: Value) -> Value:
    """Returns the same values, detached from their graph."""
    leaves = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in tensors(value))
    return leaves if isinstance(value, tuple) else leaves[0]


def backward(made: Value, gradients: Sequence[Tensor | None], given: Value) -> tuple[Tensor | None, ...]:
    """Adds gradients to `.grad` of the weights, and returns the gradients of the stage's inputs."""
    pairs = [(t, g) for t, g in zip(tensors(made), gradients, strict=True) if g is not None and t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return tuple(t.grad for t in tensors(given))


class _InOneProcess:
    """The base class of runtimes that hold the whole network."""

    threads = 1

    def prepare(self, setup: Setup) -> None:
        """Builds the layers and the mini-batch."""
        torch.set_num_threads(self.threads)
        self.setup = setup
        self.layers = setup.work.layers()
        self.whole = nn.Sequential(*self.layers)
        self.parameters = dict(self.whole.named_parameters())
        self.inputs, self.targets = setup.work.data()
        self.loss_fn = setup.work.loss_fn
        self.micro_inputs = self.inputs.tensor_split(setup.micro_batches)
        self.micro_targets = self.targets.tensor_split(setup.micro_batches)
        self.build()

    def build(self) -> None:
        """Builds the parts of the runtime except the layers."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Returns the gradients by name."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}


class PlainLoop(_InOneProcess):
    """Accumulates gradients in one thread: micro-batch after micro-batch through the unsplit layers."""

    newest_first = False

    def build(self) -> None:
        """Creates the gradient of a micro-batch's loss."""
        self.seed = torch.full((), 1 / self.setup.micro_batches)

    def step(self) -> None:
        """Runs each micro-batch forward and backward."""
        order = range(self.setup.micro_batches)
        for m in reversed(order) if self.newest_first else order:
            loss = self.loss_fn(self._forward(self.micro_inputs[m]), self.micro_targets[m])
            loss.backward(self.seed)

    def _forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.whole(inputs)
        return output


class NewestFirst(PlainLoop):
    """Runs the reference loop with backward passes in torchgpipe's order, which is autograd's."""

    newest_first = True


class Whole(_InOneProcess):
    """Runs the whole mini-batch at once, with two intra-op threads."""

    threads = 2

    def step(self) -> None:
        """Runs one mini-batch."""
        self.loss_fn(self.whole(self.inputs), self.targets).backward()


class WholeOneThread(Whole):
    """Runs the whole mini-batch at once, with one thread."""

    threads = 1


class Stages(_InOneProcess):
    """Runs and times the stages one after another in one thread. The ideal makespan is computed from their times."""

    def build(self) -> None:
        """Resets the times."""
        self.parts = self.setup.cut(self.layers)
        self.seed = torch.full((), 1 / self.setup.micro_batches)
        self.forwards: list[list[float]] = [[] for _ in self.parts]
        self.backwards: list[list[float]] = [[] for _ in self.parts]

    def step(self) -> None:
        """Runs and times each stage for each micro-batch."""
        for value, target in zip(self.micro_inputs, self.micro_targets, strict=True):
            self._micro_batch(value, target)

    def _micro_batch(self, inputs: Tensor, target: Tensor) -> None:
        held: list[tuple[Value, Value]] = []
        given: Value = inputs
        for stage, part in enumerate(self.parts):
            start = perf_counter()
            made: Value = part(given)
            if stage == len(self.parts) - 1:
                assert isinstance(made, Tensor)
                made = self.loss_fn(made, target)
            self.forwards[stage].append(perf_counter() - start)
            held.append((given, made))
            given = cut(made)
        gradients: Sequence[Tensor | None] = (self.seed,)
        for stage in reversed(range(len(self.parts))):
            given, made = held.pop()
            start = perf_counter()
            gradients = backward(made, gradients, given)
            self.backwards[stage].append(perf_counter() - start)


class GPipe(_InOneProcess):
    """Trains with gpipe's `step`."""

    remat = "always"
    micro_batches: int | None = None

    def __init__(self, schedule: str = "gpipe") -> None:
        self.schedule = schedule

    def build(self) -> None:
        """Builds the pipe."""
        self.pipe = gpipe.GPipe(
            self.layers,
            micro_batches=self.micro_batches or self.setup.micro_batches,
            seed=0,
            **self.setup.scheduled(self.schedule, self.remat),
        )

    def step(self) -> None:
        """Runs one mini-batch."""
        self.pipe.step(self.inputs, self.targets, self.loss_fn)


class GPipeCall(GPipe):
    """Trains with gpipe and `loss_fn(pipe(inputs), targets).backward()`."""

    def step(self) -> None:
        """Runs one mini-batch."""
        self.loss_fn(self.pipe(self.inputs), self.targets).backward()


class GPipeExceptLast(GPipe):
    """Trains with gpipe, which does not recompute the first micro-batch."""

    remat = "except_last"


class Naive(GPipe):
    """Trains with naive model parallelism: one micro-batch, so one stage works at a time."""

    micro_batches = 1


class TorchGPipe(_InOneProcess):
    """Trains with torchgpipe as released."""

    def build(self) -> None:
        """Wraps the layers."""
        import torchgpipe

        self.pipe: nn.Module = torchgpipe.GPipe(
            self.whole,
            balance=list(self.setup.cuts),
            devices=["cpu"] * self.setup.partitions,
            chunks=self.setup.micro_batches,
            checkpoint="always" if self.setup.remat else "never",
        )

    def step(self) -> None:
        """Runs one mini-batch."""
        self.loss_fn(self.pipe(self.inputs), self.targets).backward()
