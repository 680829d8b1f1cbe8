"""Deferred BatchNorm: each micro-batch is normalized separately, and running statistics cover the whole mini-batch.

During a forward pass, each BatchNorm has temporary buffers and a momentum of 1, so that the forward of the BatchNorm
stores the mean and the variance of the micro-batch in these buffers. After the forward passes of the mini-batch, the
statistics are merged in micro-batch order: count, mean, and sum of squared differences from the mean (Chan, Golub &
LeVeque 1979). Computing E[x^2] - E[x]^2 instead would lose all precision if the mean is large. Finally, the running
statistics are updated once, as in one forward pass of the whole mini-batch. Each replica first merges its own
statistics. The statistics of all replicas are then merged, in the order of the replicas.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gpipe._torch.modes import is_compiled
from gpipe._torch.modules import AnyBatchNorm
from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
from gpipe.runtime.feature import Feature, Work
from gpipe.runtime.run import MicroBatchState, Rank, Run
from gpipe.schedule.action import Kind
from gpipe.stages.boundary import BoundaryInput
from gpipe.stages.memory_layout import allocate_like
from gpipe.stages.messages import Control
from gpipe.stages.stage import StageCall


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of each channel in one forward pass of a BatchNorm, in float64."""

    count: int
    mean: Tensor
    squares: Tensor  # sum of squared differences from the mean

    def merge(self, other: "Statistics") -> "Statistics":
        """Merges the statistics of two sets of rows."""
        count = self.count + other.count
        difference = other.mean - self.mean
        mean = self.mean + difference * (other.count / count)
        squares = self.squares + other.squares + difference**2 * (self.count * other.count / count)
        return Statistics(count, mean, squares)


@dataclass
class DeferredStatistics:
    """The statistics of one mini-batch at one stage.

    Attributes:
        norms: The BatchNorm modules of the stage that update running statistics.
        collected: For each micro-batch and module, the statistics of each forward pass of the module.
    """

    norms: Sequence[AnyBatchNorm]
    collected: dict[int, list[list[Statistics]]] = field(default_factory=dict)

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "DeferredStatistics":
        """Finds the BatchNorm modules that update running statistics."""
        parts = {module: None for root in modules for module in root.modules()}
        if any(_defers(module) for whole in parts if is_compiled(whole) for module in whole.modules()):
            raise ValueError(
                "batch_norm='deferred' does not support BatchNorm inside a compiled module. Compile only modules "
                "without BatchNorm, or use batch_norm='micro'. [compiled-batchnorm]"
            )
        return cls([norm for norm in parts if _defers(norm)])

    @contextmanager
    def collect(self, micro_batch: int | None = None) -> Iterator[None]:
        """Collects statistics of a micro-batch (None: discards them), and leaves running statistics unchanged."""
        with ExitStack() as stack:
            statistics = [stack.enter_context(_with_temporary_buffers(norm)) for norm in self.norms]
            yield
        if micro_batch is not None:
            self.collected[micro_batch] = statistics

    def merged(self) -> list[list[Statistics]]:
        """Returns the statistics of the whole mini-batch, for each module and each forward pass of the module."""
        by_norm = zip(*(self.collected[m] for m in sorted(self.collected)), strict=True)
        return [  # A module may run more often in some micro-batches than in others.
            [reduce(Statistics.merge, filter(None, forward)) for forward in zip_longest(*micro_batches)]
            for micro_batches in by_norm
        ]

    def to_tree(self) -> list[list[tuple[int, Tensor, Tensor]]]:
        """Returns the statistics of this replica as a tree, by module and forward pass, for messages."""
        return [[(each.count, each.mean, each.squares) for each in forwards] for forwards in self.merged()]

    def merge_replicas(self, by_replica: Sequence[Sequence[Sequence[tuple[int, Tensor, Tensor]]]]) -> None:
        """Replaces the statistics of this replica by the statistics of all replicas."""
        self.collected = {
            replica: [[Statistics(*values) for values in forwards] for forwards in norms]
            for replica, norms in enumerate(by_replica)
        }

    def commit(self) -> None:
        """Updates the running statistics, once for each forward pass of a module in a micro-batch."""
        for norm, forwards in zip(self.norms, self.merged(), strict=True):
            for statistics in forwards:
                update_running_statistics(norm, statistics)
        self.collected.clear()


