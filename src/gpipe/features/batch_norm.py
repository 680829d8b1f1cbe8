"""Deferred BatchNorm: running statistics of the whole mini-batch, though each micro-batch is normalized by its own.

A BatchNorm in training is lent empty buffers and a momentum of 1, so that its own forward leaves the mean and the
variance of the micro-batch in them. At the end of the mini-batch's forward these are merged in micro-batch order, by
count, mean and sum of squared differences from the mean (Chan, Golub & LeVeque 1979). E[x^2] - E[x]^2 would lose all
precision if the mean is large. The real buffers then change once, as in one forward of the whole mini-batch.
Replicas merge their own statistics first, then the statistics of all replicas, in the order of the replicas.
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
    """The statistics of one forward of a BatchNorm for each channel, in float64."""

    count: int
    mean: Tensor
    squares: Tensor  # sum of squared differences from the mean

    def merge(self, other: "Statistics") -> "Statistics":
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        squares = self.squares + other.squares + apart**2 * (self.count * other.count / count)
        return Statistics(count, mean, squares)


@dataclass
class DeferredStatistics:
    """The statistics of one mini-batch: for each micro-batch and BatchNorm, one for each forward."""

    norms: Sequence[AnyBatchNorm]
    seen: dict[int, list[list[Statistics]]] = field(default_factory=dict)

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "DeferredStatistics":
        """Begins a mini-batch: finds the BatchNorms that keep running statistics."""
        parts = {module: None for root in modules for module in root.modules()}
        if any(_defers(module) for whole in parts if is_compiled(whole) for module in whole.modules()):
            raise ValueError(
                "batch_norm='deferred' cannot reach a BatchNorm inside of a compiled module; compile what is "
                "around it, or leave the statistics as they are by default"
            )
        return cls([norm for norm in parts if _defers(norm)])

    @contextmanager
    def collect(self, micro_batch: int | None = None) -> Iterator[None]:
        """Keeps the real buffers as they are. Collects statistics for a micro-batch, none in a recomputation."""
        with ExitStack() as stack:
            seen = [stack.enter_context(_lend(norm)) for norm in self.norms]
            yield
        if micro_batch is not None:
            self.seen[micro_batch] = seen

    def merged(self) -> list[list[Statistics]]:
        """The statistics of the whole mini-batch: for each BatchNorm, one for each of its forwards."""
        by_norm = zip(*(self.seen[micro_batch] for micro_batch in sorted(self.seen)), strict=True)
        return [
            [reduce(Statistics.merge, filter(None, forward)) for forward in zip_longest(*some)]  # one may lack some
            for some in by_norm
        ]

    def to_tree(self) -> list[list[tuple[int, Tensor, Tensor]]]:
        """The statistics of this replica, by BatchNorm and forward, to be sent to the others."""
        return [[(seen.count, seen.mean, seen.squares) for seen in forwards] for forwards in self.merged()]

    def merge_replicas(self, by_replica: Sequence[Sequence[Sequence[tuple[int, Tensor, Tensor]]]]) -> None:
        """Replaces the statistics of this replica by those that all replicas sent."""
        self.seen = {
            replica: [[Statistics(*sent) for sent in forwards] for forwards in norms]
            for replica, norms in enumerate(by_replica)
        }

    def commit(self) -> None:
        """Changes the real buffers, once for each forward of a module in a mini-batch."""
        for norm, forwards in zip(self.norms, self.merged(), strict=True):
            for seen in forwards:
                update_running_statistics(norm, seen)
        self.seen.clear()


class DeferredBatchNorm(Feature):
    """Collects the statistics of BatchNorms, and commits them once the mini-batch has succeeded."""

    alters_layers = True

    def __init__(self) -> None:
        self._statistics: dict[int, DeferredStatistics] = {}  # by stage
        self._collected: set[tuple[int, int]] = set()
        self._complete: list[int] = []  # the stages whose last forward has run

    def perform_actions(self, run: Run, work: dict[Kind, Work]) -> None:
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
        self, run: Run, rank: Rank, state: MicroBatchState, entered: Sequence[BoundaryInput], call: StageCall
    ) -> AbstractContextManager[object]:
        stage, m = state.stage_run.stage.index, state.micro_batch
        is_first = (stage, m) not in self._collected  # The layers may run again for a backward.
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
        """COMMIT: the statistics are complete. A failed run commits none."""
        self._complete.append(task.stage)


def find_replica_drift(modules: Sequence[nn.Module]) -> list[str]:
    """Tells of replicas whose running statistics are their own."""
    if not any(_defers(module) for root in modules for module in root.modules()):
        return []
    return [
        "the running statistics of BatchNorm are each replica's own, so replicas drift apart in evaluation, and a "
        "checkpoint has the first one's; give batch_norm='deferred' for those of the whole mini-batch of all "
        "replicas, or batch_norm='synchronized'"
    ]


def _defers(module: nn.Module) -> TypeGuard[AnyBatchNorm]:
    return isinstance(module, AnyBatchNorm) and module.training and module.running_mean is not None


@contextmanager
def _lend(norm: AnyBatchNorm) -> Iterator[list[Statistics]]:
    """Lends a BatchNorm empty buffers for each of its forwards; yields the list of their statistics."""
    own = {name: norm._buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked")}
    lent: list[tuple[int, Tensor, Tensor]] = []
    momenta: dict[nn.Module, float | None] = {}
    hook, lends = None, True

    def before_forward(used: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """`used` may be a stand-in for the module, which shares its buffers but not its momentum (WeightAliases)."""
        if not lends:  # an interrupt came before there was a handle to remove it by
            return
        given = args[0] if args else kwargs["input"]
        momenta.setdefault(used, used.momentum)
        used.__dict__["momentum"] = 1.0
        used._buffers.update(
            {name: buffer if buffer is None else allocate_like(buffer).zero_() for name, buffer in own.items()}
        )
        lent.append((given.numel() // given.shape[1], used.running_mean, used.running_var))

    seen: list[Statistics] = []
    try:
        hook = norm.register_forward_pre_hook(before_forward, with_kwargs=True)
        yield seen
    finally:
        lends = False
        if hook is not None:
            hook.remove()
        for used, momentum in momenta.items():
            used.__dict__["momentum"] = momentum
        norm._buffers.update(own)
    seen += [Statistics(count, mean.double(), variance.double() * (count - 1)) for count, mean, variance in lent]


@torch.no_grad()
def update_running_statistics(norm: AnyBatchNorm, batch: Statistics) -> None:
    """Updates the buffers like a plain forward of the whole mini-batch, with the unbiased variance."""
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
