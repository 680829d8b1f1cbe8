"""Performs the actions of one rank: the only code that runs layers or autograd."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.plan.action import Action, Kind
from gpipe.run.batchnorm import Deferred
from gpipe.run.boundary import (
    Gradients,
    Parcel,
    cut,
    detached,
    enter,
    replace_tensors,
    run_backward,
    tensors_in,
)
from gpipe.run.buffers import Snapshot
from gpipe.run.digest import differ, digest
from gpipe.run.graph import HOOKED, Owners, tensors_left_on
from gpipe.run.lane import Lane, Mark
from gpipe.run.layout import copy_of, memory_of
from gpipe.run.loans import SHARED_IN_PLACE
from gpipe.run.losses import NO_METRICS as NO_METRICS
from gpipe.run.losses import read_loss
from gpipe.run.microbatch import Tree
from gpipe.run.nodes import find_leaned, leaves_of
from gpipe.run.skips import Pop
from gpipe.run.stage import Made, Moment, Stage, Trace
from gpipe.run.store import Cell, Store
from gpipe.run.transport import Label, Message, Transport
from gpipe.run.visit import InBackward, Visit
from gpipe.run.wiring import Wiring

NO_GRADIENT = (
    "the loss needs no gradient: it depends on no parameter that requires one; "
    "return a loss computed from the output, or call step() under torch.no_grad()"
)


OTHERWISE = (
    "a recompute gave other values than its forward, and the gradients would be wrong: {layer} depends on what no "
    "key reaches (numpy's or Python's random, a count of its own, the time, what another layer has left somewhere); "
    "draw by torch's functions, keep what changes in buffers, stash and pop what layers leave for each other, or use "
    "remat='never' for this partition"
)
BACKWARD_IN_FORWARD = (
    "the forward of {stage} adds to gradients of its parameters: a layer calls backward() in it. A recompute would "
    "do so again, and the order of the sums would depend on the schedule. Give such losses to loss_fn (stash them, "
    "and have loss_fn.pop), or train these layers by themselves"
)
LEFT = (
    "perhaps it reads a tensor that was left on a module ({left}), which is by now that of another micro-batch: have "
    "the layer that makes it stash it, and pop it where it is used"
)
WRITES_IN_BACKWARD = (
    "the backward of {stage} writes buffers of it ({names}). Where a later forward reads them, as scales of FP8 are "
    "read, the plain loop has them one micro-batch sooner: forwards go ahead of backwards here, and how far depends "
    "on the schedule"
)
_NOTHING = nullcontext()


class RecomputeError(RuntimeError):
    """A recompute gave other values than its forward."""


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
    what comes back to the tensors of `outputs[m]` that want one, when the loss is computed outside; then the first
    stage fills `input_gradients`. `first` counts the micro-batches of earlier replicas, so that each draws its own.
    """

    inputs: Sequence[Parcel]
    seed: int
    step: int
    trains: bool
    first: int = 0
    deferred_batch_norm: bool = False
    around_layers: Callable[[], AbstractContextManager[object]] | None = None
    loss_fn: Callable[[Tree, Tree], object] | None = None
    loss_index: int = 0  # the loss is keyed as the layer behind the last
    loss_pops: Sequence[Pop] = ()
    targets: Sequence[Tree] = ()
    seeds: Sequence[float | None] = ()
    outputs: dict[int, Output] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, object] = field(default_factory=dict)
    output_gradients: Sequence[Gradients] = ()
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    examines: bool = False
    findings: list[str] = field(default_factory=list)  # what is to be told, where it `examines`
    tell: Callable[[Sequence[str]], object] = len  # tells it: the backward of a call comes when it comes


class Step(NamedTuple):
    """One action of a row as a worker does it: what it takes from other ranks, what it gives to them."""

    rank: int
    at: int  # its place in the program's row
    action: Action
    stage: int
    micro_batch: int
    takes: tuple[Label, ...]
    gives: tuple[tuple[int, Label], ...]  # each with the rank that it is for
    work: Callable[["Worker", "Step"], None]


