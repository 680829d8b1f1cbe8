"""Performs the actions of one rank: the only code that runs the layers and the autograd of a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Never, assert_never

import torch
from torch import Tensor

from gpipe.runtime.context import Others
from gpipe.runtime.split_backward import backward_input, backward_weight, run_whole_backward
from gpipe.runtime.state import MiniBatch, Output, Saved
from gpipe.runtime.steps import Connections, Step
from gpipe.runtime.streams import RankStream
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.rules import BACKWARDS
from gpipe.stages.batchnorm import DeferredStatistics
from gpipe.stages.boundary import BoundaryValue, Gradients, cut, enter, failed_node, set_apart
from gpipe.stages.inplace import SHARED_IN_PLACE
from gpipe.stages.isolation import (
    BACKWARD_IN_FORWARD,
    HOOKED,
    WeightOwners,
    tensors_left_on,
    written_in_backward,
)
from gpipe.stages.losses import NO_GRADIENT, call_loss
from gpipe.stages.messages import Label, Message, ReadyEvent
from gpipe.stages.recompute_check import Fingerprint, recompute_error
from gpipe.stages.rng import InBackward, PipeRngScope
from gpipe.stages.stage import LayerProgress, RngKey, Stage, StageOutput, StageRun
from gpipe.stages.tree import replace_tensors, tensors_in

_NOTHING = nullcontext()


class Worker:
    """One rank: its stages, what it holds, and how it does each kind of action.

    Attributes:
        saved: What its stages keep of micro-batches, by stage and micro-batch; empty after every run.
        handed: What its stages have for each other, by what a message would be labelled; empty likewise.
        taken: What a step was brought.
        commits: The stages whose statistics are to be committed: at the end, since a failed step changes none.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, tuple[Stage, Connections]],
        stream: RankStream,
        batch: MiniBatch,
        others: Others,
        *,
        owners: WeightOwners | None = None,
        every: Sequence[Stage] = (),
    ) -> None:
        self.rank = rank
        self.name = others.name(rank)  # in messages
        self.stages = stages
        self.stream = stream
        self.batch = batch
        self.others = others
        self.owners = owners
        self.every = every  # stages of this process, of all its ranks
        self.saved: dict[tuple[int, int], Saved] = {}
        self.handed: dict[Label, Message] = {}
        self.taken: list[Message] = []
        self.deferred: dict[int, DeferredStatistics] = {}
        self.commits: list[int] = []
        self._doubts: list[Tensor] = []  # on a GPU: whether recomputes differ from their forwards
        self.runs = {index: StageRun(stage) for index, (stage, _) in stages.items()}
        if batch.deferred_batch_norm:
            self.deferred = {index: DeferredStatistics.of(run.buffers.modules) for index, run in self.runs.items()}

    def begin(self) -> None:
        """Begins a pass over micro-batches: forwards, backwards, or both. Others may have used the layers since."""
        for stage, ends in self.stages.values():
            stage.begin()
            if ends.recomputed or self.batch.examines:
                self.runs[stage.index].buffers.find()

    def do(self, step: Step) -> None:
        """Does a step, once what it takes is here."""
        WORK[step.action.kind](self, step)

    def take(self, step: Step) -> ReadyEvent:
        """Waits until what a step takes from other ranks is here; says when the last of it was sent."""
        mark: ReadyEvent = None
        taken = self.taken = []
        for peer, label in step.takes:
            if peer is None:
                taken.append(self.handed.pop(label))
            else:
                message, mark = self.others.transport.receive(self.rank, peer, label)
                taken.append(self.stream.take(message, mark))
        return mark

    def _give(self, step: Step, messages: Iterable[Message]) -> None:
        for (peer, label), message in zip(step.gives, messages, strict=True):
            if peer is None:
                self.handed[label] = message
            else:
                self.others.transport.send(peer, label, message, self.stream.mark())

    def forward(self, step: Step) -> None:
        """Runs a stage's layers on a micro-batch; with a recompute to come, keeps only what crossed the boundary."""
        stage, ends = self.stages[step.stage]
        m = step.micro_batch
        saved = Saved(self._given(step))
        self.saved[step.stage, m] = saved
        again = m in ends.recomputed
        before = self.runs[step.stage].buffers.before() if again else None
        grads = stage.gradients() if self.batch.examines else None
        if step.stage in self.deferred:
            with self.deferred[step.stage].collect(m):
                made = self._run(stage, ends, saved, m)
        else:
            made = self._run(stage, ends, saved, m)
        if grads is not None and grads != stage.gradients():
            raise RuntimeError(BACKWARD_IN_FORWARD.format(stage=stage))
        if before is None:
            self.runs[step.stage].buffers.forget()
        else:
            self.runs[step.stage].buffers.after(before)
            saved.snapshot = before
        if ends.outs:
            crossings, saved.roots = self.runs[step.stage].cut(made.values)
            self._give(step, crossings)
        elif self.batch.loss_fn is None:
            self.batch.outputs[m] = Output.of(made.values[0])
        if not again and not ends.outs:
            saved.roots = [self._last_roots(saved, made, m)]
        if again:
            saved.fingerprint = Fingerprint.of(made, stage, saved.given)
            saved.roots, saved.gradients = [], []  # and with them all that the layers made inside
        if not self.batch.trains:
            del self.saved[step.stage, m]

    def recompute(self, step: Step) -> None:
        """Runs a stage's layers once more, for their graph."""
        stage, ends = self.stages[step.stage]
        m = step.micro_batch
        saved = self.saved[step.stage, m]
        deferred = self.deferred.get(step.stage)
        with (
            self.runs[step.stage].buffers.as_before(saved.snapshot or {}),
            deferred.aside() if deferred else _NOTHING,
        ):
            made = self._run(stage, ends, saved, m)
            self._compare(stage, ends, saved, m, made)
        saved.snapshot = None
        last = [] if ends.outs else [self._last_roots(saved, made, m)]
        saved.roots = last or [cut(value)[1] for value in made.values]

    def _last_roots(self, saved: Saved, made: StageOutput, m: int) -> list[Tensor]:
        """What gradients come back to at the last stage: the loss, or what of the output wants one."""
        if self.batch.loss_fn is None:
            return [tensor for tensor in tensors_in(made.values[0]) if tensor.requires_grad]
        return [self._loss(made, m, saved.progress)]

    def _compare(self, stage: Stage, ends: Connections, saved: Saved, m: int, made: StageOutput) -> None:
        """Compares a recompute with its forward, bit for bit."""
        assert saved.fingerprint is not None
        verdict = saved.fingerprint.differs(Fingerprint.of(made, stage, saved.given))
        if verdict is True:
            self._refuse(stage, ends, saved, m)
        if isinstance(verdict, Tensor):
            self._doubts.append(verdict)

    def _refuse(self, stage: Stage, ends: Connections, saved: Saved, m: int) -> None:
        """Refuses a recompute that differs, and says which layer is to blame, if it does so again."""
        found = stage.find_unsteady(saved.given[-1].value, self._arrived(ends, saved), self._rng_key(m))
        saved.progress.point_at(found)
        if found is None:
            raise recompute_error("a layer of this partition", tensors_left_on(self.every))
        raise recompute_error(str(found))

    def _given(self, step: Step) -> list[BoundaryValue]:
        if step.stage == 0:  # wherever the user keeps it
            return [self.stream.take_value(self.batch.inputs[step.micro_batch], None)]
        given, self.taken = self.taken, []
        return given  # type: ignore[return-value]  # crossings, since it is a forward

    def _rng_key(self, m: int) -> RngKey:
        return RngKey(self.batch.seed, self.batch.step, self.batch.first + m)

    def _arrived(self, ends: Connections, saved: Saved) -> dict[str, Tensor | None]:
        return {name: crossing.stashed for name, crossing in zip(ends.skips_in, saved.given, strict=False)}

    def _run(self, stage: Stage, ends: Connections, saved: Saved, m: int) -> StageOutput:
        """Runs the layers of a stage on what was kept; gives a value for each connection out, the main one last."""
        saved.progress = self.others.new_progress()  # of this run, not of the one before
        for crossing in saved.given:
            crossing.check(stage)
        entered = [enter(crossing) for crossing in saved.given]
        saved.gradients = [one.gradients for one in entered]
        arrived = {name: one.stashed for name, one in zip(ends.skips_in, entered, strict=False)}
        for_loss = () if ends.outs else self.batch.loss_pops
        with self._around_layers():
            value, key = entered[-1].value, self._rng_key(m)
            made = stage.forward(
                value, arrived, ends.skips_out, for_loss, key, saved.progress, self.runs[stage.index].modes
            )
        for end, crossing, one in zip(ends.ins, saved.given, entered, strict=False):
            hooked = one.hooked()
            known = crossing.ancestors is not None
            if hooked & (crossing.ancestors or set()) or (
                hooked and not known and (len(one.aliases) > 1 or not end.alone)
            ):
                raise RuntimeError(HOOKED.format(stage=stage))
            if crossing.shares_storage and not made.changed.isdisjoint(map(id, tensors_in(one.value))):
                raise RuntimeError(f"{stage} changes {SHARED_IN_PLACE}")
        return made

    def _around_layers(self) -> AbstractContextManager[object]:
        return self.batch.around_layers() if self.batch.around_layers else _NOTHING

    def _loss(self, made: StageOutput, m: int, progress: LayerProgress) -> Tensor:
        """The loss of a micro-batch, computed once: in its forward, or in its recompute if there is one."""
        batch, target = self.batch, self.batch.targets[m]
        assert batch.loss_fn is not None
        progress.enter()
        if not self.stream.alone:
            target = replace_tensors(target, lambda tensor: self.stream.bring(tensor, None))
        with self._around_layers(), PipeRngScope(batch.seed, batch.step, batch.loss_index, batch.first + m):
            loss, batch.metrics[m] = call_loss(batch.loss_fn, made.values[0], target, made.for_loss)
        if batch.trains and batch.seeds[m] is not None and not loss.requires_grad:
            raise ValueError(NO_GRADIENT)
        batch.losses[m] = loss.detach().clone()  # mse_loss keeps the memory of all that it added up
        return loss

    def backward(self, step: Step) -> None:
        """Runs autograd through a stage, or its first part; hands on the gradients of what crossed its boundary."""
        saved = self.saved[step.stage, step.micro_batch]
        returned = self.taken if step.takes else [self._last_gradients(saved, step.micro_batch)]
        roots = [root for roots in saved.roots for root in roots]
        gradients = [gradient for gradients in returned for gradient in gradients]  # type: ignore[union-attr]  # gradients, since it is a backward
        returned.clear()
        saved.roots = []
        stage = self.stages[step.stage][0]
        leaves = [leaf for crossing in saved.given for leaf in crossing.leaves]
        if self.owners is not None:
            self.owners.check(step.stage, roots, leaves)
        before = self.runs[step.stage].buffers.before() if self.batch.examines else None
        owed = [one.owed for (at, _), one in self.saved.items() if at == step.stage and one.owed is not None]
        with self._in_backward(stage, saved):
            if step.action.kind is Kind.BACKWARD or self.runs[step.stage].is_sharded:
                run_whole_backward(roots, gradients, owed)
            else:
                saved.owed = backward_input(roots, gradients, leaves, owed)
        if before is not None:
            self.batch.findings += written_in_backward(self.runs[step.stage], before)
        del gradients
        set_apart(saved.gradients, saved.owed.gradients if saved.owed else ())
        if step.stage:
            self._give(step, saved.gradients)
        else:
            self.batch.input_gradients[step.micro_batch] = saved.gradients[-1]
        saved.given, saved.gradients = [], []
        if step.action.kind is Kind.BACKWARD:
            del self.saved[step.stage, step.micro_batch]

    def backward_weight(self, step: Step) -> None:
        """Runs the second part of a backward: adds up the gradients of weights that waited."""
        saved = self.saved[step.stage, step.micro_batch]
        if saved.owed is not None:
            with self._in_backward(self.stages[step.stage][0], saved):
                backward_weight(saved.owed)
        del self.saved[step.stage, step.micro_batch]

    def _in_backward(self, stage: Stage, saved: Saved) -> InBackward:
        return InBackward(partial(saved.progress.maker_of, layers=stage.layers))

    def _last_gradients(self, saved: Saved, m: int) -> Gradients:
        if self.batch.loss_fn is None:
            return self.stream.take_gradients(self.batch.output_gradients[m], None)
        seed = self.batch.seeds[m]
        if seed is None:
            return [None]
        return [torch.full_like(saved.roots[0][0], seed)]  # one for each: a leaf's `.grad` may become a view of it

    def commit(self, step: Step) -> None:
        """Notes that a stage's statistics are whole: `settle` commits them once the run has ended well."""
        self.commits.append(step.stage)

    def close(self, step: Step) -> None:
        """Does a closing action of gradients, with the other processes that it concerns."""
        self.others.close(step.action)

    def share(self) -> None:
        """Has the statistics that `settle` will commit be those of all replicas."""
        with self.stream.enter():
            self.others.share({stage: self.deferred[stage] for stage in sorted(self.commits)})

    def check_recomputes(self) -> None:
        """Looks whether recomputes on a GPU gave what their forwards did.

        Raises:
            RecomputeError: One did not.
        """
        with self.stream.enter():
            if self._doubts and bool(torch.stack(self._doubts).any()):
                raise recompute_error(f"a layer of {self.name}")

    def settle(self) -> None:
        """Commits the statistics of BatchNorm, once the run has ended well in all processes."""
        with self.stream.enter():
            for stage in self.commits:
                self.deferred[stage].commit()
        self.commits.clear()

    def layer_of(self, action: Action, error: BaseException) -> str | None:
        """In words, the layer in which an action failed, as far as that can be known."""
        stage, _ = self.stages[action.stage]
        saved = None if action.micro_batch is None else self.saved.get((action.stage, action.micro_batch))
        if saved is None:
            return None
        if action.kind in BACKWARDS:
            layer = saved.progress.maker_of(failed_node(error), stage.layers)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            layer = saved.progress.maker_of(saved.owed.next_node if saved.owed else None, stage.layers)
        else:
            layer = saved.progress.last_of(stage.layers)
        return layer or f"one of {', '.join(map(str, stage.layers))}"


def _not_done(worker: Worker, step: Step) -> Never:
    raise ValueError(f"{step.action} is not done by a worker")


def _work_of(kind: Kind) -> Callable[[Worker, Step], None]:
    match kind:
        case Kind.FORWARD:
            return Worker.forward
        case Kind.RECOMPUTE:
            return Worker.recompute
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            return Worker.backward
        case Kind.BACKWARD_WEIGHT:
            return Worker.backward_weight
        case Kind.COMMIT:
            return Worker.commit
        case Kind.TIE | Kind.REDUCE:
            return Worker.close
        case Kind.SEND | Kind.RECEIVE:
            return _not_done
        case _:
            assert_never(kind)


WORK = {kind: _work_of(kind) for kind in Kind}
"""How a worker does each kind of action."""
