"""Verifies a step: replays each stage in the order of the reference loop, and compares the results bit by bit.

A stage that depends only on its weights, buffers, inputs and random keys computes the same in a replay as in the
step, whatever the schedule was. If a result differs, the stage depends on more: on the order in which micro-batches
or stages run, or on state that another stage writes. The replay begins with the state that the step began with, and
leaves the state as the step left it.

The first replay runs stage by stage, so that each stage sees only its own writes; ranks run at once, in their own
threads. If a result differs, or if the step has changed state that several stages reach, the stages of this process
are replayed together, in the calling thread, exactly as the reference loop runs them, and then once more to see
whether that result is reproducible. Processes need not communicate for any of this.
"""

import copy
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.modes import as_rank, is_compiled
from gpipe._torch.modules import count_forward_hooks, global_hooks
from gpipe.errors import VerificationError
from gpipe.runtime.context import Context
from gpipe.runtime.run import Rank, Run
from gpipe.runtime.step_record import (
    CALLS_BACKWARD,
    INPUT,
    GradientCalls,
    Quantity,
    StageRecord,
    StepRecord,
    buffers_of,
    copy_gradients,
    parameters_of,
)
from gpipe.runtime.steps import CompiledAction
from gpipe.schedule.action import Kind
from gpipe.stages.boundary import copy_boundary
from gpipe.stages.buffers import Buffers
from gpipe.stages.losses import runs_once
from gpipe.stages.messages import Cancelled, Label, Message, ReadyEvent
from gpipe.stages.reachable_state import GLOBAL_GENERATORS, ReachableState
from gpipe.stages.recompute_check import Digest, differ, digest
from gpipe.stages.rng import RankScope
from gpipe.stages.stage import LOSS, Stage
from gpipe.stages.tree import Tree, copy_of, is_sharded, replace_tensors, tensors_in

Combination: TypeAlias = tuple[object, ...]
"""What a verified step stands for: later steps with an equal combination are not verified again."""
MOST_ATTEMPTS = 3  # steps of one combination that are recorded, if none of them is verified
MOST_BYTES = 2**30  # of state that is copied for a replay of one stage, besides its parameters
MOST_PLACES = 3  # that an error names
_ANY_THREAD = nullcontext()

DIFFERS = "{stage} {quantity} differs from the reference loop. {cause}"
WRITES_INPUT = (
    "{stage} {layer} writes the input of its stage without PyTorch noticing (through .data, numpy or DLPack), for "
    "micro-batch {micro_batch}. The stage before may need that tensor. Compute a new tensor (x = x.clamp(...)), use "
    "an in-place operation (x.clamp_(...)), or keep the layer in the stage that computes its input."
)
WRITES_RETURNED = (
    "{stage} writes {quantity} again after it has returned it (a buffer or workspace that it reuses). Return a clone."
)
WRITES_WEIGHTS = (
    "The step writes the weights {names}, and the next micro-batch reads them. Call the optimizer after "
    "pipe.step(...), constrain weights there or with torch.nn.utils.parametrize, or use micro_batches=1."
)
USES_FOREIGN_WEIGHTS = (
    "The backward of {stage} reaches {name}, which another stage trains too, so the order in which its gradient is "
    "summed depends on the schedule. Pass what is needed as part of the value, or stash it and pop it where it is "
    "used (loss_fn.pop for a loss); a weight that several layers use must be a parameter of each; for a penalty on "
    "weights use weight_decay=."
)
CHANGES_STATE = (
    "It depends on more than weights, buffers and inputs. The step changes {places}. Keep such state in a buffer "
    "(register_buffer), return it as part of the value, or stash it and pop it where it is used."
)
UNKNOWN = (
    "It depends on more than weights, buffers, inputs and torch's random numbers: on the order in which "
    "micro-batches or stages run, or on state that another stage writes (also numpy's or Python's random numbers, or "
    "gradients that a layer computes with backward() in its forward)."
)
HOW_TO_ACCEPT = " Pass verify=False to GPipe to train anyway."
STATE_IN_BACKWARD = (
    "the backward of {stage} writes {places}, and a later forward reads it. In the reference loop the next "
    "micro-batch reads it. Here forwards run ahead of backwards, so the results depend on the schedule. Use "
    "micro_batches=1 if that matters."
)
OTHER_STATE = (
    "{stage} reads state that another stage writes: {quantity} differs if the stage is replayed alone. The results "
    "depend on when each stage runs. Return such state as part of the value, or stash it and pop it where it is used."
)
RECOMPUTED_CHANGES = (
    "a forward changes {places}, and its recomputation changes it once more. Keep counts in a buffer "
    "(register_buffer), which a recomputation leaves as it was, or use remat='never' for the stage."
)
NOT_REPRODUCIBLE = (
    "{stage} could not be verified: {quantity} differs each time it is computed from the same inputs (a "
    "nondeterministic operation, the time, or random numbers that no seed reaches). See "
    "torch.use_deterministic_algorithms."
)
THREAD_LOCALS = (
    "{places}: rank threads do not see what the calling thread has set in a threading.local. Use a "
    "contextvars.ContextVar, which they see, or driver='lockstep'."
)
NOT_REPLAYED = "{stages} could not be verified: {why}"
WRITTEN_WEIGHTS = (
    "a step writes the weights {names}, so its results could not be verified yet; the next step will be. If that "
    "fails, call the optimizer after pipe.step(...), or use micro_batches=1."
)