class DeferredBatchNorm(Feature):
    """Collects the statistics of BatchNorm, and updates running statistics after the mini-batch has succeeded."""

    alters_layers = True

    def __init__(self) -> None:
        self._statistics: dict[int, DeferredStatistics] = {}  # by stage
        self._collected: set[tuple[int, int]] = set()
        self._complete: list[int] = []  # stages that have run all their forward passes

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        for stage in run.stages.local:
            self._statistics[stage.index] = DeferredStatistics.of([layer.module for layer in stage.layers])
        work[Kind.COMMIT] = self._commit

    @contextmanager
    def around_pass(self, run: Run, table: CompiledTable) -> Iterator[None]:
        yield
        for rank in run.ranks if run.context.replicas > 1 else ():
            for stage in sorted(rank.stages.keys() & self._complete):
                with rank.stream.enter():
                    of_replica = self._statistics[stage].to_tree()
                    of_all = run.context.of_replicas(Control.DEFERRED_STATISTICS, of_replica, stage)
                    self._statistics[stage].merge_replicas(of_all)

    def around_layers(
        self, run: Run, rank: Rank, state: MicroBatchState, attached: Sequence[BoundaryInput], call: StageCall
    ) -> AbstractContextManager[object]:
        stage, m = state.stage_run.stage.index, state.micro_batch
        is_first = (stage, m) not in self._collected  # The layers may run again, in a recomputation.
        self._collected.add((stage, m))
        return self._statistics[stage].collect(m if is_first else None)

    def complete(self, run: Run) -> None:
        for rank in run.ranks:
            if stages := rank.stages.keys() & self._complete:
                rank.stream.begin(())
                with rank.stream.enter():
                    for stage in sorted(stages):
                        self._statistics[stage].commit()
                rank.stream.end()
        self._complete.clear()

    def _commit(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """COMMIT: marks the statistics of a stage as complete. If the run fails, no statistics are committed."""
        self._complete.append(task.stage)


def find_replica_drift(modules: Sequence[nn.Module]) -> list[str]:
    """Returns a finding if replicas keep separate running statistics."""
    if not any(_defers(module) for root in modules for module in root.modules()):
        return []
    return [
        "batch_norm='micro': each replica has its own running statistics, so replicas differ in evaluation, and "
        "checkpoints contain only the statistics of the first replica. Use batch_norm='deferred' or 'synchronized'. "
        "[batchnorm-per-replica]"
    ]


def _defers(module: nn.Module) -> TypeGuard[AnyBatchNorm]:
    return isinstance(module, AnyBatchNorm) and module.training and module.running_mean is not None


@contextmanager
def _with_temporary_buffers(norm: AnyBatchNorm) -> Iterator[list[Statistics]]:
    """Replaces the buffers of a BatchNorm in its forward passes. Yields a list of the statistics of these passes."""
    buffers = {name: norm._buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked")}
    temporary: list[tuple[int, Tensor, Tensor]] = []
    momenta: dict[nn.Module, float | None] = {}
    hook, is_active = None, True

    def before_forward(used: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """Replaces the buffers. `used` may be a copy of the module that shares only its buffers (WeightAliases)."""
        if not is_active:  # The hook stays registered if an interrupt comes before its handle is stored.
            return
        value = args[0] if args else kwargs["input"]
        momenta.setdefault(used, used.momentum)
        used.__dict__["momentum"] = 1.0
        used._buffers.update(
            {name: buffer if buffer is None else allocate_like(buffer).zero_() for name, buffer in buffers.items()}
        )
        temporary.append((value.numel() // value.shape[1], used.running_mean, used.running_var))

    def restore() -> None:
        if hook is not None:
            hook.remove()
        for used, momentum in momenta.items():
            used.__dict__["momentum"] = momentum
        norm._buffers.update(buffers)

    statistics: list[Statistics] = []
    try:
        hook = norm.register_forward_pre_hook(before_forward, with_kwargs=True)
        yield statistics
    finally:
        is_active = False
        try:
            restore()
        finally:
            restore()  # An interrupt can end the first call.
    statistics += [Statistics(count, mean.double(), var.double() * (count - 1)) for count, mean, var in temporary]


@torch.no_grad()
def update_running_statistics(norm: AnyBatchNorm, batch: Statistics) -> None:
    """Updates running statistics as one forward pass of the whole mini-batch would, with the unbiased variance."""
    factor = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    factor = 0.0 if factor is None else factor
    variance = batch.squares / max(batch.count - 1, 1)
    for running, new in ((norm.running_mean, batch.mean), (norm.running_var, variance)):
        assert running is not None
        running.copy_(running.double() * (1 - factor) + new * factor)
