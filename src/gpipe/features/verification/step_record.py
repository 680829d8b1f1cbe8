"""Records what stages receive and compute for the first two micro-batches of a step, and compares two such records.

A step is recorded, then replayed in the order of the reference loop while a second record is made (verification.py).
Inputs and incoming gradients are kept as copies, for the replay. Results are kept as digests.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import chain
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from gpipe._torch.autograd import has_gradient_hooks
from gpipe._torch.modes import OwnMode
from gpipe.errors import VerificationError
from gpipe.features.slices import Slices
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.feature import Feature, Work
from gpipe.runtime.run import MicroBatchState, Rank, Run
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import VERIFIED_MICRO_BATCHES
from gpipe.schedule.rules import BACKWARDS
from gpipe.stages.boundary import BoundaryInput, BoundaryValue, Gradients, copy_boundary, leaves_of
from gpipe.stages.digest import Digest, differ, digest
from gpipe.stages.memory_layout import copy_of
from gpipe.stages.messages import Message
from gpipe.stages.stage import HOOKED_NODE, Layer, Stage, StageCall
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

P = ParamSpec("P")
OUT_OF_MEMORY = torch.OutOfMemoryError, MemoryError


class Quantity(NamedTuple):
    """A result that a stage computed for one micro-batch."""

    text: str
    micro_batch: int
    layer: str | None = None  # the layer that computed it, if that is known

    def __str__(self) -> str:
        return f"{self.text} for micro-batch {self.micro_batch}"


class WeightGradients(NamedTuple):
    """The `.grad` of a stage's leaf tensors: copies from before the first backward, digests from after the last."""

    leaves: Mapping[int, Tensor]  # by id
    before: Mapping[int, Tensor | None]
    after: dict[int, list[Digest]]  # two where the backward is split: a weight's gradient is complete in one of them

    @classmethod
    def of(cls, leaves: Mapping[int, Tensor]) -> "WeightGradients":
        gradients = {key: gradient_of(leaf) for key, leaf in leaves.items()}
        copies = {key: None if one is None else copy_of(one.detach()) for key, one in gradients.items()}
        return cls(leaves, copies, {})

    def only(self, lasting: Collection[int]) -> "WeightGradients":
        """Returns the same record for fewer leaves."""
        leaves = {key: leaf for key, leaf in self.leaves.items() if key in lasting}
        return self._replace(leaves=leaves, before={key: self.before[key] for key in leaves})

    def note(self) -> None:
        """Adds digests of the current `.grad`."""
        for key, leaf in self.leaves.items():
            self.after.setdefault(key, []).append(digest([gradient_of(leaf)]))


@dataclass(slots=True)
class StageRecord:
    """The inputs, gradients and results of one stage in the recorded micro-batches."""

    actions: dict[tuple[Kind, int], CompiledAction] = field(default_factory=dict)
    inputs: dict[int, list[BoundaryValue]] = field(default_factory=dict)
    input_digests: dict[int, Digest] = field(default_factory=dict)
    targets: dict[int, Tree] = field(default_factory=dict)
    gradients: dict[int, list[Gradients]] = field(default_factory=dict)
    """The gradients received from later stages, or from the caller's loss."""
    results: dict[Quantity, Digest] = field(default_factory=dict)  # in the order in which they were computed
    written_inputs: list[Quantity] = field(default_factory=list)
    """Inputs that no longer hold the values received when their backward begins."""
    weights: WeightGradients | None = None
    reached: dict[int, Tensor] = field(default_factory=dict)  # all leaves that its backwards reach
    calls_backward: bool = False  # of a replay: whether a forward adds to gradients
    beside_outputs: set[int] = field(default_factory=set)
    """Ids of leaves that a loss uses directly, if the loss is not replayed: their gradients are not compared."""
    given: list[BoundaryValue] = field(default_factory=list)  # of a replay: the inputs of the last forward
    incomplete: list[Tensor] = field(default_factory=list)
    """Inputs of the last forward from which earlier stages computed other inputs: their gradient is partial here."""
    node_hooks: list[Callable[[], Sized | None]] = field(default_factory=list)
    sent: list[tuple[Quantity, Tree, Digest]] = field(default_factory=list)  # of a replay: what it returned

    def differences(self, replay: "StageRecord", name_of: Callable[[int], Quantity]) -> list[Quantity]:
        """The results that differ in a replay of this record, in the order in which they were computed."""
        different = list[Quantity]()
        for quantity, computed in self.results.items():
            replayed = replay.results.get(quantity)
            if replayed is None or differ(computed, replayed):
                different.append(quantity)
        if self.weights is not None and replay.weights is not None:
            for leaf, (replayed, *_) in replay.weights.after.items():
                if leaf not in self.beside_outputs and all(
                    differ(computed, replayed) for computed in self.weights.after[leaf]
                ):
                    different.append(name_of(leaf))
        return different

    def put_gradients_before(self) -> None:
        """Sets `.grad` of the stage's leaves to its value before the step."""
        for key, leaf in self.weights.leaves.items() if self.weights is not None else ():
            before = self.weights.before[key] if self.weights is not None else None
            leaf.grad = None if before is None else copy_of(before)

    def drop_gradients(self) -> None:
        for leaf in self.weights.leaves.values() if self.weights is not None else ():
            leaf.grad = None

    def count_results(self) -> int:
        """Returns the number of results to compare."""
        return len(self.results) + (0 if self.weights is None else len(self.weights.leaves))

    @property
    def written(self) -> list[Quantity]:
        """The inputs and returned values of the stage that it has written, although other stages hold them."""
        returned = [quantity for quantity, value, before in self.sent if differ(digest([value]), before)]
        return [*self.written_inputs, *returned]