@dataclass
class Verifier:
    """Decides which steps of a pipe are verified: the first of each combination of modes, inputs and program."""

    enabled: bool = True
    _verified: set[object] = field(default_factory=set)
    _attempts: dict[object, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)  # of all verified steps
    compared: int = 0  # results, in all verified steps
    written: list[Tensor] = field(default_factory=list)
    """Weights that steps themselves write: the next recorded step keeps copies of them."""
    _parts: list[nn.Module] = field(default_factory=list)
    _children: list[nn.Module | None] = field(default_factory=list)

    def __reduce__(self) -> tuple[type["Verifier"], tuple[bool]]:
        """A copy or a pickle begins anew: its modules are others."""
        return Verifier, (self.enabled,)

    def wants(self, run: Run) -> bool:
        """Whether a step should be verified, as far as this process knows."""
        run.combination = self._combination(run) if self.enabled and run.trains else None
        return run.combination is not None and self._is_new(run.combination)

    def _is_new(self, combination: object) -> bool:
        return combination not in self._verified and self._attempts.get(combination, 0) < MOST_ATTEMPTS

    def count_attempt(self, run: Run) -> None:
        self._attempts[run.combination] = self._attempts.get(run.combination, 0) + 1

    def finish(self, run: Run) -> None:
        self._verified.add(run.combination)

    def _combination(self, run: Run) -> Combination:
        children = [*chain.from_iterable(part._modules.values() for part in self._parts)]
        if not self._parts or self._children != children:
            roots = (layer.module for stage in run.engine.own for layer in stage.layers)
            self._parts = list(dict.fromkeys(chain.from_iterable(root.modules() for root in roots)))
            self._children = [*chain.from_iterable(part._modules.values() for part in self._parts)]
        model = [
            (
                id(part),
                part.training,
                count_forward_hooks(part),
                [p is not None and p.requires_grad for p in part._parameters.values()],
            )
            for part in self._parts
        ]
        program = len(run.micro_batch_sizes), run.slices, run.path, run.thread_state.autocasts
        loss = getattr(run.loss_fn, "__code__", type(run.loss_fn))
        return repr(model), program, loss, tuple([_kind(crossing.value) for crossing in run.inputs[:2]])


def _kind(value: Tree) -> object:
    """The structure of a value, with dtype, device and number of dimensions of its tensors, not their sizes."""
    kind = type(value)
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.dim(), value.requires_grad
    if kind is dict:
        return tuple((key, _kind(item)) for key, item in value.items())  # type: ignore[attr-defined]  # a dict
    if kind is list or kind is tuple:
        return kind, *map(_kind, value)  # type: ignore[call-overload]  # one of these
    return kind, *map(_kind, tensors_in(value))  # runs no code of other classes


