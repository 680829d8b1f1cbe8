"""Defines the runtimes that use several processes and torch.distributed with gloo."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

import gpipe
from bench.one_process import Value
from bench.setup import Setup


class _Ranks:
    """The base class of runtimes with several processes.

    Attributes:
        parts: The modules of this process.
    """

    parts: Sequence[nn.Module]

    def prepare(self, setup: Setup) -> None:
        """Connects to the other processes, and builds the part of this one."""
        torch.set_num_threads(1)
        os.environ.update(RANK=f"{setup.rank}", LOCAL_RANK=f"{setup.rank}", WORLD_SIZE=f"{setup.world}")
        os.environ.update(GLOO_SOCKET_IFNAME=setup.interface, MASTER_ADDR=setup.address)
        dist.init_process_group("gloo", f"file://{setup.meeting}", rank=setup.rank, world_size=setup.world)
        self.setup = setup
        self.inputs, self.targets = setup.work.data()
        self.build(setup.work.layers())

    def build(self, layers: list[nn.Module]) -> None:
        """Builds the runtime of this process, and sets `parts`."""
        raise NotImplementedError

    def gradients(self) -> Mapping[str, Tensor]:
        """Returns the gradients of this process by name."""
        return {name: p.grad for part in self.parts for name, p in part.named_parameters() if p.grad is not None}

    def barrier(self) -> None:
        """Waits for the other processes."""
        dist.barrier()


class GPipeProcesses(_Ranks):
    """Trains with gpipe's `step`, one process per partition."""

    def __init__(self, schedule: str = "gpipe") -> None:
        self.schedule = schedule

    def build(self, layers: list[nn.Module]) -> None:
        """Builds the pipe."""
        self.pipe = gpipe.GPipe(
            layers,
            micro_batches=self.setup.micro_batches,
            seed=0,
            driver="process",
            **self.setup.scheduled(self.schedule, "always"),
        )
        self.parts = [self.pipe]

    def step(self) -> None:
        """Runs this process's part of one mini-batch. Passes inputs and targets only if the pipe reads them."""
        self.pipe.step(self.inputs, self.targets, self.setup.work.loss_fn)


class GPipeProcessesCall(GPipeProcesses):
    """Trains with gpipe and the loss's `backward()`, one process per partition."""

    def step(self) -> None:
        """Runs this process's part of one mini-batch."""
        output = self.pipe(self.inputs, gather=True)
        self.setup.work.loss_fn(output, self.targets).backward()


class DataParallel(_Ranks):
    """Trains with DistributedDataParallel: each process runs the whole network on its share of the rows."""

    def build(self, layers: list[nn.Module]) -> None:
        """Wraps the network."""
        whole = nn.Sequential(*layers)
        self.parts = [whole]
        self.inputs = self.inputs.tensor_split(self.setup.world)[self.setup.rank]
        self.targets = self.targets.tensor_split(self.setup.world)[self.setup.rank]
        self.model = nn.parallel.DistributedDataParallel(whole)

    def step(self) -> None:
        """Runs this process's share of the rows. The backward pass averages the gradients over all processes."""
        self.setup.work.loss_fn(self.model(self.inputs), self.targets).backward()


class _Part(nn.Module):
    """Consecutive layers as a stage of torch.distributed.pipelining, which passes tensors as arguments."""

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


Placement = Callable[[int, int], list[int]]
"""The stages of a rank, of so many ranks."""


def one_each(rank: int, ranks: int) -> list[int]:
    """Places one stage on each rank."""
    return [rank]


def in_a_loop(rank: int, ranks: int) -> list[int]:
    """Places two stages on each rank, the second half in the same order as the first."""
    return [rank, ranks + rank]


def in_a_v(rank: int, ranks: int) -> list[int]:
    """Places two stages on each rank, the second half in reverse order: the first rank has the last stage, too."""
    return [rank, 2 * ranks - 1 - rank]


