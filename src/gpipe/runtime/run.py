"""One mini-batch: all that is known and held of it. A `step` or a call makes it, and it ends with them.

Stages, engine and pipe hold nothing of it, so that several may be alive: a call waits for its backward while others
begin and end.
"""

from __future__ import annotations

import contextvars
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe.runtime.context import Context
from gpipe.runtime.engine import Engine, Wanted
from gpipe.runtime.offload import Host, Inside, host_of
from gpipe.runtime.split_backward import PendingWeights
from gpipe.runtime.steps import CompiledAction, CompiledProgram, Connections
from gpipe.runtime.streams import RankStream
from gpipe.runtime.threads import ThreadState
from gpipe.schedule.action import Kind
from gpipe.stages.batchnorm import DeferredStatistics
from gpipe.stages.boundary import BoundaryValue, Gradients, detached
from gpipe.stages.buffers import SavedBuffers
from gpipe.stages.loss_check import LossWatch
from gpipe.stages.losses import call_loss, runs_once
from gpipe.stages.messages import Label, Message
from gpipe.stages.microbatch import Reduction, loss_weights
from gpipe.stages.recompute_check import Fingerprint
from gpipe.stages.rng import RankScope
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.skips import Pop
from gpipe.stages.slices import SliceKeys
from gpipe.stages.stage import LayerProgress, RngKey, StageRun
from gpipe.stages.tree import Tree, tensors_in

if TYPE_CHECKING:
    from gpipe.runtime.evidence import Evidence
    from gpipe.runtime.recorder import Recorder
    from gpipe.runtime.step_record import StepRecord
    from gpipe.runtime.verifier import Verifier

_NO_ALIASES = WeightAliases((), ())


@dataclass(frozen=True, slots=True)
class Output:
    """What the last stage made of a micro-batch, cut from its graph; `wants_gradient` says it of each tensor."""

    value: Tree
    wants_gradient: tuple[bool, ...]

    @classmethod
    def of(cls, value: Tree) -> Output:
        wants = tuple(tensor.requires_grad for tensor in tensors_in(value))
        return cls(detached(value), wants)


@dataclass(slots=True)
class Saved:
    """What a stage keeps of one micro-batch between its forward and its backward.

    `given` is what came by each connection into the stage, `gradients` where those of its leaves will be; `roots` are
    the tensors of the graph whose gradients will come back, by one connection out of the stage after another (at the
    last one, the loss or those of the output). With rematerialization both are of the recompute: until then only
    `given` is kept.
    """

    given: list[BoundaryValue]
    progress: LayerProgress
    gradients: list[Gradients] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)
    inside: Inside | None = None  # what is offloaded, until it is back
    snapshot: SavedBuffers | None = None
    fingerprint: Fingerprint | None = None  # of the forward: the recompute must have the same
    keys: SliceKeys | None = None  # of a slice of a micro-batch


@dataclass(eq=False)
class Rank:
    """One rank of this process in one mini-batch: its stages by number, and what it holds between its actions."""

    rank: int
    stream: RankStream
    stages: dict[int, StageRun]
    host: Host | None = None  # if it offloads
    saved: dict[tuple[int, int], Saved] = field(default_factory=dict)  # by stage and micro-batch; empty at the end
    waiting: dict[int, dict[int, PendingWeights]] = field(default_factory=partial(defaultdict, dict))
    """What I left for W, by stage and micro-batch; empty likewise."""
    handed: dict[Label, Message] = field(default_factory=dict)
    """What its stages have for each other, by what a message would be labelled; empty likewise."""
    taken: list[Message] = field(default_factory=list)  # what the action that is being done was brought
    deferred: dict[int, DeferredStatistics] = field(default_factory=dict)  # of BatchNorm, to be committed, by stage
    commits: list[int] = field(default_factory=list)
    """The stages whose statistics are whole: committed at the end, since a failed run changes none."""
    doubts: list[Tensor] = field(default_factory=list)  # on a GPU, whether recomputes differ from their forwards
    scope: RankScope = field(init=False)  # what its layers draw from; in lockstep all ranks have one