@dataclass
class Evidence:
    """What a verified step needs besides its record: the state and the weights that it began with."""

    verifier: Verifier
    began: "StagesState"
    weights: dict[str, tuple[Tensor, Digest]]
    calls_loss: bool  # whether the loss is replayed
    copied: Sequence[Tensor]
    """Weights of which `began` has copies, since earlier steps were seen to write them."""

    @classmethod
    def of(cls, run: Run, verifier: Verifier) -> "Evidence":
        copied, calls_loss = [*verifier.written], not runs_once(run.loss_fn)
        began = StagesState.of(run, copied, calls_loss=calls_loss)
        if calls_loss and any(place.startswith(LOSS) for place in began.uncopyable):
            calls_loss = False
            began = StagesState.of(run, copied, calls_loss=False)
        return cls(verifier, began, _digests_of_weights(run), calls_loss, copied)

    def written_weights(self, run: Run) -> dict[str, Tensor]:
        """The weights that the step has written, by name."""
        now = _digests_of_weights(run)
        pairs = ((name, weight, before, now.get(name)) for name, (weight, before) in self.weights.items())
        return {name: weight for name, weight, before, other in pairs if other is None or differ(before, other[1])}


@dataclass
class StagesState:
    """The state that each stage of this process reaches, as it was at one moment."""

    states: dict[int, ReachableState]

    @classmethod
    def of(
        cls,
        run: Run,
        parameters_too: Sequence[Tensor] = (),
        like: "StagesState | None" = None,
        *,
        calls_loss: bool = True,
    ) -> "StagesState":
        """Copies the state now; that of the loss only if replays call it."""
        hooks = {f"global module hook {number}": hook for number, hook in enumerate(global_hooks())}
        parameters: list[Tensor] = [
            p for stage in run.engine.own for layer in stage.layers for p in layer.module.parameters()
        ]
        parameters += [leaf for leaves in run.aliases.leaves.values() for leaf in leaves.values()]
        parameters += run.aliases.sources.values()
        states = {}
        for stage in run.engine.own:
            roots: dict[str, object] = {**hooks, "saved-tensor hooks": run.thread_state.hooks}
            for layer in stage.layers:  # of a traced model not the model, which has the layers of all stages
                is_part = "stands_for" in vars(layer.module)
                roots[str(layer)] = layer.module._modules if is_part else layer.module
            if calls_loss and run.loss_fn is not None and stage.index == len(run.engine.stages) - 1:
                roots[LOSS] = run.loss_fn
            earlier = None if like is None else like.states[stage.index]
            states[stage.index] = ReachableState.of(
                roots,
                parameters_too=parameters_too,
                parameters_except=parameters,
                most_bytes=MOST_BYTES,
                like=earlier,
            )
        return cls(states)

    def restore(self) -> None:
        for state in self.states.values():
            state.restore()

    def leave_unused_generators(self, earlier: "StagesState") -> None:
        """Leaves global generators alone from which the step has not drawn, since other threads may draw from them.

        Torch's own is left alone in any case: layers draw from it only what has keys.
        """
        keys = set[Any]().union(*(now.changed_keys(earlier.states[stage]) for stage, now in self.states.items()))
        drawn = {holder for _, holder, *_ in keys}
        for generator in GLOBAL_GENERATORS.values():
            if generator is torch.default_generator or id(generator) not in drawn:
                for state in (*self.states.values(), *earlier.states.values()):
                    state.leave_alone(generator)

    def changed_since(self, earlier: "StagesState", **options: Any) -> list[str]:
        """The places that differ from an earlier state, in words."""
        places = (now.changed_since(earlier.states[stage], **options) for stage, now in self.states.items())
        return list(dict.fromkeys(chain.from_iterable(places)))

    def several_reach_changes(self, earlier: "StagesState") -> bool:
        """Whether several stages reach an object that differs from an earlier state, or code that reads `.grad`."""
        if any("grad" in state.names for state in self.states.values()):
            return True
        changed = set[Any]().union(*(now.changed_keys(earlier.states[stage]) for stage, now in self.states.items()))
        return any(sum(state.has(key) for state in self.states.values()) > 1 for key in changed)

    @property
    def thread_locals(self) -> list[str]:
        return list(chain.from_iterable(state.thread_locals for state in self.states.values()))

    @property
    def uncopyable(self) -> list[str]:
        return list(chain.from_iterable(state.uncopyable for state in self.states.values()))


def _digests_of_weights(run: Run) -> dict[str, tuple[Tensor, Digest]]:
    return {
        layer.full_name(name): (parameter, digest([parameter.detach()]))
        for stage in run.engine.own
        for layer in stage.layers
        for name, parameter in layer.module.named_parameters()
        if not is_lazy(parameter) and not parameter.is_meta
    }


