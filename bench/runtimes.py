"""The runtimes that are compared, behind one interface: prepare, step, gradients.

A step is the forward and backward of one mini-batch. The loss of a micro-batch counts 1/M, so all runtimes compute
the same gradients. Layers are cut where `Setup.cuts` says, for all runtimes alike.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpipe
from bench.floor import Floor, Value, backward, cut
from bench.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Setup:
    """What a runtime is to do, and for one of several processes which of them it is."""

    workload: str
    partitions: int
    micro_batches: int
    cuts: tuple[int, ...]
    remat: bool
    rank: int = 0
    world: int = 1
    meeting: str = ""  # a file where processes find each other

    @property
    def work(self) -> Workload:
        """The workload of that name."""
        return WORKLOADS[self.workload]


class Runtime(Protocol):
    """One way to run a mini-batch."""

    def prepare(self, setup: Setup) -> None:
        """Builds everything; the first step may still be slower than others."""

    def step(self) -> None:
        """Forward and backward of one mini-batch."""

    def gradients(self) -> Mapping[str, Tensor]:
        """The gradients by the names of `nn.Sequential(*layers)`; of several processes, each gives its own."""


class _InOneProcess:
    """What runtimes share that hold the whole network."""

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
        """Makes what the runtime needs beyond the layers."""

    def gradients(self) -> Mapping[str, Tensor]:
        """The gradients by name."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def stages(self) -> list[nn.Sequential]:
        """The layers, cut."""
        first = [sum(self.setup.cuts[:stage]) for stage in range(len(self.setup.cuts))]
        return [nn.Sequential(*self.layers[a : a + n]) for a, n in zip(first, self.setup.cuts, strict=True)]


class PlainLoop(_InOneProcess):
    """Gradient accumulation, one thread: micro-batch after micro-batch through the unpartitioned layers."""

    newest_first = True

    def build(self) -> None:
        """Makes the gradient of a micro-batch's loss."""
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


class OldestFirst(PlainLoop):
    """The plain loop in the order in which torch's own schedules run their backwards."""

    newest_first = False


class Whole(_InOneProcess):
    """The whole mini-batch at once, two threads in every operation."""

    threads = 2

    def step(self) -> None:
        """Runs it."""
        self.loss_fn(self.whole(self.inputs), self.targets).backward()


class BareThreads(_InOneProcess):
    """The floor."""

    def build(self) -> None:
        """Starts the threads."""
        self.floor = Floor(self.stages(), self.loss_fn, remat=self.setup.remat)

    def step(self) -> None:
        """Runs one mini-batch."""
        self.floor.step(self.micro_inputs, self.micro_targets)


class Stages(_InOneProcess):
    """The stages one after another in one thread, to time them: what the ideal makespan is made of."""

    def build(self) -> None:
        """Begins with no times."""
        self.parts = self.stages()
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
    """This library, trained by `step`."""

    remat = "always"
    micro_batches: int | None = None

    def build(self) -> None:
        """Builds the pipe."""
        self.pipe = gpipe.GPipe(
            self.layers,
            self.setup.cuts,
            self.micro_batches or self.setup.micro_batches,
            remat=self.remat if self.setup.remat else "never",
            seed=0,
        )

    def step(self) -> None:
        """Runs one mini-batch."""
        self.pipe.step(self.inputs, self.targets, self.loss_fn)


class GPipeCall(GPipe):
    """This library, trained by `loss_fn(pipe(inputs), targets).backward()`."""

    def step(self) -> None:
        """Runs one mini-batch."""
        self.loss_fn(self.pipe(self.inputs), self.targets).backward()


class GPipeExceptLast(GPipe):
    """This library, the last micro-batch not recomputed."""

    remat = "except_last"


class Naive(GPipe):
    """Naive model parallelism: one micro-batch, so one stage works at a time."""

    micro_batches = 1


class TorchGPipe(_InOneProcess):
    """torchgpipe as shipped."""

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


