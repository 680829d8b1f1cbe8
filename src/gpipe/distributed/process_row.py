"""One row of a mini-batch, which this process runs while others run the rest."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from gpipe.distributed.failures import Seen, Status
from gpipe.distributed.mesh import Position
from gpipe.distributed.net import Net
from gpipe.distributed.reduce import (
    add_over_replicas,
    add_over_stages,
    check_lockstep,
    reduces_itself,
    tell_replicas,
)
from gpipe.distributed.sync_batchnorm import LOCKSTEP, Synced, find_norms
from gpipe.runtime.context import Others
from gpipe.runtime.engine import Engine
from gpipe.runtime.notes import in_words
from gpipe.runtime.steps import CompiledProgram, CompiledRows, Inbound
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.program import Program
from gpipe.stages.batchnorm import DeferredStatistics
from gpipe.stages.layout import is_sharded
from gpipe.stages.messages import Control, Label, Message, ReadyEvent
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.stage import LayerProgress, layer_at

SPREAD = "layers under fully_shard are gathered from all replicas for each micro-batch"


class ProcessRow(Others):
    """What the row of this process has to do with those of others, in one mini-batch."""

    def __init__(
        self,
        engine: Engine,
        net: Net,
        position: Position,
        compiled: CompiledProgram,
        aliases: WeightAliases,
        *,
        sync_batch_norm: bool,
    ) -> None:
        self.engine, self.net, self.position = engine, net, position
        self.row = compiled.program.rows[position.row]
        self.aliases = aliases
        self.sync_batch_norm = sync_batch_norm
        self._p2p = P2P(net, position)
        self.transport = self._p2p
        self._sync = Synced(net, position, compiled.program.micro_batches)
        self._tied = False
        self._aside: dict[int, list[tuple[Tensor, Tensor | None]]] = {}

    def name(self, rank: int) -> str:
        """This process, in messages."""
        return f"rank {self.net.rank}"

    def new_progress(self) -> LayerProgress:
        """Where a stage notes how far it is: the other processes of this host see it."""
        return LayerProgress(_Watched(self.net.status))

    @contextmanager
    def around(self, rows: CompiledRows) -> Iterator[None]:
        """Expects the messages of a row, and meets the replicas where they run in step."""
        inbound = rows.inbound[self.position.row]
        self._p2p.begin(inbound, partial(describe_peer, self.engine, rows.program))
        self._set_gradients_aside(rows.program.rows[self.position.row])
        with self._meet_replicas(rows.program):
            yield
        self.net.reach(-1)

    def close(self, action: Action) -> None:
        """Adds up gradients: of shared weights over the stages that use them, of a stage over the replicas."""
        if action.kind is Kind.REDUCE:
            self._reduce(action.stage)
        elif not self._tied:  # all stages of this process, which have run their backwards, at once
            add_over_stages(self.net, self.position, self.engine.placement, self.engine.stage_of, self.aliases)
            self._tied = True

    def share(self, deferred: Mapping[int, DeferredStatistics]) -> None:
        """Has deferred statistics be those of the mini-batch of all replicas."""
        if self.position.replicas > 1:
            for stage, one in deferred.items():
                told = tell_replicas(
                    self.net, self.position, Control.DEFERRED_STATISTICS, one.to_tensors(), number=stage
                )
                one.merge_replicas(told)

    def _meet_replicas(self, program: Program) -> AbstractContextManager[object]:
        """Prepares what replicas do together while they run: layers of `fully_shard`, and BatchNorm if asked."""
        if self.position.replicas == 1:
            return nullcontext()
        spread = [module for module in self._modules() if is_sharded(module)]
        layers = [layer for stage in self.engine.own for layer in stage.layers]
        norms = find_norms(layers) if self.sync_batch_norm else []
        reasons = [SPREAD] * bool(spread) + [LOCKSTEP] * any(norm.training for norm in norms)
        if reasons:
            check_lockstep(self.net, self.position, program.micro_batches, " and ".join(reasons))
        if spread:
            self._settle_spread(spread)
        if LOCKSTEP not in reasons:
            return nullcontext()
        row = program.rows[self.position.row]
        return self._sync.in_place(norms, lambda: row[self.net.at])

    def _modules(self) -> Iterator[nn.Module]:
        return (module for stage in self.engine.own for layer in stage.layers for module in layer.module.modules())

    def _settle_spread(self, spread: Sequence[nn.Module]) -> None:
        """Has modules that are spread over the replicas add up gradients, which are weighed already."""
        if any(reduces_itself(parameter) for parameter in self.aliases.sources.values()):
            raise ValueError(
                "a weight that several layers share is under fully_shard, which puts another in its place while a "
                "layer runs; leave layers that share weights as they are"
            )
        for module in spread:
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # no mere attribute
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # as gloo can

    def _set_gradients_aside(self, row: Sequence[Action]) -> None:
        """Sets aside what gradients there are: replicas add up what this mini-batch gives alone."""
        found = self._parameters()
        for stage in (action.stage for action in row if action.kind is Kind.REDUCE):
            self._aside[stage] = [(parameter, parameter.grad) for parameter in found[stage]]
            for parameter, _ in self._aside[stage]:
                parameter.grad = None

    def _parameters(self) -> dict[int, list[Tensor]]:
        """What each stage of this process has that replicas add up, a shared weight at the first that uses it."""
        aliases = {id(leaf) for leaves in self.aliases.leaves.values() for leaf in leaves.values()}
        seen: set[int] = set()
        by_stage: dict[int, list[Tensor]] = {}
        for stage in self.engine.own:
            layers = {layer.index for layer in stage.layers}
            found: list[Tensor] = [p for layer in stage.layers for p in layer.module.parameters()]
            found += [  # in their places are the aliases
                source for at, source in self.aliases.sources.items() if layers & self.aliases.leaves[at].keys()
            ]
            own = {id(p): p for p in found if id(p) not in aliases | seen and not reduces_itself(p)}
            seen |= own.keys()
            by_stage[stage.index] = list(own.values())
        return by_stage

    def _reduce(self, stage: int) -> None:
        with torch.no_grad():
            add_over_replicas(self.net, self.position, stage, [parameter for parameter, _ in self._aside[stage]])
            for parameter, before in self._aside[stage]:
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


class P2P:
    """Carries messages between the ranks of a replica."""

    cancelled = False

    def __init__(self, net: Net, position: Position) -> None:
        self.net = net
        self.position = position

    def begin(self, inbound: Inbound, sees: Callable[[int, Seen], str]) -> None:
        """Expects the messages of a row; `sees` says in words where another process was last seen."""
        self.net.expect(inbound.due, set(map(self.position.rank_of, inbound.senders)), sees)

    def reach(self, at: int) -> None:
        """Notes how far in its row this rank is."""
        self.net.reach(at)

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Puts a message on its way to a rank; waits only while too many are under way already."""
        self.net.send(self.position.rank_of(rank), label, message)

    def receive(self, rank: int, sender: int, label: Label) -> tuple[Message, ReadyEvent]:
        """Waits for a message to this rank."""
        return self.net.receive(self.position.rank_of(sender), label)

    def cancel(self) -> None:
        """Nothing to wake: this process has one rank, and the others learn of it by `Net.fail`."""


def describe_peer(engine: Engine, program: Program, peer: int, seen: Seen) -> str:
    """In words, where another process of this host was last seen."""
    rank = peer % program.ranks
    row = program.rows[rank]
    if not 0 <= seen.at < len(row):
        return "in a row of its own"
    layers = engine.stages[row[seen.at].stage].layers
    layer = layer_at(layers, seen.layers - 1) or f"one of {', '.join(map(str, layers))}"
    return in_words(program, rank, seen.at, layer, f"rank {peer}")


class _Watched(list[int]):
    """Sequence numbers of the layers begun, whose count the other processes can see."""

    def __init__(self, status: Status) -> None:
        self._count = status.layers

    def append(self, number: int) -> None:
        super().append(number)
        self._count[0] = len(self)