def begin(run: Run, verifier: Verifier) -> None:
    """Begins to record a step; aliases of shared weights are in place."""
    stages = run.engine.own
    verifier.count_attempt(run)
    if reason := _reason_against(stages):
        _give_up(run, verifier, reason)
        return
    if any(is_lazy(p) for stage in stages for layer in stage.layers for p in layer.module.parameters()):
        return  # the next step begins with their values
    evidence = Evidence.of(run, verifier)
    if run.engine.threaded and (places := evidence.began.thread_locals):
        run.findings.append(THREAD_LOCALS.format(places=_in_words(places)))
    if evidence.began.uncopyable:
        _give_up(run, verifier, f"state cannot be copied: {_in_words(evidence.began.uncopyable)}")
        return
    run.evidence = evidence
    run.record = StepRecord(stages, len(run.micro_batch_sizes), run.slices, calls_loss=evidence.calls_loss)
    run.context.record_exchanges(run.record.count)


def _give_up(run: Run, verifier: Verifier, why: str) -> None:
    finding = NOT_REPLAYED.format(stages="this step", why=why)
    run.findings.append(finding)
    verifier.findings.append(finding)
    verifier.finish(run)


def _reason_against(stages: Sequence[Stage]) -> str:
    modules = [module for stage in stages for module in stage.modules]
    parameters = (p for module in modules for p in module._parameters.values() if p is not None)
    if any(map(is_sharded, modules)) or any(hasattr(p, "device_mesh") for p in parameters):
        return "its weights are sharded (fully_shard, parallelize_module), and a replay would communicate"
    return ""


