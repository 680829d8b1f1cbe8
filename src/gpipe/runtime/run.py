"""One mini-batch: all that is known and held of it. A `step` or a call makes it, and it ends with them.

Stages, engine and pipe hold nothing of it, so that several may be alive: a call waits for its backward while others
begin and end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from gpipe.runtime.context import Context
from gpipe.runtime.engine import Engine, Wanted
from gpipe.runtime.split_backward import PendingWeights
from gpipe.runtime.steps import CompiledProgram, Connections
from gpipe.runtime.streams import RankStream
from gpipe.runtime.thread_state import ThreadState
from gpipe.stages.batchnorm import DeferredStatistics
from gpipe.stages.boundary import BoundaryValue, Gradients, detached
from gpipe.stages.buffers import SavedBuffers
from gpipe.stages.losses import NO_METRICS, call_loss
from gpipe.stages.messages import Label, Message
from gpipe.stages.recompute_check import Fingerprint
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.side_effects import FirstRunCheck, WeightOwners
from gpipe.stages.skips import Pop
from gpipe.stages.stage import LayerProgress, RngKey, StageRun
from gpipe.stages.tree import Tree, tensors_in

if TYPE_CHECKING:
    from gpipe.runtime.recorder import Recorder

_NO_ALIASES = WeightAliases((), ())


@dataclass(frozen=True, slots=True)
class Output:
    """What the last stage made of a micro-batch, cut from its graph; `wants_gradient` says it of each tensor."""

    value: Tree
    wants_gradient: tuple[bool, ...]

    @classmethod
    def of(cls, value: Tree) -> Output:
        """Cuts a value from its graph."""
        wants = tuple(tensor.requires_grad for tensor in tensors_in(value))
        return cls(detached(value), wants)


@dataclass(slots=True)
class Saved:
    """What a stage keeps of one micro-batch between its forward and its backward.

    `given` is what came by each connection into the stage, `gradients` where those of its leaves will be; `roots`,
    for each connection out of the stage (at the last one, for the loss or the output), the tensors of the graph
    whose gradients will come back. With rematerialization both are of the recompute: until then only `given` is
    kept. Between the parts of a backward in two only `pending` is kept, what the second needs.
    """

    given: list[BoundaryValue]
    gradients: list[Gradients] = field(default_factory=list)
    roots: list[list[Tensor]] = field(default_factory=list)
    pending: PendingWeights | None = None
    snapshot: SavedBuffers | None = None
    progress: LayerProgress = field(default_factory=LayerProgress)
    fingerprint: Fingerprint | None = None  # of the forward: the recompute must have the same


@dataclass(eq=False)
class Rank:
    """One rank of this process in one mini-batch: its stages, and what it holds between its actions.

    Attributes:
        rank: Its number.
        stream: Where its work is queued.
        stages: By their numbers.
        saved: What its stages keep of micro-batches, by stage and micro-batch; empty at the end.
        handed: What its stages have for each other, by what a message would be labelled; empty likewise.
        taken: What the action that is being done was brought.
        deferred: The statistics of BatchNorm to be committed, by stage.
        commits: The stages whose statistics are whole: committed at the end, since a failed run changes none.
        checks: Of the stages, in the first run that trains.
        doubts: On a GPU, whether recomputes differ from their forwards.
    """

    rank: int
    stream: RankStream
    stages: dict[int, StageRun]
    saved: dict[tuple[int, int], Saved] = field(default_factory=dict)
    handed: dict[Label, Message] = field(default_factory=dict)
    taken: list[Message] = field(default_factory=list)
    deferred: dict[int, DeferredStatistics] = field(default_factory=dict)
    commits: list[int] = field(default_factory=list)
    checks: dict[int, FirstRunCheck] = field(default_factory=dict)
    doubts: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Run:
    """One mini-batch.

    Attributes:
        engine: The stages, and what runs them.
        context: What other processes do meanwhile, if there are any.
        thread_state: The caller's modes.
        recorder: Notes what is done when, if there is one.
        tell: Says what was found: the backward of a call comes when it comes.
        step: Keys randomness, together with `seed`.
        training: Whether the pipe is in training mode.
        examines: Whether what layers do is looked at more closely.
        call: The number of the call, if it is one.
        gathers: Whether every process gets the output.
        rows: Of each micro-batch.
        ready_made: Whether the micro-batches were given as such.
        path: The number of the path that a traced model takes.
        own_weights: Of each micro-batch in the model's own loss, if it gives one.
        inputs: Taken by the first stage.
        call_loss: Calls the loss of the first micro-batch, perhaps to see how it averages.
        loss_weights: What each micro-batch counts for in the loss.
        loss_gradients: The gradient of each micro-batch's loss, None if it has no say.
        outputs: Of the last stage, where the loss is computed outside.
        output_gradients: For each micro-batch what comes back to the tensors of its output that want a gradient.
        input_gradients: Likewise what comes back to the inputs.
        findings: What is to be told, where it `examines`.
        versions: What a recompute depends on, as it was behind the forward of a call.
        began: When, by the clock that all processes of a host share.
    """

    engine: Engine
    context: Context
    thread_state: ThreadState
    seed: int
    step: int
    training: bool
    recorder: Recorder | None = None
    examines: bool = False
    tell: Callable[[Sequence[str]], object] = len
    call: int = 0
    gathers: bool = False
    rows: tuple[int, ...] = ()
    ready_made: bool = False
    path: int = 0
    own_weights: tuple[float, ...] = ()
    inputs: Sequence[BoundaryValue] = ()
    targets: Sequence[Tree] = ()
    loss_fn: Callable[..., object] | None = None
    call_loss: Callable[..., tuple[Tensor, object]] = call_loss
    loss_pops: Sequence[Pop] = ()
    loss_weights: Sequence[float] = ()
    loss_gradients: Sequence[float | None] = ()
    outputs: dict[int, Output] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, object] = field(default_factory=dict)
    output_gradients: Sequence[Gradients] = ()
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    versions: object = None
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.trains = self.thread_state.grad  # whether there is a backward
        self.first = self.context.replica * self.engine.micro_batches

    def compiled_program(self) -> CompiledProgram:
        """The checked table of such a mini-batch, compiled."""
        halved, pops = self.loss_fn is None, tuple(self.loss_pops)
        return self.engine.compiled(Wanted(len(self.rows), self.trains, halved, pops, self.path))

    def rng_key(self, micro_batch: int) -> RngKey:
        """What keys the randomness of a micro-batch."""
        return RngKey(self.seed, self.step, self.first + micro_batch)

    def take_outputs(self) -> list[Output]:
        """The outputs of all micro-batches, which the run then forgets."""
        made, self.outputs = self.outputs, {}
        return [made[m] for m in range(len(made))]

    def result(self) -> tuple[Tensor | None, list[object] | None]:
        """The loss of this replica, and the metrics of each micro-batch, where there are any."""
        losses = [self.losses[m] * weight for m, weight in enumerate(self.loss_weights) if weight]
        metrics = [self.metrics[m] for m in range(len(self.loss_weights))]
        plain = all(metric is NO_METRICS for metric in metrics)
        return sum(losses[1:], start=losses[0]) if losses else None, None if plain else metrics

    def settle(self) -> None:
        """Commits the statistics of BatchNorm, once the run has ended well in all processes."""
        for rank in self.ranks:
            if rank.commits:
                with rank.stream.enter():
                    for stage in rank.commits:
                        rank.deferred[stage].commit()
                rank.stream.end()
                rank.commits.clear()

    def weigh(self, weights: Sequence[float], scale: float) -> None:
        """Says what each micro-batch counts for in the loss, and by what gradients are scaled."""
        self.loss_weights = weights
        awaited = self.context.awaits_backwards
        self.loss_gradients = [weight * scale if weight or awaited else None for weight in weights]

    def prepare(self) -> None:
        """Compiles the table, and makes what the ranks and shared weights need."""
        engine = self.engine
        self.compiled = self.compiled_program()
        self.connections: Sequence[Connections] = self.compiled.connections
        self.aliases = WeightAliases(engine.shared, engine.own) if engine.shared else _NO_ALIASES
        weights = self.aliases.sources.values()
        several = self.trains and (len(engine.own) > 1 or weights)
        self.owners = WeightOwners(engine.own, weights) if several else None
        self.ranks = [
            Rank(rank, stream, {stage.index: StageRun(stage) for stage in engine.stages_of[rank]})
            for rank, stream in engine.streams.items()
        ]
        if engine.deferred_batch_norm:
            for rank in self.ranks:
                rank.deferred = {at: DeferredStatistics.of(run.buffers.modules) for at, run in rank.stages.items()}