class Torch(_Ranks):
    """Trains with a schedule of torch.distributed.pipelining, one process per rank."""

    def __init__(self, schedule: Callable[..., Any], placement: Placement = one_each) -> None:
        self.make_schedule = schedule
        self.placement = placement

    def build(self, layers: list[nn.Module]) -> None:
        """Builds the stages of this process and their schedule."""
        own, many = self.placement(self.setup.rank, self.setup.world), len(self.setup.cuts)
        self.parts = [self._part(layers, stage) for stage in own]
        self.has_first, self.has_last = 0 in own, many - 1 in own
        device = torch.device("cpu")
        stages = [PipelineStage(part, at, many, device) for at, part in zip(own, self.parts, strict=True)]
        takes = stages[0] if self.placement is one_each else stages
        self.schedule = self.make_schedule(takes, self.setup.micro_batches, self.loss_fn, scale_grads=False)

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the contribution of a micro-batch to the loss."""
        return self.setup.work.loss_fn(output, target) / self.setup.micro_batches

    def _part(self, layers: Sequence[nn.Module], stage: int) -> _Part:
        first = sum(self.setup.cuts[:stage])
        own = range(first, first + self.setup.cuts[stage])
        return _Part({str(at): layers[at] for at in own}, remat=self.setup.remat)

    def step(self) -> None:
        """Runs this rank's part of one mini-batch."""
        inputs = (self.inputs,) if self.has_first else ()
        if self.has_last:
            self.schedule.step(*inputs, target=self.targets, losses=[], return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)

    def gradients(self) -> Mapping[str, Tensor]:
        """Returns the gradients of this process's stages by name."""
        return {name.removeprefix("layers."): gradient for name, gradient in super().gradients().items()}


class _Keep(torch.optim.Optimizer):
    """An optimizer that changes no weights and keeps the gradients, which DeepSpeed drops after its step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(list(parameters.values()), {})
        self.parameters = parameters
        self.kept: dict[str, Tensor] = {}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Saves the gradients of this step."""
        self.kept = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}


class DeepSpeed(_Ranks):
    """Trains with DeepSpeed's PipelineModule: 1F1B, with an optimizer that changes no weights."""

    def build(self, layers: list[nn.Module]) -> None:
        """Builds the engine, with its output discarded."""
        os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="error")
        with redirect_stdout(StringIO()):
            import deepspeed

            deepspeed.init_distributed()  # finds the group that is there
            module = self._module(layers)
            self.keep = _Keep(dict(module.named_parameters()))
            self.engine, *_ = deepspeed.initialize(model=module, optimizer=self.keep, config=self._config())
        self.parts = [module]

    def _module(self, layers: list[nn.Module]) -> Any:
        from deepspeed.pipe import PipelineModule

        cuts = self.setup.cuts

        class Cut(PipelineModule):  # type: ignore[misc]  # DeepSpeed is untyped
            """Splits the layers where all runtimes do, because DeepSpeed accepts no split points."""

            def _partition_layers(self, method: str = "") -> None:
                self.parts = [sum(cuts[:stage]) for stage in range(len(cuts) + 1)]
                self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

        every = max(cuts) if self.setup.remat else 0  # recompute a stage as one, as others do
        return Cut(
            layers, num_stages=self.setup.partitions, loss_fn=self.setup.work.loss_fn,
            activation_checkpoint_interval=every,
        )  # fmt: skip

    def _config(self) -> dict[str, Any]:
        rows, many = len(self.inputs), self.setup.micro_batches
        return {
            "train_batch_size": rows,
            "train_micro_batch_size_per_gpu": rows // many,
            "gradient_accumulation_steps": many,
            "gradient_clipping": 0.0,  # by default to norm 1
            "steps_per_print": 10**9,
            "pipeline": {"use_reentrant": False},  # a reentrant one fails on integer inputs
        }

    def _micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        many = self.setup.micro_batches
        return zip(self.inputs.tensor_split(many), self.targets.tensor_split(many), strict=True)

    def step(self) -> None:
        """Runs this rank's part of one mini-batch."""
        self.engine.train_batch(self._micro_batches())

    def gradients(self) -> Mapping[str, Tensor]:
        """Returns the gradients of this process's stage by name."""
        return self.keep.kept
