"""Performs the actions of one rank: the only code that runs layers or autograd."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.layers.batchnorm import DeferredStatistics
from gpipe.layers.buffers import SavedBuffers
from gpipe.layers.inplace import SHARED_IN_PLACE
from gpipe.layers.losses import clone_of_leaf_view, read_loss, with_own_version
from gpipe.layers.recompute_check import Fingerprint, recompute_error
from gpipe.layers.stage import LayerProgress, RngKey, Stage, StageOutput
from gpipe.layers.weight_owners import HOOKED, WeightOwners, tensors_left_on
from gpipe.plan.action import Action, Kind
from gpipe.rng.visit import InBackward, PipeVisit
from gpipe.runtime.batch import MiniBatch, Output
from gpipe.runtime.saved import Saved, Store
from gpipe.runtime.steps import Wiring
from gpipe.runtime.streams import RankStream
from gpipe.values.autograd_graph import failed_node, find_ancestors
from gpipe.values.boundary import BoundaryValue, Gradients, cut, enter, run_backward
from gpipe.values.layout import storage_address
from gpipe.values.messages import Label, Message, ReadyEvent, Transport
from gpipe.values.tree import Tree, replace_tensors, tensors_in

NO_GRADIENT = (
    "the loss needs no gradient: it depends on no parameter that requires one; "
    "return a loss computed from the output, or call step() under torch.no_grad()"
)


BACKWARD_IN_FORWARD = (
    "the forward of {stage} adds to gradients of its parameters: a layer calls backward() in it. A recompute would "
    "do so again, and the order of the sums would depend on the schedule. Give such losses to loss_fn (stash them, "
    "and have loss_fn.pop), or train these layers by themselves"
)
WRITES_IN_BACKWARD = (
    "the backward of {stage} writes buffers of it ({names}). Where a later forward reads them, as scales of FP8 are "
    "read, the plain loop has them one micro-batch sooner: forwards go ahead of backwards here, and how far depends "
    "on the schedule"
)
_NOTHING = nullcontext()


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
        self,
        rank: int,
        stages: Mapping[int, tuple[Stage, Wiring]],
        stream: RankStream,
        batch: MiniBatch,
        transport: Transport,
    ) -> None:
        self.rank = rank
        self.name = f"rank {rank}"  # in messages
        self.stages = stages
        self.stream = stream
        self.batch = batch
        self.transport = transport
        self.store: Store = {}
        self.taken: list[Message] = []
        self.deferred: dict[int, DeferredStatistics] = {}
        self.commits: list[Callable[[], None]] = []  # for the end: a failed step changes no statistics
        self.closing: Mapping[Kind, Callable[[], None]] = {}  # what several processes do together
        self.new_progress: Callable[[], LayerProgress] = LayerProgress
        self.owners: WeightOwners | None = None
        self.every: Sequence[Stage] = [stage for stage, _ in stages.values()]  # of this process
        self._ancestors: dict[tuple[int, int], set[int]] = {}
        self.doubts: list[Tensor] = []  # on a GPU: whether recomputes differ from their forwards
        self._seeds: dict[float, Tensor] = {}
        for stage, wires in stages.values():
            stage.begin()
            if wires.recomputed or batch.examines:
                stage.buffers.find()
            if batch.deferred_batch_norm:
                self.deferred[stage.index] = DeferredStatistics.of(stage.buffers.modules)

    def take(self, step: Step) -> ReadyEvent:
        """Waits until what a step takes from other ranks is here; says when the last of it was sent."""
        mark: ReadyEvent = None
        taken = self.taken = []
        for label in step.takes:
            message, mark = self.transport.receive(self.rank, label)
            taken.append(self.stream.take(message, mark))
        return mark

    def _give(self, step: Step, messages: Iterable[Message]) -> None:
        for (rank, label), message in zip(step.gives, messages, strict=True):
            self.transport.send(rank, label, message, self.stream.mark())

    def forward(self, step: Step) -> None:
        """Runs a stage's layers on a micro-batch; with a recompute to come, keeps only what crossed the boundary."""
        stage, wires = self.stages[step.stage]
        m = step.micro_batch
        saved = Saved(self._given(step))
        self.store[step.stage, m] = saved
        again = m in wires.recomputed
        before = stage.buffers.before() if again else None
        grads = gradients_of(stage) if self.batch.examines else None
        if step.stage in self.deferred:
            with self.deferred[step.stage].collect(m):
                made = self._run(stage, wires, saved, m)
        else:
            made = self._run(stage, wires, saved, m)
        if grads is not None and grads != gradients_of(stage):
            raise RuntimeError(BACKWARD_IN_FORWARD.format(stage=stage))
        if before is None:
            stage.buffers.forget()
        else:
            stage.buffers.after(before)
            saved.snapshot = before
        if wires.outs:
            crossings = []
            for value in made.values:
                crossing, roots = cut(value)
                crossings.append(crossing)
                saved.roots.append(roots)
            self._note_ancestors(step.stage, crossings, saved.roots)
            self._part_memory(stage, crossings)
            self._give(step, crossings)
        elif self.batch.loss_fn is None:
            self.batch.outputs[m] = Output.of(made.values[0])
            saved.roots.append([tensor for tensor in tensors_in(made.values[0]) if tensor.requires_grad])
        elif not again:
            saved.roots.append([self._loss(made, m, saved.progress)])
        if again:
            saved.fingerprint = Fingerprint.of(made, stage, saved.given)
            saved.roots, saved.gradients = [], []  # and with them all that the layers made inside
        if not self.batch.trains:
            del self.store[step.stage, m]

    def _note_ancestors(
        self, stage: int, crossings: Sequence[BoundaryValue], roots: Sequence[Sequence[Tensor]]
    ) -> None:
        """Notes which leaves others were made from that cross too: as in the first micro-batch of the run."""
        flat = [root for some in roots for root in some]
        if (stage, len(flat)) not in self._ancestors:
            self._ancestors[stage, len(flat)] = find_ancestors(flat) if len(flat) > 1 else set()
        first = 0
        for crossing, some in zip(crossings, roots, strict=True):
            crossing.ancestors = frozenset(at - first for at in self._ancestors[stage, len(flat)] if at >= first)
            first += len(some)

    def _part_memory(self, stage: Stage, crossings: Sequence[BoundaryValue]) -> None:
        """Has buffers of the stage leave as copies, since a later forward may write them; notes who shares memory."""
        for crossing in crossings:
            if not all(tensor.requires_grad for tensor in tensors_in(crossing.value)):
                crossing.value = replace_tensors(crossing.value, stage.apart)
            crossing.check(stage)  # notes versions
        if len(crossings) > 1:
            used = Counter(
                at for crossing in crossings for at in {storage_address(t) for t in tensors_in(crossing.value)} if at
            )
            for crossing in crossings:
                crossing.shares_storage = any(used[storage_address(t)] > 1 for t in tensors_in(crossing.value))

    def recompute(self, step: Step) -> None:
        """Runs a stage's layers once more, for their graph."""
        stage, wires = self.stages[step.stage]
        m = step.micro_batch
        saved = self.store[step.stage, m]
        deferred = self.deferred.get(step.stage)
        with stage.buffers.as_before(saved.snapshot or {}), deferred.aside() if deferred else _NOTHING:
            made = self._run(stage, wires, saved, m, recomputing=True)
            self._compare(stage, wires, saved, m, made)
        saved.snapshot = None
        if wires.outs:
            saved.roots = [cut(value)[1] for value in made.values]
        elif self.batch.loss_fn is None:
            saved.roots = [[tensor for tensor in tensors_in(made.values[0]) if tensor.requires_grad]]
        else:
            saved.roots = [[self._loss(made, m, saved.progress)]]

    def _compare(self, stage: Stage, wires: Wiring, saved: Saved, m: int, made: StageOutput) -> None:
        """Compares a recompute with its forward, bit for bit."""
        assert saved.fingerprint is not None
        verdict = saved.fingerprint.differs(Fingerprint.of(made, stage, saved.given))
        if verdict is True:
            self._refuse(stage, wires, saved, m)
        if isinstance(verdict, Tensor):
            self.doubts.append(verdict)

    def _refuse(self, stage: Stage, wires: Wiring, saved: Saved, m: int) -> None:
        """Refuses a recompute that differs, and says which layer is to blame, if it does so again."""
        found = stage.find_unsteady(saved.given[-1].value, self._arrived(wires, saved), self._moment(m))
        saved.progress.point_at(found)
        if found is None:
            raise recompute_error("a layer of this partition", tensors_left_on(self.every))
        raise recompute_error(str(found))

    def _given(self, step: Step) -> list[BoundaryValue]:
        if step.stage == 0:  # wherever the user keeps it
            return [self.stream.take_value(self.batch.inputs[step.micro_batch], None)]
        given, self.taken = self.taken, []
        return given  # type: ignore[return-value]  # crossings, since it is a forward

    def _moment(self, m: int, *, recomputing: bool = False) -> RngKey:
        return RngKey(self.batch.seed, self.batch.step, self.batch.first + m, recomputing)

    def _arrived(self, wires: Wiring, saved: Saved) -> dict[str, Tensor | None]:
        return {name: crossing.stashed for name, crossing in zip(wires.skips_in, saved.given, strict=False)}

    def _run(self, stage: Stage, wires: Wiring, saved: Saved, m: int, *, recomputing: bool = False) -> StageOutput:
        """Runs the layers of a stage on what was kept; gives a value for each wire out, at least the main one."""
        saved.progress = self.new_progress()  # of this run, not of the one before
        for crossing in saved.given:
            crossing.check(stage)
        entered = [enter(crossing) for crossing in saved.given]
        saved.gradients = [one.gradients for one in entered]
        arrived = {name: stash_of(one.value) for name, one in zip(wires.skips_in, entered, strict=False)}
        rng_key = self._moment(m, recomputing=recomputing)
        batch = self.batch
        for_loss = () if wires.outs else batch.loss_pops
        with batch.around_layers() if batch.around_layers else _NOTHING:
            made = stage.forward(entered[-1].value, arrived, wires.skips_out, for_loss, rng_key, saved.progress)
        for wire, crossing, one in zip(wires.ins, saved.given, entered, strict=False):
            hooked = one.hooked()
            known = crossing.ancestors is not None
            if hooked & (crossing.ancestors or set()) or (
                hooked and not known and (len(one.aliases) > 1 or not wire.alone)
            ):
                raise RuntimeError(HOOKED.format(stage=stage))
            if crossing.shares_storage and stage.in_place.changed & set(map(id, tensors_in(one.value))):
                raise RuntimeError(f"{stage} changes {SHARED_IN_PLACE}")
        return made

    def _loss(self, made: StageOutput, m: int, progress: LayerProgress) -> Tensor:
        """The loss of a micro-batch, computed once: in its forward, or in its recompute if there is one."""
        batch = self.batch
        progress.enter()
        with batch.around_layers() if batch.around_layers else nullcontext():
            loss, batch.metrics[m] = read_loss(self._call_loss_fn(made, m))
        if batch.trains and batch.seeds[m] is not None and not loss.requires_grad:
            raise ValueError(NO_GRADIENT)
        batch.losses[m] = loss.detach()
        return loss

    def _call_loss_fn(self, made: StageOutput, m: int) -> object:
        batch = self.batch
        assert batch.loss_fn is not None
        target = replace_tensors(batch.targets[m], with_own_version)
        value = replace_tensors(made.values[0], clone_of_leaf_view)
        if not self.stream.alone:
            target = replace_tensors(target, lambda tensor: self.stream.bring(tensor, None))
        with PipeVisit(batch.seed, batch.step, batch.loss_index, batch.first + m):
            return batch.loss_fn(value, target, **made.for_loss)

    def backward(self, step: Step) -> None:
        """Runs autograd through a stage, and hands on the gradients of what crossed its boundary."""
        saved = self.store[step.stage, step.micro_batch]
        returned = self.taken if step.takes else [self._last_gradients(saved, step.micro_batch)]
        roots = [root for roots in saved.roots for root in roots]
        gradients = [gradient for gradients in returned for gradient in gradients]  # type: ignore[union-attr]
        returned.clear()
        saved.roots = []
        stage = self.stages[step.stage][0]
        if self.owners is not None:
            self.owners.check(step.stage, roots, [leaf for crossing in saved.given for leaf in crossing.leaves])
        before = stage.buffers.before() if self.batch.examines else None
        with InBackward(partial(saved.progress.maker_of, layers=stage.layers)):
            run_backward(roots, gradients)
        if before is not None:
            self._tell_of_writes(stage, before)
        if step.gives:
            self._give(step, saved.gradients)
        else:
            self.batch.input_gradients[step.micro_batch] = saved.gradients[-1]
        del self.store[step.stage, step.micro_batch]

    def _tell_of_writes(self, stage: Stage, before: SavedBuffers) -> None:
        """Notes the buffers that a backward has written."""
        written = {f"{type(module).__name__}.{name}": None for module, name in stage.buffers.after(before)}
        if written:
            self.batch.findings.append(WRITES_IN_BACKWARD.format(stage=stage, names=", ".join(written)))

    def _last_gradients(self, saved: Saved, m: int) -> Gradients:
        if self.batch.loss_fn is None:
            return self.stream.take_gradients(self.batch.output_gradients[m], None)
        seed = self.batch.seeds[m]
        if seed is None:
            return [None]
        if seed not in self._seeds:
            self._seeds[seed] = torch.full_like(saved.roots[0][0], seed)
        return [self._seeds[seed]]

    def commit(self, step: Step) -> None:
        """Has the running statistics of a stage's BatchNorms changed once this run has ended well."""
        self.commits.append(self.deferred[step.stage].commit)

    def close(self, step: Step) -> None:
        """Does a closing action of gradients, with the other processes that it concerns."""
        self.closing[step.action.kind]()

    def settle(self) -> None:
        """Does what was left for the end of a run."""
        with self.stream.enter():
            if self.doubts and bool(torch.stack(self.doubts).any()):
                raise recompute_error(f"a layer of {self.name}")
            while self.commits:
                self.commits.pop()()

    def layer_of(self, action: Action, error: BaseException) -> str | None:
        """In words, the layer in which an action failed, as far as that can be known."""
        stage, _ = self.stages[action.stage]
        saved = None if action.micro_batch is None else self.store.get((action.stage, action.micro_batch))
        if saved is None:
            return None
        if action.kind is Kind.BACKWARD:
            layer = saved.progress.maker_of(failed_node(error), stage.layers)
        else:
            layer = saved.progress.last_of(stage.layers)
        return layer or f"one of {', '.join(map(str, stage.layers))}"


def gradients_of(stage: Stage) -> list[tuple[int, int]]:
    """What gradients the layers of a stage have, and how often they were added to."""
    grads = [p.grad for layer in stage.layers for p in layer.module.parameters()]
    return [(id(grad), 0 if grad is None else grad._version) for grad in grads]


def stash_of(value: Tree) -> Tensor | None:
    """The value of a skip route."""
    assert value is None or isinstance(value, Tensor)
    return value