@dataclass(eq=False)
class Run:
    """One mini-batch."""

    engine: Engine
    context: Context
    thread_state: ThreadState  # of the caller
    seed: int
    step_number: int  # keys randomness, together with the seed
    training: bool  # whether the pipe is in training mode
    recorder: Recorder | None = None
    combination: object = None  # what the step stands for if it is verified (see `Verifier`)
    verifier: Verifier | None = None
    verifies: bool = False  # whether this mini-batch is to be verified
    record: StepRecord | None = None
    evidence: Evidence | None = None
    work: Mapping[Kind, Callable[[Run, Rank, CompiledAction], None]] = field(default_factory=dict)
    tell: Callable[[Sequence[str]], object] = len  # says what was found: the backward of a call comes when it comes
    call: int = 0  # its number, if it is a call
    gathers: bool = False  # whether every process gets the output
    micro_batch_sizes: tuple[int, ...] = ()  # in rows
    ready_made: bool = False  # whether the micro-batches were given as such
    slices: int = 1  # of each micro-batch: what is numbered here as micro-batches are these
    path: int = 0  # the number of that which a traced model takes
    own_weights: tuple[float, ...] = ()  # of each micro-batch in the model's own loss, if it gives one
    inputs: Sequence[BoundaryValue] = ()
    targets: Sequence[Tree] = ()
    loss_fn: Callable[..., object] | None = None  # None: the loss is computed outside
    watch: LossWatch | None = None  # of the loss function, if `step` was not passed a reduction
    loss_pops: Sequence[Pop] = ()
    scale: float = 1.0  # of the gradients
    loss_weights: Sequence[float] = ()  # what each micro-batch counts for in the loss
    loss_gradients: Sequence[float | None] = ()  # None: it has no say
    outputs: dict[int, Output] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, object] = field(default_factory=dict)
    output_gradients: Sequence[Gradients] = ()  # what comes back to the tensors of each output that want one
    input_shapes: Sequence[object] = ()  # of a call's inputs that want a gradient, in each process
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    versions: object = None  # what a recompute depends on, as it was behind the forward of a call
    began: float = field(default_factory=time.perf_counter)
    variables: contextvars.Context | None = None  # of a call, if its backward runs in autograd's thread of a device

    def __post_init__(self) -> None:
        self.trains = self.thread_state.grad  # whether there is a backward

    @property
    def first(self) -> int:
        """The number of the first micro-batch, or slice, of this replica, by which randomness is keyed."""
        return self.context.replica * self.engine.micro_batches * self.slices

    def compiled_program(self) -> CompiledProgram:
        """The checked table of such a mini-batch, compiled."""
        halved, pops = self.loss_fn is None, tuple(self.loss_pops)
        number = len(self.micro_batch_sizes)
        return self.engine.compiled(Wanted(number, self.trains, halved, pops, self.path, self.slices))

    def prepare(self) -> None:
        """Compiles the table, and makes what the ranks and shared weights need."""
        engine = self.engine
        self.compiled = self.compiled_program()
        self.connections: Sequence[Connections] = self.compiled.connections
        self.aliases = WeightAliases(engine.shared, engine.own) if engine.shared else _NO_ALIASES
        self.ranks = [self.new_rank(number) for number in engine.streams]

    def new_rank(self, number: int) -> Rank:
        """A rank of this process as it begins a mini-batch."""
        stages, stream = self.engine.stages_of[number], self.engine.streams[number]
        offloads = any(self.connections[stage.index].offloaded for stage in stages)
        rank = Rank(number, stream, {stage.index: StageRun(stage) for stage in stages})
        if offloads:
            rank.host = host_of(stream)
        if self.engine.deferred_batch_norm:
            for index, stage_run in rank.stages.items():
                rank.deferred[index] = DeferredStatistics.of(stage_run.buffers.modules)
        return rank

    def rng_key(self, micro_batch: int) -> RngKey:
        return RngKey(self.seed, self.step_number, self.first + micro_batch)

    def weigh(self, reduction: Reduction) -> None:
        """Sets the weights of the micro-batches as a reduction says."""
        over_replicas = self.context.sum_over_replicas
        self.set_weights(loss_weights(reduction, self.micro_batch_sizes, self.targets, over_replicas))

    def set_weights(self, weights: Sequence[float]) -> None:
        """Sets the weights of the micro-batches in the loss, and with them the gradients of their losses."""
        self.loss_weights = weights
        awaited = self.context.awaits_backwards
        self.loss_gradients = [weight * self.scale if weight or awaited else None for weight in weights]

    def call_loss_fn(self, m: int, output: Tree, target: Tree, popped: Mapping[str, object]) -> tuple[Tensor, object]:
        """Calls the loss function for a micro-batch; the first call decides the weights, unless they are known."""
        assert self.loss_fn is not None
        if self.watch is None:
            return call_loss(self.loss_fn, output, target, popped)
        rows = self.micro_batch_sizes[m]
        made = self.watch.call(m, self.loss_fn, (output, target, popped), rows, ready_made=self.ready_made)
        if not self.loss_weights:
            self.weigh("mean" if self.watch.average is None else self.watch.average.reduction)
        return made

    def check_loss(self) -> list[str]:
        """Compares the losses of the micro-batches with the loss of the mini-batch; returns findings."""
        if self.watch is None or self.loss_fn is None or not self.verifies or runs_once(self.loss_fn):
            return []
        last, layers = len(self.engine.stages) - 1, len(self.engine.layers)
        stream = next(rank.stream for rank in self.ranks if last in rank.stages)
        parameters = [
            weight for stage in self.engine.own for layer in stage.layers for weight in layer.module.parameters()
        ]
        scope = RankScope(self.seed, self.step_number)
        stream.begin(())
        with (
            stream.enter(),
            self.thread_state.rank_thread(),
            scope,
            self.thread_state.around_layers(),
            torch.no_grad(),
        ):
            found = self.watch.find_mistakes(
                self.loss_fn, self.losses, self.loss_weights, self.targets, parameters, partial(scope.go_to, layers)
            )
        stream.end()
        return found

    def take_outputs(self) -> list[Output]:
        """The outputs of all micro-batches, which the run then forgets."""
        made, self.outputs = self.outputs, {}
        return [made[m] for m in range(len(made))]

    def result(self) -> tuple[Tensor | None, list[object] | None, Tensor | None]:
        """The loss of this replica; of each micro-batch the metrics, where there are any, and the loss."""
        loss: Tensor | None = None
        for m, weight in enumerate(self.loss_weights):
            if weight:
                share = self.losses[m] * weight
                loss = share if loss is None else loss + share
        each = range(len(self.loss_weights))
        losses = torch.stack([self.losses[m] for m in each]) if each else None
        return loss, list(map(self.metrics.get, each)) if self.metrics else None, losses

    def settle(self) -> None:
        """Commits the statistics of BatchNorm, once the run has ended well in all processes."""
        for rank in self.ranks:
            if rank.commits:
                rank.stream.begin(())
                with rank.stream.enter():
                    for stage in rank.commits:
                        rank.deferred[stage].commit()
                rank.stream.end()
                rank.commits.clear()
