"""The state of one mini-batch: `Run`, the state of each rank in it, and of each micro-batch at a stage.

Every `step` and every call of the pipe creates a `Run`. The stages and the pipe hold no state of a mini-batch, so
several runs can exist at once. For example, a call can wait for its backward pass while other mini-batches begin and
end.
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
    """The state of one micro-batch at one stage, from its forward pass to its backward pass.

    Attributes:
        inputs: The inputs that the stage received, one for each route into the stage. The main route is last.
        gradients: The gradients of the leaf tensors of each input, after the backward pass.
        roots: The tensors at which the backward pass starts: the outputs of each route, or the loss.
    """

    micro_batch: int
    stage_run: StageRun
    routes: StageRoutes
    inputs: list[BoundaryValue]
    progress: LayerProgress
    gradients: list[Gradients] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Rank:
    """The state of one rank in one mini-batch, between its actions.

    Attributes:
        states: The state of each micro-batch at each stage. Empty at the end of the mini-batch.
        local_messages: Messages between stages of this rank. Empty at the end of the mini-batch.
        inbox: The messages that the current action has received.
        outbox: The messages that the current action will send, in the order of `CompiledAction.sends`: boundary
            values after a forward pass, gradients after a backward pass.
        scope: Sets the random numbers of the layers. With `driver="lockstep"`, all ranks share one scope.
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
    """Calls the loss function of a run on the output of micro-batch `m`, and returns the loss and the metrics."""
    assert run.loss_fn is not None
    return call_loss(run.loss_fn, output, target, popped)


@dataclass(eq=False)
class Run:
    """The state of one mini-batch: settings, micro-batches, weights of losses, and results.

    `step` and calls of the pipe set the attributes that have defaults, before the executor runs the program.
    """

    stages: PipelineStages
    context: Context
    thread_state: ThreadState  # modes of the calling thread
    seed: int
    step_number: int  # Random numbers of layers depend on the seed and this number.
    training: bool  # whether the pipe is in training mode
    features: Sequence[Feature] = ()  # Later features wrap earlier ones.
    choose_features: Callable[[Run], Sequence[Feature]] = attrgetter("features")  # called after `compile`
    hooks: Hooks = field(default_factory=Hooks)
    work: Mapping[Kind, Work] = field(default_factory=dict)  # the function that performs each kind of action
    ranks: Sequence[Rank] = ()
    report_findings: Callable[[Sequence[str]], object] = len
    call: int = 0  # the number of the call, 0 for a step
    gathers: bool = False  # whether every process receives the output
    micro_batch_sizes: tuple[int, ...] = ()  # numbers of rows
    ready_made: bool = False  # whether the caller passed `gpipe.MicroBatches`
    slices: int = 1  # slices per micro-batch; the program treats each slice as a micro-batch
    path: int = 0  # the control-flow path of a traced model
    own_weights: tuple[float, ...] = ()  # weights of micro-batches in the model's own loss
    inputs: Sequence[BoundaryValue] = ()
    targets: Sequence[Tree] = ()
    loss_fn: Callable[..., object] | None = None  # None in a call: the caller computes the loss.
    call_loss: Callable[[Run, int, Tree, Tree, Mapping[str, object]], tuple[Tensor, object]] = call_loss_fn
    loss_pops: Sequence[Pop] = ()
    scale: float = 1.0  # a factor for the gradients
    loss_weights: Sequence[float] = ()  # the weight of each micro-batch in the loss
    loss_gradients: Sequence[float | None] = ()  # the gradient of each micro-batch's loss; None for weight 0
    outputs: dict[int, Output] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, object] = field(default_factory=dict)
    output_gradients: Sequence[Gradients] = ()  # for each output of a call, those of tensors that require gradients
    input_shapes: Sequence[object] = ()  # for each process, shapes of a call's inputs that require gradients
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.trains = self.thread_state.grad  # whether there is a backward pass

    def compiled_program(self) -> CompiledProgram:
        """Returns the compiled program for mini-batches like this one."""
        number, is_call, pops = len(self.micro_batch_sizes), self.loss_fn is None, tuple(self.loss_pops)
        return self.stages.compiled(ProgramKey(number, self.trains, is_call, pops, self.path, self.slices))

    def compile(self) -> None:
        """Compiles the program of the mini-batch, and creates aliases of shared weights for each stage."""
        self.compiled = self.compiled_program()
        # The number of this replica's first micro-batch (or slice) among all replicas: random keys depend on it.
        self.first = self.context.replica * self.stages.micro_batches * self.slices
        self.routes: Sequence[StageRoutes] = self.compiled.routes
        shared = self.stages.shared
        self.aliases = WeightAliases(shared, self.stages.local) if shared else _NO_ALIASES

    def feature(self, kind: type[F]) -> F | None:
        """Returns the feature of a class, or None if the run does not have it."""
        for feature in self.features:
            if isinstance(feature, kind):
                return feature
        return None

    def rng_key(self, micro_batch: int) -> RngKey:
        """Returns the key of the random numbers that layers draw for a micro-batch."""
        return RngKey(self.seed, self.step_number, self.first + micro_batch)

    def weigh(self, reduction: Reduction) -> None:
        """Sets the weights of the micro-batches according to a reduction."""
        over_replicas = self.context.sum_over_replicas
        self.set_weights(loss_weights(reduction, self.micro_batch_sizes, self.targets, over_replicas))

    def set_weights(self, weights: Sequence[float]) -> None:
        """Sets the weight of each micro-batch in the loss, and the gradient with which its backward pass starts."""
        self.loss_weights = weights
        runs_all = self.context.runs_every_backward
        self.loss_gradients = [weight * self.scale if weight or runs_all else None for weight in weights]

    def take_outputs(self) -> list[Output]:
        """Removes and returns the outputs of all micro-batches."""
        outputs, self.outputs = self.outputs, {}
        return [outputs[m] for m in range(len(outputs))]

    def result(self) -> tuple[Tensor | None, list[object] | None, Tensor | None]:
        """Returns the loss of this replica, and the metrics and losses of its micro-batches. Each can be None."""
        loss: Tensor | None = None
        for m, weight in enumerate(self.loss_weights):
            if weight:
                weighted = self.losses[m] * weight
                loss = weighted if loss is None else loss + weighted
        each = range(len(self.loss_weights))
        losses = torch.stack([self.losses[m] for m in each]) if each else None
        return loss, list(map(self.metrics.get, each)) if self.metrics else None, losses