class Playback(Context):
    """The context of a replay: what was received is played back from the record, what is sent goes nowhere."""

    def __init__(self, context: Context) -> None:
        super().__init__(0)
        self.replica, self.replicas = context.replica, context.replicas
        self.awaits_backwards = context.awaits_backwards
        self.begin_replay = context.begin_replay  # type: ignore[method-assign]
        self.name = context.name  # type: ignore[method-assign]

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Drops it: its digest is in the record of the replay."""


def _wait_for_ranks(run: Run) -> None:
    """Orders what the calling thread queues on devices after what the ranks have queued."""
    for rank in run.ranks:
        rank.stream.end()


def verify(run: Run, *, in_threads: bool) -> None:
    """Replays the recorded micro-batches of a step, and compares.

    Raises:
        VerificationError: If the numbers of the step may differ from those of the reference loop.
    """
    record, evidence = run.record, run.evidence
    assert record is not None
    assert evidence is not None
    run.record = run.evidence = None
    leaves = {key: leaf for each in record.stages.values() for key, leaf in each.reached.items()}
    gradients = {key: leaf.grad for key, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    _wait_for_ranks(run)
    written = evidence.written_weights(run)
    copied = [*written.values(), *evidence.copied]
    ended = StagesState.of(run, copied, evidence.began, calls_loss=evidence.calls_loss)
    ended.leave_unused_generators(evidence.began)
    verification = _Verification(run, record, evidence, ended, written)
    try:
        findings = verification.find(in_threads=in_threads)
    except (torch.OutOfMemoryError, MemoryError):
        why = "there was not enough memory for the replay"
        findings = [NOT_REPLAYED.format(stages="this step", why=why)]
    finally:
        _wait_for_ranks(run)
        ended.restore()
        for key, leaf in leaves.items():
            leaf.grad = gradients[key]
    evidence.verifier.compared += sum(map(StageRecord.count_results, record.stages.values()))
    evidence.verifier.findings += findings
    run.findings += findings


@dataclass
class _Verification:
    run: Run
    record: StepRecord
    evidence: Evidence
    ended: StagesState
    written: dict[str, Tensor]
    _is_conclusive: bool = True

    def find(self, *, in_threads: bool) -> list[str]:
        """Replays, and returns findings."""
        finding = self._compare(in_threads=in_threads)
        if self._is_conclusive:
            self.evidence.verifier.finish(self.run)
        return [text for text in (finding, self._recomputed_changes()) if text]

    def _compare(self, *, in_threads: bool) -> str:
        self._raise_if_leaves_are_shared()
        shared = self.ended.several_reach_changes(self.evidence.began)
        try:
            replay = self._replay_alone(in_threads=in_threads and not shared)
            self._raise_if_written(replay)
            alone = self._differences(replay)
        except (torch.OutOfMemoryError, MemoryError, VerificationError):
            raise
        except Exception as error:  # perhaps since all stages ran at once
            alone = [(next(iter(self.record.stages)), Quantity(f"a replay raises {type(error).__name__}", 0))]
        if not alone and not shared:
            return ""
        written = {name: weight for name, weight in self.written.items() if not _is_in(weight, self.evidence.copied)}
        if alone and written:
            self.evidence.verifier.written += written.values()
            self._is_conclusive = False
            return WRITTEN_WEIGHTS.format(names=", ".join([*written][:MOST_PLACES]))
        try:
            order = self._reference_order([*self.record.stages])
            first, again = self._replay_from_begin(order), self._replay_from_begin(order)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            return NOT_REPLAYED.format(stages="this step", why=f"a replay raised {type(error).__name__}: {error}")
        together = self._differences(first)
        if not together and alone:
            text = OTHER_STATE.format(stage=self._stage(alone[0][0]), quantity=alone[0][1])
            if len(self.run.micro_batch_sizes) > self.run.slices:  # one micro-batch is in one stage at a time
                raise self._error(text)
            return text
        if not together:
            return ""
        stage, quantity = together[0]
        compiled = any(map(is_compiled, self._stage(stage).modules))  # its code may be replaced for other sizes
        if compiled or self._differences(first, again):
            return NOT_REPRODUCIBLE.format(stage=self._stage(stage), quantity=quantity)
        if not self.written and (places := self._state_in_backward(stage)):
            return STATE_IN_BACKWARD.format(stage=self._stage(stage), places=places)
        cause = self._cause(first.stages[stage])
        raise self._error(DIFFERS.format(stage=self._stage(stage), quantity=quantity, cause=cause))

    def _error(self, text: str) -> VerificationError:
        return VerificationError(text + HOW_TO_ACCEPT)

    def _recomputed_changes(self) -> str:
        """Reports Python state that a forward changes, and that its recomputation changes once more."""
        again = [stage for stage in self.record.stages if self.run.connections[stage].recomputed]
        buffers = {id(buffer) for stage in again for buffer in buffers_of(self._stage(stage))}
        if not again or not self.ended.changed_since(self.evidence.began, except_for=buffers, by_value=True):
            return ""
        self._restore()
        replay, places = _run_of_replay(self.run, self.record), dict[str, None]()
        for stage in again:
            forward, *_ = self._reference_order([stage])
            saved = Buffers([layer.module for layer in self._stage(stage).layers])
            stream = next(rank.stream for rank in replay.ranks if stage in rank.stages)
            with stream.enter():
                before = saved.before()
                self._perform(replay, [forward])
                saved.after(before)
            once = self._state()
            with stream.enter(), saved.as_before(before):
                self._perform(replay, [forward])
            changes = self._state().changed_since(once, except_for=buffers, by_value=True)
            places.update(dict.fromkeys(changes))
        # the loss is called only once; other threads may draw from global generators
        places = {place: None for place in places if not place.startswith((LOSS, "the global generator"))}
        return RECOMPUTED_CHANGES.format(places=_in_words(places)) if places else ""

    def _raise_if_leaves_are_shared(self) -> None:
        """Raises if backwards of two stages add to the `.grad` of one tensor."""
        users: dict[int, list[int]] = {}
        for stage, record in self.record.stages.items():
            for key in record.weights.leaves if record.weights is not None else ():
                users.setdefault(key, []).append(stage)
        for key, stages in users.items():
            if len(stages) > 1:
                weights = self.record.stages[stages[0]].weights
                assert weights is not None
                name, _ = _name_of(self.run, weights.leaves[key])
                strangers = [stage for stage in stages if key not in parameters_of(self.run, self._stage(stage))]
                words = self._stage((strangers or stages)[-1])
                raise self._error(USES_FOREIGN_WEIGHTS.format(stage=words, name=name))

    def _raise_if_written(self, replay: StepRecord) -> None:
        """Raises if a stage writes tensors that other stages hold."""
        for stage, record in replay.stages.items():
            for quantity in record.written:
                words = self._stage(stage)
                if quantity.text != INPUT:
                    raise self._error(WRITES_RETURNED.format(stage=words, quantity=quantity))
                layer = self._writer(stage) or "one of its layers"
                m = quantity.micro_batch
                raise self._error(WRITES_INPUT.format(stage=words, layer=layer, micro_batch=m))

    def _writer(self, stage: int) -> str | None:
        """The layer that writes the input of its stage, as far as that can be seen."""
        self._restore()
        replay = _run_of_replay(self.run, self.record)
        assert replay.record is not None
        replay.record.looks_for_writer = True
        self._perform(replay, self._reference_order([stage])[:1])
        return replay.record.writer

    def _restore(self) -> None:
        """Puts back the state that the step began with, before what ranks queue on devices from now on."""
        _wait_for_ranks(self.run)
        self.evidence.began.restore()
        self._queue_ranks_behind()

    def _queue_ranks_behind(self) -> None:
        for rank in self.run.ranks:
            rank.stream.begin([*rank.stream.called])

    def _state(self) -> StagesState:
        _wait_for_ranks(self.run)
        state = StagesState.of(self.run, calls_loss=self.evidence.calls_loss)
        self._queue_ranks_behind()
        return state

    def _stage(self, index: int) -> Stage:
        return self.run.engine.stages[index]

    def _reference_order(self, stages: Sequence[int]) -> list[CompiledAction]:
        """The recorded actions of some stages as the reference loop performs them."""
        slices, order = self.run.slices, list[CompiledAction]()
        for first in range(0, self.record.count, slices):
            numbers = range(first, first + slices)
            forwards = [(Kind.FORWARD, m, stage) for m in numbers for stage in stages]
            backwards = [(Kind.BACKWARD, m, stage) for m in reversed(numbers) for stage in reversed(stages)]
            order += [self.record.stages[stage].actions[kind, m] for kind, m, stage in (*forwards, *backwards)]
        return order

    def _replay_alone(self, *, in_threads: bool) -> StepRecord:
        """Replays each stage as if it were alone: it sees the state of the beginning, and only its own writes."""
        replay = _run_of_replay(self.run, self.record)
        if in_threads:
            self._restore()
            jobs = [partial(copy_context().run, self._replay_rank, replay, rank) for rank in replay.ranks]
            self.run.engine.threads.run(jobs, partial(setattr, replay.context, "cancelled", True))
        else:
            for rank in replay.ranks:
                for stage in rank.stages:
                    self._restore()
                    self._perform(replay, self._reference_order([stage]))
        _wait_for_ranks(self.run)
        assert replay.record is not None
        return replay.record

    def _replay_rank(self, replay: Run, rank: Rank) -> None:
        for stage in rank.stages:
            self._perform(replay, self._reference_order([stage]), as_rank())

    def _replay_from_begin(self, order: Sequence[CompiledAction]) -> StepRecord:
        self._restore()
        replay = _run_of_replay(self.run, self.record)
        self._perform(replay, order)
        _wait_for_ranks(self.run)
        assert replay.record is not None
        return replay.record

    def _perform(
        self, replay: Run, order: Sequence[CompiledAction], thread: AbstractContextManager[object] = _ANY_THREAD
    ) -> None:
        """Performs recorded actions again, in this order, in this thread."""
        stages = {action.stage for action in order}
        for rank in replay.ranks:
            with rank.stream.enter():
                for stage in stages & rank.stages.keys():
                    self.record.stages[stage].put_gradients_before()
        for stage in stages:
            self._stage(stage).restart()
        ranks = {rank.rank: rank for rank in replay.ranks}
        state = self.run.thread_state
        with state.rank_thread(), thread, RankScope(replay.seed, replay.step_number) as scope:
            for action in order:
                if replay.context.cancelled:
                    raise Cancelled
                rank = ranks[action.rank]
                rank.scope = scope
                with rank.stream.enter():
                    _perform_again(replay, rank, action, self.record.stages[action.stage])
                rank.stream.keep_pace()
        for stage in stages:
            self.record.stages[stage].drop_gradients()

    def _differences(self, replay: StepRecord, step: StepRecord | None = None) -> list[tuple[int, Quantity]]:
        return [
            (stage, quantity)
            for stage, each in (step or self.record).stages.items()
            for quantity in each.differences(replay.stages[stage], partial(self._gradient_of, stage))
        ]

    def _gradient_of(self, stage: int, leaf: int) -> Quantity:
        weights = self.record.stages[stage].weights
        assert weights is not None
        name, layer = _name_of(self.run, weights.leaves[leaf])
        return Quantity(f"the gradient of {name}", max(0, self.record.count - 1), layer)

    def _state_in_backward(self, stage: int) -> str:
        """In words, the state that backwards of a stage write and forwards read, if that explains the result."""
        if self._differences(self._replay_from_begin(self.record.order)):
            return ""
        self._restore()
        replay = _run_of_replay(self.run, self.record)
        forward, backward, *_ = self._reference_order([stage])
        self._perform_only(replay, forward)
        before = self._state()
        self._perform_only(replay, backward)
        return _in_words(self._state().changed_since(before))

    def _perform_only(self, replay: Run, action: CompiledAction) -> None:
        self._perform(replay, [action])

    def _cause(self, replay: StageRecord) -> str:
        """The likely cause of a difference, and what to do about it."""
        if replay.calls_backward:
            return CALLS_BACKWARD
        if self.written:
            return WRITES_WEIGHTS.format(names=", ".join([*self.written][:MOST_PLACES]))
        places = _in_words(self.ended.changed_since(self.evidence.began))
        return CHANGES_STATE.format(places=places) if places else UNKNOWN


def _in_words(places: Collection[str]) -> str:
    shown = "; ".join([*places][:MOST_PLACES])
    return f"{shown}; and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else shown


def _is_in(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _name_of(run: Run, leaf: Tensor) -> tuple[str, str | None]:
    """The name of a parameter in the pipe, and its layer, in words."""
    for stage in run.engine.own:
        for layer in stage.layers:
            for name, parameter in layer.module.named_parameters():
                if parameter is leaf:
                    return layer.full_name(name), str(layer)
    return f"a tensor of shape {tuple(leaf.shape)}", None


def _run_of_replay(run: Run, record: StepRecord) -> Run:
    """A run that performs recorded actions of another one: nothing is recomputed, offloaded, sent or committed."""
    replay = copy.copy(run)
    replay.context, replay.recorder, replay.findings = Playback(run.context), None, []
    replay.connections = [ends._replace(recomputed=frozenset(), offloaded=frozenset()) for ends in run.connections]
    replay.watch = None
    replay.losses, replay.metrics, replay.outputs, replay.input_gradients = {}, {}, {}, {}
    replay.ranks = [run.new_rank(rank.rank) for rank in run.ranks]
    replay.record = StepRecord(
        run.engine.own, len(run.micro_batch_sizes), run.slices, calls_loss=record.calls_loss, replays=record
    )
    if not record.calls_loss:
        replay.loss_fn = None
    replay.work = replay.record.work
    return replay


def _perform_again(replay: Run, rank: Rank, action: CompiledAction, record: StageRecord) -> None:
    m = action.micro_batch
    replay.context.begin_replay(action.action)
    if action.action.kind is Kind.FORWARD:
        crossings = [*map(copy_boundary, record.inputs[m])]
        rank.taken = [*crossings]
        if not action.stage:
            replay.inputs = {m: crossings[0]}  # type: ignore[assignment]
        if m in record.targets:
            replay.targets = {m: replace_tensors(record.targets[m], copy_of)}  # type: ignore[assignment]
    else:
        received = [copy_gradients(gradients) for gradients in record.gradients[m]]
        rank.taken = [*received]
        if not action.takes and received:
            replay.output_gradients = {m: received[0]}  # type: ignore[assignment]
        action = action._replace(action=action.action._replace(kind=Kind.BACKWARD))
    gives = tuple(transfer._replace(peer=rank.rank) for transfer in action.gives)
    assert replay.record is not None
    stage = replay.engine.stages[action.stage]
    watched = action.action.kind is Kind.FORWARD and not any(map(is_compiled, stage.modules))
    with GradientCalls(replay.record.stages[action.stage], stage) if watched else nullcontext():
        replay.work[action.action.kind](replay, rank, action._replace(gives=gives))
