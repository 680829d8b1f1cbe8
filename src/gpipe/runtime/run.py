"""One mini-batch: everything that is known and kept of it. A `step` or a call makes it, and it ends with them.

Stages and pipe keep nothing of it, so that several may be alive: a call waits for its backward while others begin
and end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from gpipe.batch.losses import call_loss
from gpipe.batch.microbatch import Reduction, loss_weights
from gpipe.runtime.compiled_table import CompiledProgram, StageRoutes
from gpipe.runtime.context import Context
from gpipe.runtime.feature import Feature, Hooks, Work
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.runtime.streams import RankStream
from gpipe.schedule.action import Kind
from gpipe.schedule.lowering import ProgramKey
from gpipe.stages.boundary import BoundaryValue, Gradients, Output
from gpipe.stages.messages import Label, Message
from gpipe.stages.rng import RankScope
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.skips import Pop
from gpipe.stages.stage import LayerProgress, RngKey, StageRun
from gpipe.stages.thread_state import ThreadState
from gpipe.stages.tree import Tree

F = TypeVar("F", bound=Feature)

_NO_ALIASES = WeightAliases((), ())


@dataclass(slots=True)
class MicroBatchState:
    """The state of one micro-batch at one stage, from its forward to its backward.

    Attributes:
        given: The inputs that the stage received, one for each route into it, the main one last.
        gradients: The gradients of the leaves of each input, once the backward has run.
        roots: The tensors at which the backward begins: the outputs, route by route, or the loss.
    """

    micro_batch: int
    stage_run: StageRun
    routes: StageRoutes
    given: list[BoundaryValue]
    progress: LayerProgress
    gradients: list[Gradients] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Rank:
    """One rank of this process in one mini-batch, with its state between actions.

    Attributes:
        states: By stage and micro-batch. Empty at the end.
        local_messages: Messages between its stages. Empty at the end.
        inbox: The messages that the current action has received.
        outbox: The messages that the current action is about to send.
        scope: The random numbers of its layers. With `driver="lockstep"` all ranks have the same.
    """

    rank: int
    stream: RankStream
    stages: dict[int, StageRun]
    states: dict[tuple[int, int], MicroBatchState] = field(default_factory=dict)
    local_messages: dict[Label, Message] = field(default_factory=dict)
    inbox: list[Message] = field(default_factory=list)
    outbox: Sequence[Message] = ()
    scope: RankScope = field(init=False)


def call_loss_fn(run: Run, m: int, output: Tree, target: Tree, popped: Mapping[str, object]) -> tuple[Tensor, object]:
    """Calls the loss function of a run for a micro-batch; returns the loss and metrics."""
    assert run.loss_fn is not None
    return call_loss(run.loss_fn, output, target, popped)


@dataclass(eq=False)
class Run:
    """One mini-batch."""

    stages: PipelineStages
    context: Context
    thread_state: ThreadState  # of the caller
    seed: int
    step_number: int  # keys randomness, together with the seed
    training: bool  # whether the pipe is in training mode
    features: Sequence[Feature] = ()  # later ones are around earlier ones
    choose_features: Callable[[Run], Sequence[Feature]] = attrgetter("features")  # once the table is compiled
    hooks: Hooks = field(default_factory=Hooks)
    work: Mapping[Kind, Work] = field(default_factory=dict)  # the function for each kind of action
    ranks: Sequence[Rank] = ()
    report_findings: Callable[[Sequence[str]], object] = len
    call: int = 0  # its number, if it is a call
    gathers: bool = False  # whether every process gets the output
    micro_batch_sizes: tuple[int, ...] = ()  # in rows
    ready_made: bool = False  # whether the micro-batches were given as such
    slices: int = 1  # of each micro-batch; they count as micro-batches here
    path: int = 0  # the path that a traced model takes
    own_weights: tuple[float, ...] = ()  # of each micro-batch in the model's own loss, if it gives one
    inputs: Sequence[BoundaryValue] = ()
    targets: Sequence[Tree] = ()
    loss_fn: Callable[..., object] | None = None  # None: the loss is computed outside
    call_loss: Callable[[Run, int, Tree, Tree, Mapping[str, object]], tuple[Tensor, object]] = call_loss_fn
    loss_pops: Sequence[Pop] = ()
    scale: float = 1.0  # of the gradients
    loss_weights: Sequence[float] = ()  # of each micro-batch in the loss
    loss_gradients: Sequence[float | None] = ()  # None: weight 0
    outputs: dict[int, Output] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, object] = field(default_factory=dict)
    output_gradients: Sequence[Gradients] = ()  # of the tensors of each output that require one
    input_shapes: Sequence[object] = ()  # of a call's inputs that want a gradient, in each process
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.trains = self.thread_state.grad  # whether there is a backward

    @property
    def first(self) -> int:
        """The number of the first micro-batch, or slice, of this replica, by which randomness is keyed."""
        return self.context.replica * self.stages.micro_batches * self.slices

    def compiled_program(self) -> CompiledProgram:
        """The checked table of such a mini-batch, compiled."""
        halved, pops = self.loss_fn is None, tuple(self.loss_pops)
        number = len(self.micro_batch_sizes)
        return self.stages.compiled(ProgramKey(number, self.trains, halved, pops, self.path, self.slices))

    def compile(self) -> None:
        """Compiles the table of the mini-batch, and makes the aliases of shared weights."""
        self.compiled = self.compiled_program()
        self.routes: Sequence[StageRoutes] = self.compiled.routes
        shared = self.stages.shared
        self.aliases = WeightAliases(shared, self.stages.own) if shared else _NO_ALIASES

    def feature(self, kind: type[F]) -> F | None:
        """The feature of a class, if the run has it."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def rng_key(self, micro_batch: int) -> RngKey:
        return RngKey(self.seed, self.step_number, self.first + micro_batch)

    def weigh(self, reduction: Reduction) -> None:
        """Sets the weights of the micro-batches as a reduction says."""
        over_replicas = self.context.sum_over_replicas
        self.set_weights(loss_weights(reduction, self.micro_batch_sizes, self.targets, over_replicas))

    def set_weights(self, weights: Sequence[float]) -> None:
        """Sets the weights of the micro-batches in the loss, and with them the gradients of their losses."""
        self.loss_weights = weights
        runs_all = self.context.runs_every_backward
        self.loss_gradients = [weight * self.scale if weight or runs_all else None for weight in weights]

    def take_outputs(self) -> list[Output]:
        """Returns the outputs of all micro-batches, and drops them."""
        made, self.outputs = self.outputs, {}
        return [made[m] for m in range(len(made))]

    def result(self) -> tuple[Tensor | None, list[object] | None, Tensor | None]:
        """Returns the loss of this replica, and the metrics (if there are any) and losses of micro-batches."""
        loss: Tensor | None = None
        for m, weight in enumerate(self.loss_weights):
            if weight:
                share = self.losses[m] * weight
                loss = share if loss is None else loss + share
        each = range(len(self.loss_weights))
        losses = torch.stack([self.losses[m] for m in each]) if each else None
        return loss, list(map(self.metrics.get, each)) if self.metrics else None, losses