class Worker:
    """One rank: its stages, what it holds, and how it does each kind of action."""

    def __init__(
        self, rank: int, stages: Mapping[int, tuple[Stage, Wiring]], lane: Lane, batch: Batch, transport: Transport
    ) -> None:
        self.rank = rank
        self.name = f"rank {rank}"  # in messages
        self.stages = stages
        self.lane = lane
        self.batch = batch
        self.transport = transport
        self.store: Store = {}
        self.taken: list[Message] = []
        self.deferred: dict[int, Deferred] = {}
        self.commits: list[Callable[[], None]] = []  # for the end: a failed step changes no statistics
        self.closing: Mapping[Kind, Callable[[], None]] = {}  # what several processes do together
        self.new_trace: Callable[[], Trace] = Trace
        self.owners: Owners | None = None
        self.every: Sequence[Stage] = [stage for stage, _ in stages.values()]  # of this process
        self._leaned: dict[tuple[int, int], set[int]] = {}
        self.doubts: list[Tensor] = []  # on a GPU: whether recomputes differ from their forwards
        self._seeds: dict[float, Tensor] = {}
        for stage, wires in stages.values():
            stage.begin()
            if wires.recomputed or batch.examines:
                stage.buffers.find()
            if batch.deferred_batch_norm:
                self.deferred[stage.index] = Deferred.of(stage.buffers.modules)

    def take(self, step: Step) -> Mark:
        """Waits until what a step takes from other ranks is here; says when the last of it was sent."""
        mark: Mark = None
        taken = self.taken = []
        for label in step.takes:
            message, mark = self.transport.receive(self.rank, label)
            taken.append(self.lane.take(message, mark))
        return mark

    def _give(self, step: Step, messages: Iterable[Message]) -> None:
        for (rank, label), message in zip(step.gives, messages, strict=True):
            self.transport.send(rank, label, message, self.lane.mark())

    def forward(self, step: Step) -> None:
        """Runs a stage's layers on a micro-batch; with a recompute to come, keeps only what crossed the boundary."""
        stage, wires = self.stages[step.stage]
        m = step.micro_batch
        cell = Cell(self._given(step))
        self.store[step.stage, m] = cell
        again = m in wires.recomputed
        before = stage.buffers.before() if again else None
        grads = gradients_of(stage) if self.batch.examines else None
        if step.stage in self.deferred:
            with self.deferred[step.stage].collect(m):
                made = self._run(stage, wires, cell, m)
        else:
            made = self._run(stage, wires, cell, m)
        if grads is not None and grads != gradients_of(stage):
            raise RuntimeError(BACKWARD_IN_FORWARD.format(stage=stage))
        if before is None:
            stage.buffers.forget()
        else:
            stage.buffers.after(before)
            cell.snapshot = before
        if wires.outs:
            parcels = []
            for value in made.values:
                parcel, roots = cut(value)
                parcels.append(parcel)
                cell.roots.append(roots)
            self._note_leaned(step.stage, parcels, cell.roots)
            self._part_memory(stage, parcels)
            self._give(step, parcels)
        elif self.batch.loss_fn is None:
            self.batch.outputs[m] = Output.of(made.values[0])
            cell.roots.append([tensor for tensor in tensors_in(made.values[0]) if tensor.requires_grad])
        elif not again:
            cell.roots.append([self._loss(made, m, cell.trace)])
        if again:
            cell.digest = digest([*made.values, *made.for_loss.values()])
            cell.reached = reached_from(made.values, stage, cell.given)
            cell.roots, cell.gradients = [], []  # and with them all that the layers made inside
        if not self.batch.trains:
            del self.store[step.stage, m]

    def _note_leaned(self, stage: int, parcels: Sequence[Parcel], roots: Sequence[Sequence[Tensor]]) -> None:
        """Notes which leaves others were made from that cross too: as in the first micro-batch of the run."""
        flat = [root for some in roots for root in some]
        if (stage, len(flat)) not in self._leaned:
            self._leaned[stage, len(flat)] = find_leaned(flat) if len(flat) > 1 else set()
        first = 0
        for parcel, some in zip(parcels, roots, strict=True):
            parcel.leaned = frozenset(at - first for at in self._leaned[stage, len(flat)] if at >= first)
            first += len(some)

    def _part_memory(self, stage: Stage, parcels: Sequence[Parcel]) -> None:
        """Has buffers of the stage leave as copies, since a later forward may write them; notes who shares memory."""
        for parcel in parcels:
            if not all(tensor.requires_grad for tensor in tensors_in(parcel.value)):
                parcel.value = replace_tensors(parcel.value, stage.apart)
            parcel.check(stage)  # notes versions
        if len(parcels) > 1:
            used = Counter(at for parcel in parcels for at in {memory_of(t) for t in tensors_in(parcel.value)} if at)
            for parcel in parcels:
                parcel.entangled = any(used[memory_of(t)] > 1 for t in tensors_in(parcel.value))

    def recompute(self, step: Step) -> None:
        """Runs a stage's layers once more, for their graph."""
        stage, wires = self.stages[step.stage]
        m = step.micro_batch
        cell = self.store[step.stage, m]
        deferred = self.deferred.get(step.stage)
        with stage.buffers.as_before(cell.snapshot or {}), deferred.aside() if deferred else _NOTHING:
            made = self._run(stage, wires, cell, m, recomputing=True)
            self._compare(stage, wires, cell, m, made)
        cell.snapshot = None
        if wires.outs:
            cell.roots = [cut(value)[1] for value in made.values]
        elif self.batch.loss_fn is None:
            cell.roots = [[tensor for tensor in tensors_in(made.values[0]) if tensor.requires_grad]]
        else:
            cell.roots = [[self._loss(made, m, cell.trace)]]

    def _compare(self, stage: Stage, wires: Wiring, cell: Cell, m: int, made: Made) -> None:
        """Compares a recompute with its forward, bit for bit."""
        assert cell.digest is not None
        verdict = differ(cell.digest, digest([*made.values, *made.for_loss.values()]))
        if verdict is True or cell.reached != reached_from(made.values, stage, cell.given):
            self._refuse(stage, wires, cell, m)
        if isinstance(verdict, Tensor):
            self.doubts.append(verdict)

    def _refuse(self, stage: Stage, wires: Wiring, cell: Cell, m: int) -> None:
        """Refuses a recompute that differs, and says which layer is to blame, if it does so again."""
        found = stage.find_unsteady(cell.given[-1].value, self._arrived(wires, cell), self._moment(m))
        cell.trace.point_at(found)
        left = tensors_left_on(self.every) if found is None else ""
        error = RecomputeError(OTHERWISE.format(layer="a layer of this partition" if found is None else found))
        if left:
            error.add_note(LEFT.format(left=left))
        raise error

    def _given(self, step: Step) -> list[Parcel]:
        if step.stage == 0:  # wherever the user keeps it
            return [self.lane.take_parcel(self.batch.inputs[step.micro_batch], None)]
        given, self.taken = self.taken, []
        return given  # type: ignore[return-value]  # parcels, since it is a forward

    def _moment(self, m: int, *, recomputing: bool = False) -> Moment:
        return Moment(self.batch.seed, self.batch.step, self.batch.first + m, recomputing)

    def _arrived(self, wires: Wiring, cell: Cell) -> dict[str, Tensor | None]:
        return {name: parcel.stashed for name, parcel in zip(wires.skips_in, cell.given, strict=False)}

    def _run(self, stage: Stage, wires: Wiring, cell: Cell, m: int, *, recomputing: bool = False) -> Made:
        """Runs the layers of a stage on what a cell holds; gives a value for each wire out, at least the main one."""
        cell.trace = self.new_trace()  # of this run, not of the one before
        for parcel in cell.given:
            parcel.check(stage)
        entered = [enter(parcel) for parcel in cell.given]
        cell.gradients = [one.gradients for one in entered]
        arrived = {name: stash_of(one.value) for name, one in zip(wires.skips_in, entered, strict=False)}
        moment = self._moment(m, recomputing=recomputing)
        batch = self.batch
        for_loss = () if wires.outs else batch.loss_pops
        with batch.around_layers() if batch.around_layers else _NOTHING:
            made = stage.forward(entered[-1].value, arrived, wires.skips_out, for_loss, moment, cell.trace)
        for wire, parcel, one in zip(wires.ins, cell.given, entered, strict=False):
            hooked = one.hooked()
            known = parcel.leaned is not None
            if hooked & (parcel.leaned or set()) or (
                hooked and not known and (len(one.aliases) > 1 or not wire.alone)
            ):
                raise RuntimeError(HOOKED.format(stage=stage))
            if parcel.entangled and stage.loans.changed & set(map(id, tensors_in(one.value))):
                raise RuntimeError(f"{stage} changes {SHARED_IN_PLACE}")
        return made

    def _loss(self, made: Made, m: int, trace: Trace) -> Tensor:
        """The loss of a micro-batch, computed once: in its forward, or in its recompute if there is one."""
        batch = self.batch
        trace.enter()
        with batch.around_layers() if batch.around_layers else nullcontext():
            loss, batch.metrics[m] = read_loss(self._call_loss_fn(made, m))
        if batch.trains and batch.seeds[m] is not None and not loss.requires_grad:
            raise ValueError(NO_GRADIENT)
        batch.losses[m] = loss.detach()
        return loss

    def _call_loss_fn(self, made: Made, m: int) -> object:
        batch = self.batch
        assert batch.loss_fn is not None
        target = replace_tensors(batch.targets[m], with_own_version)
        value = replace_tensors(made.values[0], as_made)
        if not self.lane.alone:
            target = replace_tensors(target, lambda tensor: self.lane.bring(tensor, None))
        with Visit(batch.seed, batch.step, batch.loss_index, batch.first + m):
            return batch.loss_fn(value, target, **made.for_loss)

    def backward(self, step: Step) -> None:
        """Runs autograd through a stage, and hands on the gradients of what crossed its boundary."""
        cell = self.store[step.stage, step.micro_batch]
        returned = self.taken if step.takes else [self._last_gradients(cell, step.micro_batch)]
        roots = [root for roots in cell.roots for root in roots]
        gradients = [gradient for gradients in returned for gradient in gradients]  # type: ignore[union-attr]
        returned.clear()
        cell.roots = []
        stage = self.stages[step.stage][0]
        if self.owners is not None:
            self.owners.check(step.stage, roots, [leaf for parcel in cell.given for leaf in parcel.leaves])
        before = stage.buffers.before() if self.batch.examines else None
        with InBackward(partial(cell.trace.maker_of, layers=stage.layers)):
            run_backward(roots, gradients)
        if before is not None:
            self._tell_of_writes(stage, before)
        if step.gives:
            self._give(step, cell.gradients)
        else:
            self.batch.input_gradients[step.micro_batch] = cell.gradients[-1]
        del self.store[step.stage, step.micro_batch]

    def _tell_of_writes(self, stage: Stage, before: Snapshot) -> None:
        """Notes the buffers that a backward has written."""
        written = {f"{type(module).__name__}.{name}": None for module, name in stage.buffers.after(before)}
        if written:
            self.batch.findings.append(WRITES_IN_BACKWARD.format(stage=stage, names=", ".join(written)))

    def _last_gradients(self, cell: Cell, m: int) -> Gradients:
        if self.batch.loss_fn is None:
            return self.lane.take_gradients(self.batch.output_gradients[m], None)
        seed = self.batch.seeds[m]
        if seed is None:
            return [None]
        if seed not in self._seeds:
            self._seeds[seed] = torch.full_like(cell.roots[0][0], seed)
        return [self._seeds[seed]]

    def commit(self, step: Step) -> None:
        """Has the running statistics of a stage's BatchNorms changed once this run has ended well."""
        self.commits.append(self.deferred[step.stage].commit)

    def close(self, step: Step) -> None:
        """Does a closing action of gradients, with the other processes that it concerns."""
        self.closing[step.action.kind]()

    def settle(self) -> None:
        """Does what was left for the end of a run."""
        with self.lane.enter():
            if self.doubts and bool(torch.stack(self.doubts).any()):
                raise RecomputeError(OTHERWISE.format(layer=f"a layer of {self.name}"))
            while self.commits:
                self.commits.pop()()

    def layer_of(self, action: Action, error: BaseException) -> str | None:
        """In words, the layer in which an action failed, as far as that can be known."""
        stage, _ = self.stages[action.stage]
        cell = None if action.micro_batch is None else self.store.get((action.stage, action.micro_batch))
        if cell is None:
            return None
        if action.kind is Kind.BACKWARD:
            layer = cell.trace.maker_of(failed_node(error), stage.layers)
        else:
            layer = cell.trace.last_of(stage.layers)
        return layer or f"one of {', '.join(map(str, stage.layers))}"