def records(method: "Callable[Concatenate[StepRecord, P], None]") -> "Callable[Concatenate[StepRecord, P], None]":
    """Drops the record of a step if there is not enough memory for it. The step goes on, and is not verified."""

    @wraps(method)
    def recording(record: "StepRecord", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if record.is_dropped:
            return
        try:
            method(record, *args, **kwargs)
        except Exception as error:
            is_dropped = record.is_dropped  # by another rank meanwhile, which has freed what this one needs
            if record.is_replay or not (is_dropped or isinstance(error, OUT_OF_MEMORY)):
                raise
            record.drop()

    return recording


class StepRecord(Feature):
    """Records the stages of this process while a step runs.

    Attributes:
        kinds: The kinds of action that it records, besides what they send.
    """

    kinds: ClassVar = frozenset({Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT, *BACKWARDS})

    def __init__(
        self,
        stages: Sequence[Stage],
        micro_batches: int,
        slices: int,
        *,
        calls_loss: bool = True,
        replays: "StepRecord | None" = None,
    ) -> None:
        self._recorded = min(VERIFIED_MICRO_BATCHES, micro_batches // slices)
        self.count = self._recorded * slices
        self._last_forward, self._last_backward = self.count - 1, (self._recorded - 1) * slices
        self._replays = replays
        self.calls_loss = calls_loss  # whether a replay calls the loss again: if not, it gets the recorded gradients
        self.stages = {stage.index: StageRecord() for stage in stages}
        self._output_nodes: dict[int, list[Node]] = {}  # the nodes of the outputs, until their backward
        self._gradients: dict[int, Digest] = {}
        self.is_dropped = False
        self.looks_for_writer = False
        self.writer: str | None = None  # the layer that writes the input of its stage
        self.order: list[CompiledAction] = []  # the recorded forwards and backwards, as they were performed

    def perform_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work |= {kind: partial(self.perform, work[kind]) for kind in self.kinds & work.keys()}
        work[Kind.SEND] = partial(self.send, work[Kind.SEND])

    @contextmanager
    def around_layers(
        self, run: Run, rank: Rank, state: MicroBatchState, entered: Sequence[BoundaryInput], call: StageCall
    ) -> Iterator[None]:
        stage, m = state.stage_run.stage, state.micro_batch
        self._note_boundary(stage, state, entered)
        call.watch = partial(self._note_layer, self.stages[stage.index], m) if m < self.count else None
        yield
        self._check_hooks(stage)
        if not state.routes.outs and call.output is not None:
            self._note_outputs(stage.index, m, call.output.values[0])

    @property
    def is_replay(self) -> bool:
        return self._replays is not None

    def drop(self) -> None:
        """Frees what was recorded, and records no more."""
        self.is_dropped, self.count = True, 0
        for record in self.stages.values():
            for copies in (record.inputs, record.targets, record.gradients):
                copies.clear()
            record.weights = None

    @records
    def begin_pass(self, run: Run, *, only_forward: bool) -> None:
        """Records `.grad` as it is before a pass: digests before the forward of a call, otherwise copies."""
        if only_forward:
            self._gradients = self._digests_of_gradients(run)
            return
        for index, record in self.stages.items():
            record.weights = WeightGradients.of(parameters_of(run, run.stages.all[index]))

    @records
    def check_gradients(self, run: Run) -> None:
        """Raises if the forward of a call has added to gradients: its backward would begin with them."""
        for index, now in self._digests_of_gradients(run).items():
            if differ(now, self._gradients[index]):
                raise VerificationError(f"{run.stages.all[index]} differs from the reference loop. {CALLS_BACKWARD}")

    def _digests_of_gradients(self, run: Run) -> dict[int, Digest]:
        stages = run.stages.all
        return {at: digest([*map(gradient_of, parameters_of(run, stages[at]).values())]) for at in self.stages}

    def perform(self, perform: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        """Performs an action, and records it."""
        if task.micro_batch >= self.count:
            perform(run, rank, task)
            return
        record, kind = self.stages[task.stage], task.action.kind
        if kind is Kind.FORWARD:
            self._begin_forward(record, run, rank, task)
        elif kind in BACKWARDS:
            self._begin_backward(record, run, rank, task)
        perform(run, rank, task)
        self._end(record, run, rank, task)

    def send(self, send: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        """Records the messages that an action is about to send."""
        if task.micro_batch < self.count:
            self._note_sent(task, rank.outbox)
        send(run, rank, task)

    @records
    def _begin_forward(self, record: StageRecord, run: Run, rank: Rank, task: CompiledAction) -> None:
        m = task.micro_batch
        received = rank.inbox if task.stage else [rank.stream.receive_value(run.inputs[m], None)]
        values = [crossing for crossing in received if isinstance(crossing, BoundaryValue)]
        record.input_digests[m] = digest([crossing.value for crossing in values])
        record.given = [] if self._replays is None else values
        self._note_order(record, task)
        if self._replays is None:
            record.inputs[m] = [*map(copy_boundary, values)]
            if task.stage == len(run.stages.all) - 1 and run.loss_fn is not None:
                record.targets[m] = replace_tensors(
                    run.targets[m], lambda target: copy_of(rank.stream.to_device(target, None))
                )

    @records
    def _begin_backward(self, record: StageRecord, run: Run, rank: Rank, task: CompiledAction) -> None:
        m = task.micro_batch
        saved = rank.states[task.stage, m]
        if differ(record.input_digests[m], digest([crossing.value for crossing in saved.inputs])):
            record.written_inputs.append(Quantity(INPUT, m, self.writer))
        if self._replays is not None:
            before = self._replays.stages[task.stage].weights
            if record.weights is None and before is not None:
                record.weights = before._replace(after={})
            self._note_order(record, task)
            return
        given = rank.inbox if task.receives else []
        if not task.receives and run.loss_fn is None:
            given = [rank.stream.receive_gradients(run.output_gradients[m], None)]
        received = [copy_gradients(gradients) for gradients in given if isinstance(gradients, list)]
        record.gradients.setdefault(m, received)  # those of outputs come only now
        slices = run.feature(Slices)
        earlier = [] if slices is None else slices.earlier_leaves(task.stage, m)
        boundary = {id(leaf) for leaf in chain(earlier, *(crossing.leaves for crossing in saved.inputs))}
        reached = {id(leaf): leaf for leaf in leaves_of(saved.roots) if id(leaf) not in boundary}
        parameters = parameters_of(run, run.stages.all[task.stage])
        if not self.calls_loss and not task.receives:
            record.beside_outputs.update(map(id, leaves_of(saved.roots, self._output_nodes.pop(m, ()))))
        record.reached |= parameters | reached
        if record.weights is not None and not any(kind in BACKWARDS for kind, _ in record.actions):
            others = WeightGradients.of({key: leaf for key, leaf in reached.items() if key not in parameters})
            all_before = {**record.weights.before, **others.before}
            record.weights = WeightGradients({**record.weights.leaves, **others.leaves}, all_before, {})
        if m == self._last_backward:
            # If only one micro-batch reaches a leaf, the forward may have created it, unless it is a parameter.
            lasting = {key for key, leaf in reached.items() if self._recorded > 1 or isinstance(leaf, nn.Parameter)}
            assert record.weights is not None
            record.weights = record.weights.only(lasting | parameters.keys())
        self._note_order(record, task)

    def _note_order(self, record: StageRecord, task: CompiledAction) -> None:
        kind = Kind.FORWARD if task.action.kind is Kind.FORWARD else Kind.BACKWARD
        record.actions[kind, task.micro_batch] = task
        self.order.append(task)

    @records
    def _end(self, record: StageRecord, run: Run, rank: Rank, task: CompiledAction) -> None:
        m, kind = task.micro_batch, task.action.kind
        if self._replays is not None and record.weights is None:  # no backward has begun
            weights = self._replays.stages[task.stage].weights
            pairs = weights.leaves.items() if weights is not None else ()
            before = weights.before if weights is not None else {}
            record.calls_backward |= any(leaf.grad is not None and before[key] is None for key, leaf in pairs)
        is_forward, is_last = kind in (Kind.FORWARD, Kind.RECOMPUTE), task.stage == len(run.stages.all) - 1
        if is_forward and is_last and m in run.losses and self.calls_loss:
            record.results[Quantity("the loss", m)] = digest([run.losses[m]])
        if kind is Kind.FORWARD and m == self._last_forward:
            buffers = [*buffers_of(run.stages.all[task.stage])]
            record.results[Quantity("the value of its buffers", m)] = digest(buffers)
        if kind not in (Kind.FORWARD, Kind.RECOMPUTE) and m == self._last_backward and record.weights is not None:
            record.weights.note()

    @records
    def _note_outputs(self, stage: int, micro_batch: int, output: Tree) -> None:
        """Records the output of the last stage, and its gradient if replays do not call the loss."""
        if micro_batch >= self.count:
            return
        record = self.stages[stage]
        record.results[Quantity("the output of the pipe", micro_batch)] = digest([output])
        if self.calls_loss:
            return
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if self._replays is not None:
            # One output may be computed from another: each receives its own recorded gradient, not the sum.
            ((*recorded,),) = self._replays.stages[stage].gradients[micro_batch]
            for tensor, gradient in zip(outputs, recorded, strict=True):
                if isinstance(gradient, Tensor):
                    tensor.register_hook(partial(_give, copy_of(gradient)))
            return
        gradients: Gradients = [None] * len(outputs)
        record.gradients[micro_batch] = [gradients]
        self._output_nodes[micro_batch] = [
            node for node in (tensor.grad_fn for tensor in outputs) if node is not None
        ]
        for at, tensor in enumerate(outputs):
            tensor.register_hook(partial(self._keep_copy, gradients, at))

    @records
    def _keep_copy(self, gradients: Gradients, at: int, gradient: Tensor) -> None:
        gradients[at] = copy_of(gradient)

    @records
    def _note_sent(self, task: CompiledAction, messages: Sequence[Message]) -> None:
        is_value = task.action.kind is Kind.FORWARD
        quantity = Quantity(OUTPUT if is_value else INPUT_GRADIENT, task.micro_batch)
        values = [message.value if isinstance(message, BoundaryValue) else message for message in messages]
        record = self.stages[task.stage]
        for message in messages:
            if isinstance(message, BoundaryValue) and record.incomplete:  # which a layer may have passed on
                passed_on = {at for at, leaf in enumerate(message.leaves) if _is_one_of(leaf, record.incomplete)}
                message.ancestors = (message.ancestors or frozenset()) | passed_on
        record.results[quantity] = digest(values)
        if self._replays is not None:
            record.sent.append((quantity, values, digest(values)))

    def _note_boundary(self, stage: Stage, state: MicroBatchState, entered: Sequence[BoundaryInput]) -> None:
        """Records the inputs that the layers of a forward or recomputation receive."""
        pairs = zip(
            entered[: len(state.routes.ins)], state.inputs, strict=False
        )  # the inputs of a call come from outside
        several = sum(len(value.aliases) for value in entered) > 1
        self.stages[stage.index].incomplete = [
            alias
            for value, crossing in pairs
            for at, alias in enumerate(value.aliases)
            if (several if crossing.ancestors is None else at in crossing.ancestors)
        ]
        self.stages[stage.index].node_hooks = [hooks for value in entered for hooks in value.hooks]

    def _check_hooks(self, stage: Stage) -> None:
        """Raises if layers have registered hooks that would receive a partial gradient, or the wrong node."""
        record = self.stages[stage.index]
        if any(alias.retains_grad or has_gradient_hooks(alias) for alias in record.incomplete):
            raise VerificationError(HOOKED.format(stage=stage))
        if any(len(hooks() or ()) > 1 for hooks in record.node_hooks):  # one is ours
            raise VerificationError(HOOKED_NODE.format(stage=stage))

    @records
    def _note_layer(self, record: StageRecord, micro_batch: int, layer: Layer, value: Tree) -> None:
        quantity = Quantity(f"the output of {layer}", micro_batch, str(layer))
        record.results.setdefault(quantity, digest([value]))
        if self.looks_for_writer and self.writer is None:
            given = digest([crossing.value for crossing in record.given])
            self.writer = str(layer) if differ(given, record.input_digests[micro_batch]) else None


OUTPUT = "the value sent to the next stage"
INPUT_GRADIENT = "the gradient sent to the stage before"
INPUT = "its input"


class GradientCalls(OwnMode):
    """Rejects calls of `torch.autograd.grad` that would compute a partial derivative, since a graph is cut."""

    def __init__(self, record: StageRecord, stage: Stage) -> None:
        super().__init__()
        self._record, self._stage = record, stage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
            nodes = {alias.grad_fn for alias in self._record.incomplete}
            for tensor in [inputs] if isinstance(inputs, Tensor) else inputs:
                node = tensor.grad_fn
                if node is not None and not nodes.isdisjoint({node, *(before for before, _ in node.next_functions)}):
                    raise VerificationError(PARTIAL.format(stage=self._stage))
        return func(*args, **kwargs)


CALLS_BACKWARD = (
    "A layer calls backward() in its forward, which adds to gradients of weights before other micro-batches do. Give "
    "that loss to loss_fn: stash it, and pop it there (loss_fn.pop)."
)
PARTIAL = (
    "{stage} calls torch.autograd.grad with respect to a tensor that an earlier stage computed, and other inputs of "
    "the stage were computed from that tensor. The graph is cut between stages, so the result would lack their part. "
    "Put the layer that computes the tensor, this layer, and all layers between them in one stage (partitions=[...])."
)
HOOKED = (
    "{stage} puts a hook on a tensor that it receives (or calls retain_grad), and another tensor that it receives "
    "was computed from it, so the hook would see a part of the gradient. Put the hook where the tensor is made, "
    "return a clone of the tensor for the layers that hook it, or keep these layers in one stage."
)


def _is_one_of(leaf: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether a leaf is one of these tensors, detached."""
    return any(
        leaf.data_ptr() == tensor.data_ptr() and leaf.shape == tensor.shape and leaf.stride() == tensor.stride()
        for tensor in tensors
    )


def _give(recorded: Tensor, gradient: Tensor) -> Tensor:
    return recorded


def parameters_of(run: Run, stage: Stage) -> dict[int, Tensor]:
    """The parameters that a stage trains, by id: its own aliases in place of parameters that layers share."""
    shared = {id(source) for source in run.aliases.sources.values()}
    in_layers = (p for module in stage.modules for p in module._parameters.values() if p is not None)
    aliases = (
        leaves[layer.index]
        for leaves in run.aliases.leaves.values()
        for layer in stage.layers
        if layer.index in leaves
    )
    leaves = {id(leaf): leaf for leaf in chain(in_layers, aliases) if leaf.requires_grad}
    return {key: leaf for key, leaf in leaves.items() if key not in shared}


def buffers_of(stage: Stage) -> Iterator[Tensor]:
    """The buffers of a stage's layers that have values."""
    every = chain.from_iterable(module._buffers.values() for module in stage.modules)
    return (buffer for buffer in every if buffer is not None and not is_lazy(buffer))


def gradient_of(leaf: Tensor) -> Tensor | None:
    """The `.grad` of a leaf; a placeholder that an integration has put there names the real gradient."""
    return getattr(leaf.grad, "stands_for", leaf.grad)


def copy_gradients(gradients: Gradients) -> Gradients:
    """Copies of gradients that were received, in the same memory layout."""
    return [copy_of(one) if isinstance(one, Tensor) else one for one in gradients]
