"""Records the inputs and results of stages for the first two micro-batches of a step or of its replay.

Inputs and incoming gradients are kept as copies, for the replay. Results are kept as digests. The record of the step
is compared with the record of the replay (`comparison.py`).
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
from gpipe.stages.memory_layout import copy_of, moved
from gpipe.stages.messages import Message
from gpipe.stages.stage import HOOKED_NODE, Layer, Stage, StageCall
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

P = ParamSpec("P")
OUT_OF_MEMORY = torch.OutOfMemoryError, MemoryError


class Quantity(NamedTuple):
    """A result that a stage computed for one micro-batch."""

    text: str
    micro_batch: int
    layer: str | None = None  # the layer that computed the result, if it is known

    def __str__(self) -> str:
        return f"{self.text} for micro-batch {self.micro_batch}"


class WeightGradients(NamedTuple):
    """The `.grad` of a stage's leaf tensors: copies before the first backward pass, digests after the last pass."""

    leaves: Mapping[int, Tensor]  # by id
    before: Mapping[int, Tensor | None]
    after: dict[int, list[Digest]]  # two digests if the backward pass is split; a weight's is final after I or W

    @classmethod
    def of(cls, leaves: Mapping[int, Tensor]) -> "WeightGradients":
        """Copies the current `.grad` of leaf tensors."""
        gradients = {key: gradient_of(leaf) for key, leaf in leaves.items()}
        copies = {key: None if grad is None else copy_of(grad.detach()) for key, grad in gradients.items()}
        return cls(leaves, copies, {})

    def only(self, lasting: Collection[int]) -> "WeightGradients":
        """Returns a copy with only some of the leaves."""
        leaves = {key: leaf for key, leaf in self.leaves.items() if key in lasting}
        return self._replace(leaves=leaves, before={key: self.before[key] for key in leaves})

    def record_after(self) -> None:
        """Adds digests of the current `.grad`."""
        for key, leaf in self.leaves.items():
            self.after.setdefault(key, []).append(digest([gradient_of(leaf)]))


@dataclass(slots=True)
class StageRecord:
    """The inputs, gradients and results of one stage in the recorded micro-batches.

    Attributes:
        gradients: The gradients received from later stages or from the caller's loss.
        results: Digests of results, in the order in which they were computed.
        written_inputs: Inputs that have changed between their arrival and their backward pass.
        reached: All leaf tensors that the backward passes reach.
        calls_backward: In a replay, whether a layer has called `backward()` in a forward pass.
        beside_outputs: Ids of leaf tensors that a loss outside the pipe uses directly. If replays do not call the
            loss, the gradients of these tensors are not compared.
        received: In a replay, the inputs of the last forward pass.
        incomplete: Inputs of the last forward pass from which earlier stages computed other inputs. The gradients of
            these inputs in this stage are partial.
        sent: In a replay, the values that the stage returned, with their digests.
    """

    actions: dict[tuple[Kind, int], CompiledAction] = field(default_factory=dict)
    inputs: dict[int, list[BoundaryValue]] = field(default_factory=dict)
    input_digests: dict[int, Digest] = field(default_factory=dict)
    targets: dict[int, Tree] = field(default_factory=dict)
    gradients: dict[int, list[Gradients]] = field(default_factory=dict)
    results: dict[Quantity, Digest] = field(default_factory=dict)
    written_inputs: list[Quantity] = field(default_factory=list)
    weights: WeightGradients | None = None
    reached: dict[int, Tensor] = field(default_factory=dict)
    calls_backward: bool = False
    beside_outputs: set[int] = field(default_factory=set)
    received: list[BoundaryValue] = field(default_factory=list)
    incomplete: list[Tensor] = field(default_factory=list)
    node_hooks: list[Callable[[], Sized | None]] = field(default_factory=list)
    sent: list[tuple[Quantity, Tree, Digest]] = field(default_factory=list)

    def differences(self, replay: "StageRecord", name_of: Callable[[int], Quantity]) -> list[Quantity]:
        """Returns the results that differ in a replay, in the order in which they were computed."""
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
        """Sets the `.grad` of the stage's leaves to the values before the step."""
        for key, leaf in self.weights.leaves.items() if self.weights is not None else ():
            before = self.weights.before[key] if self.weights is not None else None
            # The weights of a stage may be loaded, while the copy is on the host.
            leaf.grad = None if before is None else moved(copy_of(before), leaf.device)

    def drop_gradients(self) -> None:
        for leaf in self.weights.leaves.values() if self.weights is not None else ():
            leaf.grad = None

    def count_results(self) -> int:
        """Returns the number of results to compare."""
        return len(self.results) + (0 if self.weights is None else len(self.weights.leaves))

    @property
    def written(self) -> list[Quantity]:
        """The inputs and returned values that the stage has changed in place, although other stages hold them."""
        returned = [quantity for quantity, value, before in self.sent if differ(digest([value]), before)]
        return [*self.written_inputs, *returned]


