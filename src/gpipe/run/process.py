"""A mini-batch of which this process runs one row."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe.plan.action import Kind
from gpipe.plan.program import Program
from gpipe.run.ambient import Ambient
from gpipe.run.collectives import add_over_replicas, add_over_stages, reduces_itself
from gpipe.run.drivers import in_words, walk
from gpipe.run.p2p import P2P
from gpipe.run.recorder import Recorder
from gpipe.run.run import Run, intra_op_threads
from gpipe.run.stage import Trace
from gpipe.run.status import Seen, Status
from gpipe.run.steps import Part
from gpipe.run.transport import Transport

if TYPE_CHECKING:
    from gpipe.run.engine import Engine


class ProcessRun(Run):
    """One row of a mini-batch's program; the others run in other processes."""

    def _make_transport(self) -> Transport:
        place = self.engine.place
        assert place is not None
        return P2P(self.engine.net, place.replica * place.stages)

    def _drive(self, part: Part, ambient: Ambient, recorder: Recorder | None, *, threaded: bool) -> None:
        (worker,) = self.workers
        assert isinstance(self.transport, P2P)
        net = self.engine.net
        self.transport.begin(part.inbound[worker.rank], partial(describe_peer, self.engine, part.program))
        worker.name = f"rank {net.rank}"
        worker.closing = {Kind.TIE: self._tie, Kind.REDUCE: self._reduce}
        worker.new_trace = partial(_watched, net.status)
        self._set_gradients_aside(part)
        with intra_op_threads(self.engine.intra_op_threads), ambient.rank_thread():
            walk(worker, part, self.transport, recorder)
        net.reach(-1)

    def _add_up(self) -> None:
        """Done by TIE."""

    def _tie(self) -> None:
        add_over_stages(self.engine, self.aliases)

    def _set_gradients_aside(self, part: Part) -> None:
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
        place = self.engine.place
        assert place is not None
        with torch.no_grad():
            add_over_replicas(self.engine.net, place, [parameter for parameter, _ in self._aside])
            for parameter, before in self._aside:
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before + parameter.grad


def describe_peer(engine: "Engine", program: Program, peer: int, seen: Seen) -> str:
    """In words, where another process of this host was last seen."""
    stage = engine.stages[peer % len(engine.stages)]
    row = program.rows[stage.index]
    if not 0 <= seen.at < len(row):
        return "in a row of its own"
    begun = stage.layers[: seen.layers]
    layer = str(begun[-1]) if begun else f"one of {', '.join(map(str, stage.layers))}"
    return in_words(program, stage.index, seen.at, layer, f"rank {peer}")


class _Watched(list[int]):
    """Sequence numbers of the layers begun, whose count the other processes can see."""

    def __init__(self, status: Status) -> None:
        self._count = status.layers

    def append(self, number: int) -> None:
        super().append(number)
        self._count[0] = len(self)


def _watched(status: Status) -> Trace:
    return Trace(_Watched(status))
