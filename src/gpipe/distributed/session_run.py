"""A mini-batch of which this process runs one row."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpipe.comm.mesh import Position
from gpipe.comm.status import Seen, Status
from gpipe.distributed.reduce import (
    add_over_replicas,
    add_over_stages,
    check_lockstep,
    reduces_itself,
    tell_replicas,
)
from gpipe.distributed.sync_batchnorm import LOCKSTEP, Synced, find_norms
from gpipe.distributed.transport import P2P
from gpipe.intra_op import intra_op_threads
from gpipe.layers.stage import LayerProgress, layer_at
from gpipe.plan.action import Kind
from gpipe.plan.program import Program
from gpipe.runtime.minibatch import MiniBatchRun
from gpipe.runtime.modes import Ambient
from gpipe.runtime.recorder import Recorder
from gpipe.runtime.rows import CompiledRows
from gpipe.runtime.walk import in_words, walk
from gpipe.runtime.worker import Worker
from gpipe.values.messages import Control, Transport

if TYPE_CHECKING:
    from gpipe.runtime.engine import Engine


SPREAD = "layers under fully_shard are gathered from all replicas for each micro-batch"


class DistributedRun(MiniBatchRun):
    """One row of a mini-batch's program; the others run in other processes."""

    def _make_transport(self) -> Transport:
        return P2P(self.engine.net, self._place.rank_of(0))

    def _drive(self, part: CompiledRows, ambient: Ambient, recorder: Recorder | None, *, threaded: bool) -> None:
        (worker,) = self.workers
        assert isinstance(self.transport, P2P)
        net = self.engine.net
        self.transport.begin(part.inbound[worker.rank], partial(describe_peer, self.engine, part.program))
        worker.name = f"rank {net.rank}"
        worker.closing = {Kind.TIE: self._tie, Kind.REDUCE: self._reduce}
        worker.new_progress = partial(_watched, net.status)
        self._set_gradients_aside(part)
        norms = self._meet_replicas(worker, part)
        with intra_op_threads(self.engine.intra_op_threads), ambient.rank_thread(), norms:
            walk(worker, part, self.transport, recorder)
        self._share_statistics(worker)
        self._commits, worker.commits = worker.commits, []
        net.reach(-1)

    def settle(self) -> None:
        """Does what was left for the end of a run, once all processes have come there."""
        (worker,) = self.workers
        worker.commits, self._commits = self._commits, []
        worker.settle()

    @property
    def _place(self) -> Position:
        position = self.engine.position
        assert position is not None
        return position

    @cached_property
    def _sync(self) -> Synced:
        return Synced(self.engine.net, self._place, self.compiled.program.micro_batches)

    def _meet_replicas(self, worker: Worker, part: CompiledRows) -> AbstractContextManager[object]:
        """Prepares what replicas do together while they run: layers of `fully_shard`, and BatchNorm if asked."""
        (stage,) = self.engine.own
        if self._place.replicas == 1:
            return nullcontext()
        spread = self._spread()
        norms = find_norms(stage.layers) if self.engine.sync_batch_norm else []
        reasons = [SPREAD] * bool(spread) + [LOCKSTEP] * any(norm.training for norm in norms)
        if reasons:
            check_lockstep(self.engine.net, self._place, part.program.micro_batches, " and ".join(reasons))
        if spread:
            self._settle_spread(spread)
        if LOCKSTEP not in reasons:
            return nullcontext()
        row = part.program.rows[worker.rank]
        return self._sync.in_place(norms, lambda: row[self.engine.net.at])

    def _settle_spread(self, spread: Sequence[nn.Module]) -> None:
        """Has modules that are spread over the replicas add up gradients, which are weighed already."""
        if any(reduces_itself(parameter) for parameter in self.aliases.sources.values()):
            raise ValueError(
                "a weight that several layers share is under fully_shard, which puts another in its position while a "
                "layer runs; leave layers that share weights as they are"
            )
        for module in spread:
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # no mere attribute
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # as gloo can

    def _spread(self) -> list[nn.Module]:
        """The modules that `fully_shard` was told of."""
        (stage,) = self.engine.own
        modules = (module for layer in stage.layers for module in layer.module.modules())
        return [module for module in modules if hasattr(type(module), "set_gradient_divide_factor")]

    def _find_weights(self) -> tuple[list[tuple[int, int]], list[bool]]:
        """What a recompute depends on; not what `fully_shard` puts in its parameters' places by itself."""
        weights, modes = super()._find_weights()
        return [] if self._spread() else weights, modes

    def _share_statistics(self, worker: Worker) -> None:
        """Has deferred statistics be those of the mini-batch of all replicas."""
        if not worker.commits or self._place.replicas == 1:
            return
        (deferred,) = worker.deferred.values()
        with worker.stream.enter():
            deferred.merge_replicas(
                tell_replicas(self.engine.net, self._place, Control.DEFERRED_STATISTICS, deferred.to_tensors())
            )

    def _add_up(self) -> None:
        """Done by TIE."""

    def _tie(self) -> None:
        add_over_stages(self.engine, self.aliases)

    def _set_gradients_aside(self, part: CompiledRows) -> None:
        """What replicas add up is what this mini-batch gives, not what was there before."""
        self._aside: list[tuple[Tensor, Tensor | None]] = []
        (rank,) = (worker.rank for worker in self.workers)
        if any(action.kind is Kind.REDUCE for action in part.program.rows[rank]):
            self._aside = [(parameter, parameter.grad) for parameter in self._parameters()]
            for parameter, _ in self._aside:
                parameter.grad = None

    def _parameters(self) -> list[Tensor]:
        (stage,) = self.engine.own
        found: list[Tensor] = [p for layer in stage.layers for p in layer.module.parameters()]
        found += self.aliases.sources.values()  # in their places are the aliases
        leaves = {id(leaf) for leaves in self.aliases.leaves.values() for leaf in leaves.values()}
        return [p for p in {id(p): p for p in found}.values() if id(p) not in leaves and not reduces_itself(p)]

    def _reduce(self) -> None:
        with torch.no_grad():
            add_over_replicas(self.engine.net, self._place, [parameter for parameter, _ in self._aside])
            for parameter, before in self._aside:
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


def describe_peer(engine: "Engine", program: Program, peer: int, seen: Seen) -> str:
    """In words, where another process of this host was last seen."""
    stage = engine.stages[peer % len(engine.stages)]
    row = program.rows[stage.index]
    if not 0 <= seen.at < len(row):
        return "in a row of its own"
    layer = layer_at(stage.layers, seen.layers - 1) or f"one of {', '.join(map(str, stage.layers))}"
    return in_words(program, stage.index, seen.at, layer, f"rank {peer}")


class _Watched(list[int]):
    """Sequence numbers of the layers begun, whose count the other processes can see."""

    def __init__(self, status: Status) -> None:
        self._count = status.layers

    def append(self, number: int) -> None:
        super().append(number)
        self._count[0] = len(self)


def _watched(status: Status) -> LayerProgress:
    return LayerProgress(_Watched(status))