def records(method: "Callable[Concatenate[StepRecord, P], None]") -> "Callable[Concatenate[StepRecord, P], None]":
    """Drops the record of a step if the method runs out of memory. The step continues and is not verified."""

    @wraps(method)
    def recording(record: "StepRecord", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if record.is_dropped:
            return
        try:
            method(record, *args, **kwargs)
        except Exception as error:
            is_dropped = record.is_dropped  # A different rank may have dropped the record in the meantime.
            if record.is_replay or not (is_dropped or isinstance(error, OUT_OF_MEMORY)):
                raise
            record.drop()

    return recording


class StepRecord(Feature):
    """Records the stages of this process while a step or a replay runs.

    Attributes:
        kinds: The kinds of recorded actions. Messages that actions of other kinds send are recorded too.
        count: The number of recorded micro-batches (or slices).
        calls_loss: Whether a replay calls the loss. If not, it uses the recorded gradients of outputs.
        looks_for_writer: Whether to find the layer that writes the input of its stage.
        writer: A description of the layer that writes the input of its stage, or None until it is found.
        order: The recorded forward and backward actions, in the order in which they were performed.
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
        self.calls_loss = calls_loss
        self.stages = {stage.index: StageRecord() for stage in stages}
        self._output_nodes: dict[int, list[Node]] = {}  # autograd nodes of outputs, until their backward pass
        self._gradients: dict[int, Digest] = {}
        self.is_dropped = False
        self.looks_for_writer = False
        self.writer: str | None = None
        self.order: list[CompiledAction] = []

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work |= {kind: partial(self.perform, work[kind]) for kind in self.kinds & work.keys()}
        work[Kind.SEND] = partial(self.send, work[Kind.SEND])

    @contextmanager
    def around_layers(
        self, run: Run, rank: Rank, state: MicroBatchState, attached: Sequence[BoundaryInput], call: StageCall
    ) -> Iterator[None]:
        stage, m = state.stage_run.stage, state.micro_batch
        self._note_boundary(stage, state, attached)
        call.watch = partial(self._note_layer, self.stages[stage.index], m) if m < self.count else None
        yield
        self._check_hooks(stage)
        if not state.routes.outs and call.output is not None:
            self._note_outputs(stage.index, m, call.output.values[0])

    @property
    def is_replay(self) -> bool:
        """Whether this is the record of a replay."""
        return self._replays is not None

    def drop(self) -> None:
        """Frees the recorded copies and stops recording."""
        self.is_dropped, self.count = True, 0
        for record in self.stages.values():
            for copies in (record.inputs, record.targets, record.gradients):
                copies.clear()
            record.weights = None

    @records
    def begin_pass(self, run: Run, *, only_forward: bool) -> None:
        """Records `.grad` before the first action: digests before the forward pass of a call, otherwise copies."""
        if only_forward:
            self._gradients = self._digests_of_gradients(run)
            return
        for index, record in self.stages.items():
            record.weights = WeightGradients.of(parameters_of(run, run.stages.all[index]))

    @records
    def check_gradients(self, run: Run) -> None:
        """Raises an error if the forward pass of a call has accumulated gradients."""
        for index, now in self._digests_of_gradients(run).items():
            if differ(now, self._gradients[index]):
                raise VerificationError(CALLS_BACKWARD.format(stage=run.stages.all[index], quantity="a gradient"))

    def _digests_of_gradients(self, run: Run) -> dict[int, Digest]:
        stages = run.stages.all
        return {i: digest([*map(gradient_of, parameters_of(run, stages[i]).values())]) for i in self.stages}

    def perform(self, perform: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        """Performs an action and records it."""
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
        """Records the messages of an action, then sends them."""
        if task.micro_batch < self.count:
            self._note_sent(task, rank.outbox)
        send(run, rank, task)

    @records
    def _begin_forward(self, record: StageRecord, run: Run, rank: Rank, task: CompiledAction) -> None:
        m = task.micro_batch
        received = rank.inbox if task.stage else [rank.stream.receive_value(run.inputs[m], None)]
        values = [crossing for crossing in received if isinstance(crossing, BoundaryValue)]
        record.input_digests[m] = digest([crossing.value for crossing in values])
        record.received = [] if self._replays is None else values
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
        messages = rank.inbox if task.receives else []
        if not task.receives and run.loss_fn is None:
            messages = [rank.stream.receive_gradients(run.output_gradients[m], None)]
        received = [copy_gradients(gradients) for gradients in messages if isinstance(gradients, list)]
        record.gradients.setdefault(m, received)  # `_note_outputs` may have added an entry for outputs.
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
            # A leaf that is reached by only one micro-batch may be created in each forward, unless it is a parameter.
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
        if self._replays is not None and record.weights is None:  # No backward pass has started.
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
            record.weights.record_after()

    @records
    def _note_outputs(self, stage: int, micro_batch: int, output: Tree) -> None:
        """Records the output of the last stage. If replays do not call the loss, also records its gradient."""
        if micro_batch >= self.count:
            return
        record = self.stages[stage]
        record.results[Quantity("the output of the pipe", micro_batch)] = digest([output])
        if self.calls_loss:
            return
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if self._replays is not None:
            # One output may be computed from another, so each output must receive its own recorded gradient.
            ((*recorded,),) = self._replays.stages[stage].gradients[micro_batch]
            for tensor, gradient in zip(outputs, recorded, strict=True):
                if isinstance(gradient, Tensor):
                    tensor.register_hook(partial(_replace_gradient, copy_of(gradient)))
            return
        gradients: Gradients = [None] * len(outputs)
        record.gradients[micro_batch] = [gradients]
        self._output_nodes[micro_batch] = [
            node for node in (tensor.grad_fn for tensor in outputs) if node is not None
        ]
        for index, tensor in enumerate(outputs):
            tensor.register_hook(partial(self._keep_copy, gradients, index))

    @records
    def _keep_copy(self, gradients: Gradients, index: int, gradient: Tensor) -> None:
        gradients[index] = copy_of(gradient)

    @records
    def _note_sent(self, task: CompiledAction, messages: Sequence[Message]) -> None:
        is_value = task.action.kind is Kind.FORWARD
        quantity = Quantity(OUTPUT if is_value else INPUT_GRADIENT, task.micro_batch)
        values = [message.value if isinstance(message, BoundaryValue) else message for message in messages]
        record = self.stages[task.stage]
        for message in messages:
            if isinstance(message, BoundaryValue) and record.incomplete:  # Layers may pass on inputs.
                passed_on = {i for i, leaf in enumerate(message.leaves) if _is_one_of(leaf, record.incomplete)}
                message.ancestors = (message.ancestors or frozenset()) | passed_on
        record.results[quantity] = digest(values)
        if self._replays is not None:
            record.sent.append((quantity, values, digest(values)))

    def _note_boundary(self, stage: Stage, state: MicroBatchState, attached: Sequence[BoundaryInput]) -> None:
        """Records the inputs that layers receive in a forward pass or recomputation."""
        # The inputs of a call have no route: they come from the caller.
        pairs = zip(attached[: len(state.routes.ins)], state.inputs, strict=False)
        several = sum(len(value.aliases) for value in attached) > 1
        self.stages[stage.index].incomplete = [
            alias
            for value, crossing in pairs
            for index, alias in enumerate(value.aliases)
            if (several if crossing.ancestors is None else index in crossing.ancestors)
        ]
        self.stages[stage.index].node_hooks = [hooks for value in attached for hooks in value.hooks]

    def _check_hooks(self, stage: Stage) -> None:
        """Raises an error if layers have registered hooks that would receive a partial gradient or a wrong node."""
        record = self.stages[stage.index]
        if any(alias.retains_grad or has_gradient_hooks(alias) for alias in record.incomplete):
            raise VerificationError(HOOKED.format(stage=stage))
        if any(len(hooks() or ()) > 1 for hooks in record.node_hooks):  # One hook belongs to gpipe.
            raise VerificationError(HOOKED_NODE.format(stage=stage))

    @records
    def _note_layer(self, record: StageRecord, micro_batch: int, layer: Layer, value: Tree) -> None:
        quantity = Quantity(f"the output of {layer}", micro_batch, str(layer))
        record.results.setdefault(quantity, digest([value]))
        if self.looks_for_writer and self.writer is None:
            now = digest([crossing.value for crossing in record.received])
            self.writer = str(layer) if differ(now, record.input_digests[micro_batch]) else None


OUTPUT = "the value sent to the next stage"
INPUT_GRADIENT = "the gradient sent to the stage before"
INPUT = "its input"


class GradientCalls(OwnMode):
    """Rejects calls of `torch.autograd.grad` that would compute only a part of a derivative."""

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
    "{stage}: {quantity} differs from the reference loop, because a layer calls backward() in its forward. Stash "
    "that loss in the layer, and pop it in loss_fn (loss_fn.pop). [backward-in-forward]"
)
PARTIAL = (
    "{stage}: torch.autograd.grad is called for a tensor of an earlier stage, but other inputs of the stage depend "
    "on it, so the result would be partial. Put these layers in one stage (partitions=[...]). [partial-derivative]"
)
HOOKED = (
    "{stage}: a layer registers a hook on an input (or calls retain_grad), but other inputs depend on this input, so "
    "the gradient would be partial. Register the hook where the tensor is computed. [hook-on-partial-gradient]"
)


def _is_one_of(leaf: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Returns whether a leaf has the same memory and layout as one of these tensors."""
    return any(
        leaf.data_ptr() == tensor.data_ptr() and leaf.shape == tensor.shape and leaf.stride() == tensor.stride()
        for tensor in tensors
    )


def _replace_gradient(recorded: Tensor, gradient: Tensor) -> Tensor:
    return recorded


def parameters_of(run: Run, stage: Stage) -> dict[int, Tensor]:
    """Returns the parameters that a stage trains, by id. Aliases of this stage replace shared parameters."""
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
    """Returns the initialized buffers of a stage."""
    every = chain.from_iterable(module._buffers.values() for module in stage.modules)
    return (buffer for buffer in every if buffer is not None and not is_lazy(buffer))


def gradient_of(leaf: Tensor) -> Tensor | None:
    """Returns the gradient of a leaf, even if an integration has replaced `.grad` by a placeholder."""
    return getattr(leaf.grad, "stands_for", leaf.grad)


def copy_gradients(gradients: Gradients) -> Gradients:
    """Copies gradients, with their memory layout."""
    return [copy_of(grad) if isinstance(grad, Tensor) else grad for grad in gradients]
