"""Performs the actions of one rank: the only code that runs layers or autograd."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpipe.plan.action import Action, Kind
from gpipe.run.batchnorm import Deferred
from gpipe.run.boundary import (
    Gradients,
    Parcel,
    cut,
    detached,
    keep_strides,
    replace_tensors,
    run_backward,
    tensors_in,
)
from gpipe.run.lane import Lane, Mark
from gpipe.run.microbatch import Tree
from gpipe.run.stage import Moment, Stage, Trace
from gpipe.run.store import Cell, Store
from gpipe.run.transport import Label, Message, Transport
from gpipe.run.visit import visit
from gpipe.run.wiring import Wire, Wiring

NO_GRADIENT = (
    "the loss needs no gradient: it depends on no parameter that requires one; "
    "return a loss computed from the output, or call step() under torch.no_grad()"
)


NO_METRICS = object()


@dataclass(frozen=True, slots=True)
class Output:
    """What the last stage made of a micro-batch, cut from its graph; `wants_gradient` says it of each tensor."""

    value: Tree
    wants_gradient: tuple[bool, ...]

    @classmethod
    def of(cls, value: Tree) -> "Output":
        """Cuts a value from its graph."""
        wants = tuple(tensor.requires_grad for tensor in tensors_in(value))
        return cls(detached(value), wants)


@dataclass
class Batch:
    """One mini-batch, as all ranks of a process share it.

    `inputs` are taken by the first stage. The last stage fills `outputs`, or, with a loss function, `losses` and
    `metrics`. `seeds[m]` is the gradient of micro-batch m's loss, None if it has no say; `output_gradients[m]` is
    what comes back to the tensors of `outputs[m]` that want one, when the loss is computed outside.
    """

    inputs: Sequence[Parcel]
    seed: int
    step: int
    trains: bool
    deferred_batch_norm: bool = False
    around_layers: Callable[[], AbstractContextManager[object]] | None = None
    loss_fn: Callable[[Tree, Tree], object] | None = None
    loss_index: int = 0  # the loss is keyed as the layer behind the last
    loss_draws: bool | None = None  # None until the first micro-batch has shown it
    targets: Sequence[Tree] = ()
    seeds: Sequence[float | None] = ()
    outputs: dict[int, Output] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, object] = field(default_factory=dict)
    output_gradients: Sequence[Gradients] = ()


class Worker:
    """One rank: its stages, what it holds, and how it does each kind of action."""

    def __init__(
        self, rank: int, stages: Mapping[int, tuple[Stage, Wiring]], lane: Lane, batch: Batch, transport: Transport
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.lane = lane
        self.batch = batch
        self.transport = transport
        self.store = Store()
        self.deferred: dict[int, Deferred] = {}
        self._seeds: dict[float, Tensor] = {}
        for stage, wires in stages.values():
            if wires.recomputed:
                stage.buffers.find()
            if batch.deferred_batch_norm:
                self.deferred[stage.index] = Deferred.of(stage.buffers.modules)

    def await_values(self, action: Action) -> Mark:
        """Waits until what a forward takes from other ranks is here; says when the last of it was sent."""
        return self._await(self.stages[action.stage][1].remote_in, micro_batch_of(action), gradient=False)

    def await_gradients(self, action: Action) -> Mark:
        """Waits until what a backward takes from other ranks is here; says when the last of it was sent."""
        return self._await(self.stages[action.stage][1].remote_out, micro_batch_of(action), gradient=True)

    def _await(self, wires: Sequence[Wire], m: int, *, gradient: bool) -> Mark:
        mark: Mark = None
        for wire in wires:
            label = Label(wire.number, m, gradient)
            message, mark = self.transport.receive(self.rank, label)
            self.store.arrived[label] = self.lane.take(message, mark)
        return mark

    def forward(self, action: Action) -> None:
        """Runs a stage's layers on a micro-batch; with a recompute to come, keeps only what crossed the boundary."""
        stage, wires = self.stages[action.stage]
        m = micro_batch_of(action)
        cell = Cell(self._take_given(wires, m), {wire.number: self._take(wire, m) for wire in wires.skips_in})
        self.store.cells[stage.index, m] = cell
        again = m in wires.recomputed
        before = stage.buffers.before() if again else None
        if stage.index in self.deferred:
            with self.deferred[stage.index].collect(m):
                value, stashed = self._run(stage, wires, cell, m)
        else:
            value, stashed = self._run(stage, wires, cell, m)
        if before:
            cell.snapshot = stage.buffers.after(before)
        for wire in wires.skips_out:
            self._depart(wire, cell, m, stashed[wire.name])
        if wires.main_out:
            self._depart(wires.main_out, cell, m, value)
        elif self.batch.loss_fn is None:
            self.batch.outputs[m] = Output.of(value)
            cell.roots[None] = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
        elif not again:
            cell.roots[None] = [self._loss(value, m, cell.trace)]
        if again:
            cell.roots.clear()  # and with them all that the layers made inside
        if not self.batch.trains:
            del self.store.cells[stage.index, m]

    def recompute(self, action: Action) -> None:
        """Runs a stage's layers once more, for their graph."""
        stage, wires = self.stages[action.stage]
        m = micro_batch_of(action)
        cell = self.store.cells[stage.index, m]
        if cell.snapshot:
            with stage.buffers.as_before(cell.snapshot):
                value, stashed = self._run(stage, wires, cell, m, recomputing=True)
            cell.snapshot = None
        else:
            value, stashed = self._run(stage, wires, cell, m, recomputing=True)
        for wire in wires.skips_out:
            cell.roots[wire.number] = cut(stashed[wire.name])[1]
        if wires.main_out:
            cell.roots[wires.main_out.number] = cut(value)[1]
        elif self.batch.loss_fn is None:
            cell.roots[None] = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
        else:
            cell.roots[None] = [self._loss(value, m, cell.trace)]

    def _run(
        self, stage: Stage, wires: Wiring, cell: Cell, m: int, *, recomputing: bool = False
    ) -> tuple[Tree, dict[str, Tensor]]:
        """Runs the layers of a stage on what the cell holds."""
        cell.trace = Trace()  # of this run, not of the one before
        popped = {wire.name: cell.skips[wire.number].tensor for wire in wires.skips_in}
        moment = Moment(self.batch.seed, self.batch.step, m, recomputing)
        if self.batch.around_layers is None:
            return stage.forward(cell.given.value, popped, wires.stashes, moment, cell.trace)
        with self.batch.around_layers():
            return stage.forward(cell.given.value, popped, wires.stashes, moment, cell.trace)

    def _loss(self, value: Tree, m: int, trace: Trace) -> Tensor:
        """The loss of a micro-batch, computed once: in its forward, or in its recompute if there is one."""
        batch = self.batch
        trace.enter()
        with batch.around_layers() if batch.around_layers else nullcontext():
            loss, batch.metrics[m] = read_loss(self._call_loss_fn(value, m))
        if batch.trains and batch.seeds[m] is not None and not loss.requires_grad:
            raise ValueError(NO_GRADIENT)
        batch.losses[m] = loss.detach()
        return loss

    def _call_loss_fn(self, value: Tree, m: int) -> object:
        batch = self.batch
        assert batch.loss_fn is not None
        target = batch.targets[m]
        if not self.lane.alone:
            target = replace_tensors(target, lambda tensor: self.lane.bring(tensor, None))
        if batch.loss_draws is False:
            return batch.loss_fn(value, target)
        with visit(batch.seed, batch.step, batch.loss_index, m) as keyed:
            returned = batch.loss_fn(value, target)
        batch.loss_draws = keyed.drew
        return returned

    def backward(self, action: Action) -> None:
        """Runs autograd through a stage, and hands on the gradients of what crossed its boundary."""
        stage, wires = self.stages[action.stage]
        m = micro_batch_of(action)
        cell = self.store.cells[stage.index, m]
        roots: list[Tensor] = []
        gradients: Gradients = []
        for wire in wires.wires_out:
            roots += cell.roots[wire.number]
            gradients += self._take_gradients(wire, m)
        if wires.main_out is None:
            roots += cell.roots[None]
            gradients += self._last_gradients(cell.roots[None], m)
        cell.roots.clear()
        for parcel in (cell.given, *cell.skips.values()):
            keep_strides(parcel.leaves)
        run_backward(roots, gradients)
        for wire in wires.wires_in:
            parcel = cell.given if wire is wires.main_in else cell.skips[wire.number]
            self._hand_over(wire, Label(wire.number, m, True), [leaf.grad for leaf in parcel.leaves])
        del self.store.cells[stage.index, m]

    def _last_gradients(self, roots: Sequence[Tensor], m: int) -> Gradients:
        if self.batch.loss_fn is None:
            return self.lane.take_gradients(self.batch.output_gradients[m], None)
        seed = self.batch.seeds[m]
        if seed is None:
            return [None]
        if seed not in self._seeds:
            self._seeds[seed] = torch.full_like(roots[0], seed)
        return [self._seeds[seed]]

    def _take_given(self, wires: Wiring, m: int) -> Parcel:
        if wires.main_in is None:
            return self.lane.take_parcel(self.batch.inputs[m], None)  # wherever the user keeps it
        return self._take(wires.main_in, m)

    def _take(self, wire: Wire, m: int) -> Parcel:
        parcel = self.store.arrived.pop(Label(wire.number, m, False))
        assert isinstance(parcel, Parcel)
        return parcel

    def _take_gradients(self, wire: Wire, m: int) -> Gradients:
        gradients = self.store.arrived.pop(Label(wire.number, m, True))
        assert isinstance(gradients, list)
        return gradients

    def _depart(self, wire: Wire, cell: Cell, m: int, value: Tree) -> None:
        parcel, cell.roots[wire.number] = cut(value)
        self._hand_over(wire, Label(wire.number, m, False), parcel)

    def _hand_over(self, wire: Wire, label: Label, message: Message) -> None:
        if wire.is_local:
            self.store.arrived[label] = message
        else:
            self.transport.send(wire.rank, label, message, self.lane.mark())

    def commit(self, action: Action) -> None:
        """Changes the running statistics of a stage's BatchNorms, once for the mini-batch."""
        self.deferred[action.stage].commit()

    def layer_of(self, action: Action, error: BaseException) -> str | None:
        """In words, the layer in which an action failed, as far as that can be known."""
        stage, _ = self.stages[action.stage]
        cell = self.store.cells.get((action.stage, micro_batch_of(action)))
        if cell is None:
            return None
        if action.kind is Kind.BACKWARD:
            layer = cell.trace.maker_of(failed_node(error), stage.layers)
        else:
            layer = cell.trace.last_of(stage.layers)
        return layer or f"one of {', '.join(map(str, stage.layers))}"


def read_loss(returned: object) -> tuple[Tensor, object]:
    """What a loss function returned: the loss, and metrics or `NO_METRICS`.

    Raises:
        TypeError: It is neither a scalar tensor nor `(scalar tensor, metrics)`.
    """
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, NO_METRICS)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(()), metrics
    found = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else repr(loss)
    raise TypeError(
        f"loss_fn must return the micro-batch's loss, one real number, or (loss, metrics); it returned {found}"
    )


def failed_node(error: BaseException) -> int | None:
    """The sequence number of the autograd node that raised, if it is written in Python."""
    traceback = error.__traceback__
    while traceback is not None:
        node = traceback.tb_frame.f_locals.get("self")
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return int(node._sequence_nr())
        traceback = traceback.tb_next
    return None


def micro_batch_of(action: Action) -> int:
    """The micro-batch of an action that has one."""
    assert action.micro_batch is not None, action
    return action.micro_batch