def reached_from(values: Sequence[Tree], stage: Stage, given: Sequence[Parcel]) -> frozenset[int]:
    """What a backward would reach of the weights of a stage and of what it was given, by identity."""
    reached = frozenset(map(id, leaves_of([tensor for value in values for tensor in tensors_in(value)])))
    return reached & (stage.weights() | {id(leaf) for parcel in given for leaf in parcel.leaves})


def gradients_of(stage: Stage) -> list[tuple[int, int]]:
    """What gradients the layers of a stage have, and how often they were added to."""
    grads = [p.grad for layer in stage.layers for p in layer.module.parameters()]
    return [(id(grad), 0 if grad is None else grad._version) for grad in grads]


def with_own_version(target: Tensor) -> Tensor:
    """A target whose changes in place are counted apart from those of other micro-batches, views of one tensor."""
    return target if target.requires_grad else target.data


def as_made(output: Tensor) -> Tensor:
    """An output for the loss to work on in place: one that a stage only passed on is a view of a leaf."""
    base = output._base
    return copy_of(output) if base is not None and base.is_leaf and base.requires_grad else output


def stash_of(value: Tree) -> Tensor | None:
    """The value of a skip route."""
    assert value is None or isinstance(value, Tensor)
    return value


def failed_node(error: BaseException) -> int | None:
    """The sequence number of the autograd node that raised, if it is written in Python."""
    traceback = error.__traceback__
    while traceback is not None:
        node = traceback.tb_frame.f_locals.get("self")
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return int(node._sequence_nr())
        traceback = traceback.tb_next
    return None
