"""Compares a step with replays of each stage in the order of the reference loop, bit by bit.

A stage that depends only on its weights, buffers, inputs and random keys computes the same in a replay as in the
step, whatever the schedule was. If a result differs, the stage depends on more: on the order in which micro-batches
or stages run, or on state that another stage writes. The replay begins with the state that the step began with, and
leaves the state as the step left it.

The first replay runs stage by stage, so that each stage sees only its own writes; ranks run at once, in their own
threads. If a result differs, or if the step has changed state that several stages reach, the stages of this process
are replayed together, in the calling thread, exactly as the reference loop runs them, and then once more to see
whether that result is reproducible. Processes need not communicate for any of this.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gpipe._torch.modes import is_compiled
from gpipe.errors import VerificationError
from gpipe.features.verification.evidence import Evidence, StagesState
from gpipe.features.verification.replay import Replays, record_of
from gpipe.features.verification.step_record import (
    CALLS_BACKWARD,
    INPUT,
    OUT_OF_MEMORY,
    Quantity,
    StageRecord,
    StepRecord,
    buffers_of,
    parameters_of,
)
from gpipe.runtime.run import Run
from gpipe.schedule.action import Kind
from gpipe.stages.buffers import Buffers
from gpipe.stages.reachable_state import GLOBAL_GENERATOR
from gpipe.stages.stage import LOSS, Stage

MOST_PLACES = 3  # The most places that one message names.

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
    "summed depends on the schedule. Return the weight as part of the value, or stash it and pop it in the "
    "layer that uses it (loss_fn.pop in a loss). If several layers use the weight, make it a parameter of each. "
    "For a penalty on weights, use weight_decay=."
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
HOW_TO_ACCEPT = " Set pipe.verify_steps = False to train anyway."
STATE_IN_BACKWARD = (
    "The backward of {stage} writes {places}, and a later forward reads it. In the reference loop the next "
    "micro-batch reads it. Here forwards run ahead of backwards, so the results depend on the schedule. Use "
    "micro_batches=1 if that matters."
)
OTHER_STATE = (
    "{stage} reads state that another stage writes: {quantity} differs if the stage is replayed alone. The results "
    "depend on when each stage runs. Return such state as part of the value, or stash it and pop it where it is used."
)
RECOMPUTED_CHANGES = (
    "A forward changes {places}, and its recomputation changes it again. Keep counts in a buffer (register_buffer) "
    "and draw random numbers with torch: a recomputation changes neither. Or use remat='never' for the stage."
)
NOT_REPRODUCIBLE = (
    "{stage} could not be verified: {quantity} differs each time it is computed from the same inputs (a "
    "nondeterministic operation, the time, or random numbers that no seed reaches). See "
    "torch.use_deterministic_algorithms."
)
NOT_REPLAYED = "{stages} could not be verified: {why}"
WRITTEN_WEIGHTS = (
    "The step itself writes the weights {names}, so it could not be verified. The next step will be. If that step "
    "raises an error, call the optimizer after pipe.step(...), or use micro_batches=1."
)


@dataclass
class Comparison:
    """Compares the record of a step with replays.

    Attributes:
        is_conclusive: Whether the step is verified; otherwise a later one will be.
        writing: The weights that the step writes, if that is why it is not verified.
    """

    run: Run
    record: StepRecord
    evidence: Evidence
    ended: StagesState
    written: dict[str, Tensor]
    replays: Replays
    is_conclusive: bool = True
    writing: Sequence[Tensor] = ()

    def find(self, *, in_threads: bool) -> list[str]:
        """Replays the step, raises an error if it differs, and returns findings."""
        finding = self._compare(in_threads=in_threads)
        return [text for text in (finding, self._recomputed_changes()) if text]

    def _compare(self, *, in_threads: bool) -> str:
        self._raise_if_leaves_are_shared()
        shared = self.ended.several_reach_changes(self.evidence.began)
        try:
            replay = self.replays.stages_alone(in_threads=in_threads and not shared)
            self._raise_if_written(replay)
            alone = self._differences(replay)
        except (*OUT_OF_MEMORY, VerificationError):
            raise
        except Exception as error:  # Stages that are replayed in order may not raise it.
            alone = [(next(iter(self.record.stages)), Quantity(f"a replay raises {type(error).__name__}", 0))]
        if not alone and not shared:
            return ""
        written = {name: weight for name, weight in self.written.items() if not _is_in(weight, self.evidence.copied)}
        if alone and written:
            self.writing, self.is_conclusive = [*written.values()], False
            return WRITTEN_WEIGHTS.format(names=", ".join([*written][:MOST_PLACES]))
        try:
            order = self.replays.reference_order([*self.record.stages])
            first, again = self.replays.all_stages(order), self.replays.all_stages(order)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            return NOT_REPLAYED.format(stages="this step", why=f"a replay raised {type(error).__name__}: {error}")
        together = self._differences(first)
        if not together and alone:
            text = OTHER_STATE.format(stage=self._stage(alone[0][0]), quantity=alone[0][1])
            if len(self.run.micro_batch_sizes) > self.run.slices:  # With one micro-batch, stages never overlap.
                raise self._error(text)
            return text
        if not together:
            return ""
        stage, quantity = together[0]
        compiled = any(map(is_compiled, self._stage(stage).modules))  # torch may compile again for other sizes.
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
        again = [stage for stage in self.record.stages if self.run.routes[stage].micro_batches[Kind.RECOMPUTE]]
        buffers = {id(buffer) for stage in again for buffer in buffers_of(self._stage(stage))}
        if not again or not self.ended.changed_since(self.evidence.began, except_for=buffers, by_value=True):
            return ""
        self.replays.restore()
        replay, places = self.replays.new_run(), dict[str, None]()
        for stage in again:
            forward, *_ = self.replays.reference_order([stage])
            saved = Buffers([layer.module for layer in self._stage(stage).layers])
            stream = next(rank.stream for rank in replay.ranks if stage in rank.stages)
            with stream.enter():
                before = saved.before()
                self.replays.perform(replay, [forward])
                saved.after(before)
            once = self.replays.state()
            with stream.enter(), saved.as_before(before):
                self.replays.perform(replay, [forward])
            changes = self.replays.state().changed_since(once, except_for=buffers, by_value=True)
            if any(place.startswith(GLOBAL_GENERATOR) for place in changes):
                # Other threads may draw from it, but not the same numbers each time that this forward runs.
                self.replays.restore()
                self.replays.perform(replay, [forward])
                unsteady = set(self.replays.state().changed_since(once, except_for=buffers, by_value=True))
                changes = [p for p in changes if not (p in unsteady and p.startswith(GLOBAL_GENERATOR))]
            places.update(dict.fromkeys(changes))
        # A recomputation does not call the loss, and the random numbers that layers draw with torch have keys.
        places = {place: None for place in places if not place.startswith((LOSS, f"{GLOBAL_GENERATOR} of torch"))}
        return RECOMPUTED_CHANGES.format(places=in_words(places)) if places else ""

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
        """Returns the layer that writes the input of its stage, or None if no single layer was found."""
        self.replays.restore()
        replay = self.replays.new_run()
        record = record_of(replay)
        record.looks_for_writer = True
        self.replays.perform(replay, self.replays.reference_order([stage])[:1])
        return record.writer

    def _stage(self, index: int) -> Stage:
        return self.run.stages.all[index]

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
        """Describes the state that a backward of a stage writes and a later forward reads. Empty if there is none."""
        if self._differences(self.replays.all_stages(self.record.order)):
            return ""
        self.replays.restore()
        replay = self.replays.new_run()
        forward, backward, *_ = self.replays.reference_order([stage])
        self.replays.perform(replay, [forward])
        before = self.replays.state()
        self.replays.perform(replay, [backward])
        return in_words(self.replays.state().changed_since(before))

    def _cause(self, replay: StageRecord) -> str:
        """Returns the likely cause of a difference and its fix."""
        if replay.calls_backward:
            return CALLS_BACKWARD
        if self.written:
            return WRITES_WEIGHTS.format(names=", ".join([*self.written][:MOST_PLACES]))
        places = in_words(self.ended.changed_since(self.evidence.began))
        return CHANGES_STATE.format(places=places) if places else UNKNOWN


def in_words(places: Collection[str]) -> str:
    """Lists some of several places in a message."""
    shown = "; ".join([*places][:MOST_PLACES])
    return f"{shown}; and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else shown


def _is_in(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _name_of(run: Run, leaf: Tensor) -> tuple[str, str | None]:
    """Returns the name of a parameter in the pipe, and a description of its layer."""
    for stage in run.stages.local:
        for layer in stage.layers:
            for name, parameter in layer.module.named_parameters():
                if parameter is leaf:
                    return layer.full_name(name), str(layer)
    return f"a tensor of shape {tuple(leaf.shape)}", None
