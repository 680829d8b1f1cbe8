"""Runs mini-batches in all processes of a pipe, or in the only one: all call the same, at the same time.

A step is one path. In one process there are no peers, and nothing to tell; over processes each reads what its stages
need, hears the rest from that of the first stage, and fails where another fails.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from gpipe.distributed.agree import agree, differences
from gpipe.distributed.call import PipelinedCall
from gpipe.distributed.handshake import Asked, Header
from gpipe.distributed.listener import connect
from gpipe.distributed.mesh import Position
from gpipe.distributed.nccl import groups_for
from gpipe.distributed.net import Net
from gpipe.distributed.peers import LinkedPeers, Peers
from gpipe.distributed.rendezvous import LINKING, Rendezvous
from gpipe.distributed.stragglers import stragglers_among
from gpipe.distributed.untrusted import explaining_limits
from gpipe.runtime.autograd import pipelined
from gpipe.runtime.engine import Engine
from gpipe.runtime.inputs import (
    StepInputs,
    check_loss_fn,
    refuse_gradients_of_inputs,
    split_alike,
    split_targets,
)
from gpipe.runtime.minibatch import MiniBatchRun
from gpipe.runtime.recorder import Recorder
from gpipe.runtime.state import MiniBatch
from gpipe.runtime.thread_state import Ambient
from gpipe.stages.batchnorm import find_replica_drift
from gpipe.stages.boundary import BoundaryValue, cut
from gpipe.stages.losses import NO_METRICS
from gpipe.stages.messages import Control
from gpipe.stages.microbatch import MicroBatches, merge
from gpipe.stages.skips import find_loss_pops, refuse_unused_stashes, skip_names
from gpipe.stages.tree import Tree
from gpipe.tracing.own_loss import join

NEEDS_GATHER = (
    "under grad every process needs the output, to call backward(): use pipe(inputs, gather=True), or torch.no_grad()"
)


class Session:
    """The processes of one pipe.

    Args:
        engine: The stages of this process.
        micro_batches: M, of each replica.
        position: Of this process among several; None if it is alone.
        sync_batch_norm: Whether replicas normalize together.
        costs: Of each stage, by which ranks are compared.
        measured: Whether these are seconds.

    Attributes:
        rank: The number of this process.
        size: How many there are.
    """

    def __init__(
        self,
        engine: Engine,
        micro_batches: int,
        *,
        position: Position | None = None,
        sync_batch_norm: bool = False,
        costs: Sequence[float] = (),
        measured: bool = False,
    ) -> None:
        self.engine = engine
        self.micro_batches = micro_batches
        self.position = position
        self.sync_batch_norm = sync_batch_norm
        self.rank, self.size = (0, 1) if position is None else (position.rank, len(position.members))
        self.replica, self.replicas = (0, 1) if position is None else (position.replica, position.replicas)
        self.calls = 0
        self._stragglers = stragglers_among(engine.placement, costs, self.replicas, measured=measured)
        self._net: Net | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves the links behind."""
        return {**vars(self), "_net": None}

    @property
    def reads_inputs(self) -> bool:
        """Whether this process has the first stage."""
        return self.engine.own[0] is self.engine.stages[0]

    @property
    def reads_targets(self) -> bool:
        """Whether this process has the last stage, and computes losses or outputs."""
        return self.engine.own[-1] is self.engine.stages[-1]

    def findings(self) -> list[str]:
        """What is to be said of these stages before a run."""
        settled = self.engine.deferred_batch_norm or self.sync_batch_norm or self.replicas == 1
        return (
            []
            if settled
            else find_replica_drift([layer.module for stage in self.engine.own for layer in stage.layers])
        )

    def link(self, rendezvous: Rendezvous) -> None:
        """Makes the links to the other processes, who do so at the same time; the last that the rendezvous is for."""
        position = self.position
        assert position is not None
        links = connect(rendezvous)
        try:
            shown = partial(agree, rendezvous)
            groups = groups_for(position, self.engine.crossings())
            self._net = Net(position.rank, links, position.timeout, groups, shown)
            rendezvous.close()
        except BaseException:
            for link in links.values():
                link.close()
            self._net = None
            raise

    def linked(self) -> Net:
        """The links, made anew by all processes at once if they were closed."""
        if self._net is None:
            with Rendezvous() as rendezvous, explaining_limits():
                rendezvous.position = self.position
                rendezvous.greet()
                rendezvous.phase = LINKING
                self.link(rendezvous)
        assert self._net is not None
        return self._net

    def gone(self) -> Collection[int]:
        """The ranks to which there is no connection any more, as far as that is known. Any thread may ask."""
        return [] if self._net is None else self._net.lookout.gone()

    def close(self) -> None:
        """Ends threads and links; the next run makes new ones."""
        self.engine.close()
        if self._net is not None:
            self._net.close()
            self._net = None

    @contextmanager
    def run(self, recorder: Recorder | None = None) -> Iterator[Peers]:
        """One run in all processes: whoever fails inside tells the others, and they fail too.

        With a recorder it is noted what crosses.
        """
        if self.position is None:
            yield Peers()
            return
        net = self.linked()
        try:
            net.begin()
            net.noted = None if recorder is None else []
            sync = self.sync_batch_norm
            yield LinkedPeers(self.engine, net, self.position, self._stragglers, sync_batch_norm=sync)
        except BaseException as error:
            net.fail(error)
            raise

    def exchange(self, told: bytes) -> list[bytes]:
        """Tells all processes something between runs, and gives what each told, by rank."""
        with self.run() as peers:
            return peers.exchange(Asked.EXCHANGE, told)

    def step(
        self, given: StepInputs, batch: MiniBatch, header: Header, recorder: Recorder | None
    ) -> tuple[int, Any, list[object]]:
        """Runs a step; gives the least rows of a micro-batch, the loss and the metrics of all replicas."""
        with self.run(recorder) as peers:
            given = given.scaled(self.engine.stages[-1].device, processes=self.size)
            header, targets = self._read(peers, given, batch, replace(header, asked=Asked.STEP))
            told = peers.head(header, partial(self._checksum, batch))
            shares = self._weigh(peers, told, given, batch, targets)
            run = self._start(peers, told, batch)
            run.go(given.ambient, recorder)
            every = self._finish(peers, run, recorder, shares)
        losses = [loss for loss, _ in every if loss is not None]
        metrics = [metric for _, some in every if some is not None for metric in some]
        return min(told.rows), sum(losses[1:], start=losses[0]), metrics

    def _read(self, peers: Peers, given: StepInputs, batch: MiniBatch, header: Header) -> tuple[Header, list[Tree]]:
        """Has a mini-batch be one of a step, with the inputs if they are read here.

        Gives what is said of the run, and the targets, if these are read here as well.
        """
        if self.reads_targets:
            check_loss_fn(given.loss_fn)
            batch.tell(given.findings())
        values: list[Tree] = []
        targets: list[list[Tree]] = []
        header = replace(header, own_loss=given.is_own)
        if self.reads_inputs:
            targets_too = {"targets": given.targets} if self.reads_targets and not given.is_own else {}
            rows, (values, *targets) = split_alike(self.micro_batches, inputs=given.inputs, **targets_too)
            header = replace(header, ready_made=isinstance(given.inputs, MicroBatches), rows=tuple(rows))
            over_replicas = partial(self._sum_over_replicas, peers) if given.is_own else None
            header, values = self._enter(header, batch, values, over_replicas)
        if given.ambient.grad:
            refuse_gradients_of_inputs(values)
        batch.inputs = [BoundaryValue(value, []) for value in values]
        batch.loss_fn = given.loss_fn
        layers, popped = self.engine.layers, skip_names(given.loss_fn, "pop")
        refuse_unused_stashes(layers, popped)
        batch.loss_pops = find_loss_pops(layers, popped)
        return header, targets[0] if targets else []

    def _sum_over_replicas(self, peers: Peers, own: float) -> float:
        return float(sum(peers.tell_replicas(Control.WEIGHT, own)))

    def _enter(
        self,
        header: Header,
        batch: MiniBatch,
        values: list[Tree],
        over_replicas: Callable[[float], float] | None = None,
        *,
        for_output: bool = False,
    ) -> tuple[Header, list[Tree]]:
        """What the first stage takes of some micro-batches, and what is said of them; a model is told its path.

        With `over_replicas` its own loss is wanted.
        """
        replayed = self.engine.replayed
        if replayed is None or not values:
            return header, values
        begun = replayed.begin(values, over_replicas, for_output=for_output)
        batch.path = begun.path
        batch.tell(begun.findings)
        return replace(header, path=begun.path, shares=tuple(begun.shares)), begun.states

    def _weigh(
        self, peers: Peers, told: Header, given: StepInputs, batch: MiniBatch, targets: list[Tree]
    ) -> list[float]:
        """Gives a mini-batch its targets and what each micro-batch counts for, where the last stage is."""
        if not self.reads_targets:
            return []
        self._compare(peers, given)
        if given.is_own:
            batch.targets = [None] * told.micro_batches
            batch.seeds = self._seeds(given, told.shares)
            return list(told.shares)
        if not targets:
            targets = split_targets(given.targets, told.rows, ready_made=bool(told.ready_made))
        batch.targets = targets
        shares = given.shares(told.rows, targets, partial(self._sum_over_replicas, peers))
        batch.seeds = self._seeds(given, shares)
        return shares

    def _seeds(self, given: StepInputs, shares: Sequence[float]) -> list[float | None]:
        """The gradient of each micro-batch's loss; None where it has no say."""
        return [share * given.scale if share or self._awaited else None for share in shares]

    @property
    def _awaited(self) -> bool:
        """Whether other replicas wait for each backward of this one, also of what has no say."""
        return self.sync_batch_norm and self.replicas > 1

    def _compare(self, peers: Peers, given: StepInputs) -> None:
        """Checks that all replicas were given the same to average and to scale by."""
        if self.position is None or self.replicas == 1:
            return
        ranks = self.position.ranks_of_row
        every = peers.tell_replicas(Control.REDUCTION, {"reduction": repr(given.kind), "scale": repr(given.scale)})
        if mistakes := differences(dict(zip(ranks, every, strict=True))):
            raise ValueError(
                f"the replicas were given different things: {'; '.join(mistakes)}. Give step the same loss_fn, "
                f"reduction, scale and scaler in every process"
            )

    def _finish(
        self, peers: Peers, run: MiniBatchRun, recorder: Recorder | None, shares: Sequence[float]
    ) -> list[tuple[Tensor | None, list[object] | None]]:
        """Ends a step; gives the loss and the metrics that each process has."""
        batch = run.batch
        losses = [batch.losses[m] * share for m, share in enumerate(shares) if share]
        metrics = [batch.metrics[m] for m in range(len(shares))]
        plain = all(metric is NO_METRICS for metric in metrics)
        own = (sum(losses) if losses else None, None if plain else metrics)
        try:
            return peers.finish(run, recorder, own, trains=batch.trains)
        except TypeError as error:
            error.add_note(f"rank {self.rank} was telling the others the metrics that loss_fn returned")
            raise

    def call(
        self,
        inputs: Tree,
        batch: MiniBatch,
        header: Header,
        ambient: Ambient,
        recorder: Recorder | None,
        *,
        gather: bool,
    ) -> tuple[int, Any]:
        """Runs the pipelined forward; gives the least rows of a micro-batch, and the output where it is wanted."""
        with self.run(recorder) as peers:
            if ambient.grad and not gather and self.position is not None:
                raise ValueError(NEEDS_GATHER)
            rows, values = split_alike(self.micro_batches, inputs=inputs) if self.reads_inputs else ([], [[]])
            self.calls += 1
            header = replace(header, asked=Asked.CALL, call=self.calls, gathers=gather)
            header = replace(header, ready_made=isinstance(inputs, MicroBatches), rows=tuple(rows))
            header, states = self._enter(header, batch, values[0], for_output=True)
            cuts = [cut(value) for value in states]
            batch.inputs = [crossing for crossing, _ in cuts]
            told = peers.head(header, partial(self._checksum, batch))
            if not self.reads_inputs:
                batch.inputs = [BoundaryValue(None, [])] * told.micro_batches
                batch.input_gradients = {m: [] for m in range(told.micro_batches)}
            run = self._start(peers, told, batch)
            if ambient.grad:
                call = PipelinedCall(
                    partial(self.run, recorder), peers, run, told, ambient, recorder, awaited=self._awaited
                )
                leaves = [leaves for _, leaves in cuts] or [[]] * told.micro_batches
                return min(told.rows), self._as_given(told, pipelined(call, leaves))
            run.go(ambient, recorder)
            outputs = run.take_outputs() if self.reads_targets else []
            if gather:
                outputs = peers.gather(outputs, told.micro_batches)
            peers.finish(run, recorder, None)
            return min(told.rows), self._as_given(told, [output.value for output in outputs])

    def _as_given(self, told: Header, outputs: list[Tree]) -> Tree:
        """Outputs as inputs were given: together, or of each ready-made micro-batch; None where there are none."""
        if not outputs:
            return None
        if told.ready_made:
            return outputs
        return merge(outputs) if self.engine.replayed is None else join(outputs, told.rows, told.shares)

    def _start(self, peers: Peers, told: Header, batch: MiniBatch) -> MiniBatchRun:
        batch.first = self.replica * self.micro_batches
        return self.engine.start(told.micro_batches, batch, peers.join)

    def _checksum(self, batch: MiniBatch, told: Header) -> int:
        batch.path = told.path
        return self.engine.compiled(self.engine.wanted(told.micro_batches, batch)).checksum