class _Part(nn.Module):
    """Consecutive layers as a stage of torch's pipelining: what flows comes as arguments."""

    def __init__(self, layers: Mapping[str, nn.Module], *, remat: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.remat = remat

    def forward(self, *state: Tensor) -> Value:
        made: Value = checkpoint(self._run, *state, use_reentrant=False) if self.remat else self._run(*state)
        return made

    def _run(self, *state: Tensor) -> Value:
        value: Value = state if len(state) > 1 else state[0]
        for layer in self.layers.values():
            value = layer(value)
        return value


class _Torch:
    """torch.distributed.pipelining, a process for each partition, over gloo."""

    stages_per_rank = 1

    def prepare(self, setup: Setup) -> None:
        """Joins the other processes and builds the own stages."""
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage

        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", f"file://{setup.meeting}", rank=setup.rank, world_size=setup.world)
        self.setup, self.dist = setup, dist
        self.inputs, self.targets = setup.work.data()
        named = [(str(at), layer) for at, layer in enumerate(setup.work.layers())]
        mine = [self._part(named, stage) for stage in self._own_stages()]
        self.parts = mine
        stages = [
            PipelineStage(part, stage, len(setup.cuts), torch.device("cpu"))
            for stage, part in zip(self._own_stages(), mine, strict=True)
        ]
        self.has_first = 0 in self._own_stages()
        self.has_last = len(setup.cuts) - 1 in self._own_stages()
        self.schedule = self.make_schedule(stages)

    def make_schedule(self, stages: Sequence[Any]) -> Any:
        """Makes the schedule of this rank."""
        raise NotImplementedError

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """What a micro-batch adds to the loss."""
        return self.setup.work.loss_fn(output, target) / self.setup.micro_batches

    def _own_stages(self) -> list[int]:
        rank, world = self.setup.rank, self.setup.world
        return [rank] if self.stages_per_rank == 1 else [rank, 2 * world - 1 - rank]  # there and back: a V

    def _part(self, named: Sequence[tuple[str, nn.Module]], stage: int) -> _Part:
        first = sum(self.setup.cuts[:stage])
        return _Part(dict(named[first : first + self.setup.cuts[stage]]), remat=self.setup.remat)

    def step(self) -> None:
        """Runs this rank's part of one mini-batch."""
        inputs = (self.inputs,) if self.has_first else ()
        if self.has_last:
            self.schedule.step(*inputs, target=self.targets, losses=[], return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)

    def gradients(self) -> Mapping[str, Tensor]:
        """The gradients of the own stages by name."""
        return {
            name.removeprefix("layers."): p.grad
            for part in self.parts
            for name, p in part.named_parameters()
            if p.grad is not None
        }

    def barrier(self) -> None:
        """Waits for the other processes."""
        self.dist.barrier()


class TorchFillDrain(_Torch):
    """torch.distributed.pipelining, ScheduleGPipe."""

    def make_schedule(self, stages: Sequence[Any]) -> Any:
        """Makes the schedule of this rank."""
        from torch.distributed.pipelining import ScheduleGPipe

        return ScheduleGPipe(stages[0], self.setup.micro_batches, self.loss_fn, scale_grads=False)


class Torch1F1B(_Torch):
    """torch.distributed.pipelining, Schedule1F1B."""

    def make_schedule(self, stages: Sequence[Any]) -> Any:
        """Makes the schedule of this rank."""
        from torch.distributed.pipelining import Schedule1F1B

        return Schedule1F1B(stages[0], self.setup.micro_batches, self.loss_fn, scale_grads=False)


class TorchZBV(_Torch):
    """torch.distributed.pipelining, ScheduleZBVZeroBubble."""

    stages_per_rank = 2

    def make_schedule(self, stages: Sequence[Any]) -> Any:
        """Makes the schedule of this rank."""
        from torch.distributed.pipelining import ScheduleZBVZeroBubble

        return ScheduleZBVZeroBubble(list(stages), self.setup.micro_batches, self.loss_fn, scale_grads=False)


@dataclass(frozen=True)
class Entry:
    """How a runtime is started: in how many processes for each partition, and with how many stages for each."""

    make: Callable[[], Runtime]
    title: str
    processes: bool = False
    stages_per_rank: int = 1


RUNTIMES: dict[str, Entry] = {
    "plain": Entry(PlainLoop, "plain loop, one thread"),
    "oldest": Entry(OldestFirst, "plain loop, oldest first"),
    "whole": Entry(Whole, "whole mini-batch, two threads"),
    "stages": Entry(Stages, "stage times"),
    "floor": Entry(BareThreads, "bare threads"),
    "gpipe": Entry(GPipe, "**gpipe** `step`"),
    "call": Entry(GPipeCall, "**gpipe** `loss.backward()`"),
    "except_last": Entry(GPipeExceptLast, "**gpipe** `step`, `except_last`"),
    "naive": Entry(Naive, "naive (gpipe, M=1)"),
    "torch-gpipe": Entry(TorchFillDrain, "torch GPipe", processes=True),
    "torch-1f1b": Entry(Torch1F1B, "torch 1F1B", processes=True),
    "torch-zbv": Entry(TorchZBV, "torch ZBV", processes=True, stages_per_rank=2),
    "torchgpipe": Entry(TorchGPipe, "torchgpipe"),
}
