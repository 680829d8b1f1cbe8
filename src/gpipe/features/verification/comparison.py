"""Compares a step bit by bit with replays of each stage in the order of the reference loop.

A stage that depends only on its weights, buffers, inputs and random keys returns the same results in a replay as in
the step, for every schedule. If a result differs, the stage also depends on the order in which micro-batches or
stages run, or on state that a different stage writes. A replay starts from the state before the step. After all
replays, the state after the step is restored.

1. The first replay runs each stage separately, so that a stage cannot read state that other stages write. Ranks run
   in their threads.
2. If a result differs, or if the step has changed state that several stages reach, all stages of this process are
   replayed together, in the calling thread, as in the reference loop.
3. All stages are replayed together once more, to find out whether the second result is reproducible.

Processes do not communicate in replays.
"""

from collections.abc import Collection, Iterable, Sequence
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

# Differences from the reference loop, which are errors.
WRITES_WEIGHTS = (
    "{stage}: {quantity} differs from the reference loop, because the step writes the weights {names}. Call the "
    "optimizer, and constrain weights, after pipe.step(...). [weights-written-in-step]"
)
CHANGES_STATE = (
    "{stage}: {quantity} differs from the reference loop, because the step changes {places}. Keep this state in a "
    "buffer, or return it as part of the output of the layer. [state-changed-in-step]"
)
UNKNOWN = (
    "{stage}: {quantity} differs from the reference loop. It depends on the order of micro-batches, on state of a "
    "different stage, or on random numbers of Python or numpy. Make the stage independent of them. [depends-on-order]"
)
WRITES_INPUT = (
    "{stage}: {layer} writes the input for micro-batch {micro_batch} through .data, numpy or DLPack, which PyTorch "
    "does not notice. Compute a new tensor (x = x.clamp(...)), or use x.clamp_(...). [input-written-unnoticed]"
)
WRITES_RETURNED = (
    "{stage}: {quantity} is changed in place after the stage has returned it, for example because a layer reuses a "
    "buffer. Return a clone. [output-written-again]"
)
USES_FOREIGN_WEIGHTS = (
    "{stage}: its backward pass reaches {name}, which a different stage also trains. Stash the weight, and pop it in "
    "the layer or loss that uses it, or make it a parameter of each layer. [weight-of-different-stage]"
)
OTHER_STATE = (
    "{stage}: {quantity} differs if the other stages do not run, because this stage reads state that "
    "other stages write. Return this state as part of the output of the layer. [state-of-different-stage]"
)
IN_OTHER_PROCESSES = (
    "{stage}: the step changes {places}. A stage of a different process has its own copy of this buffer, which does "
    "not change. Give each layer its own module, or put the layers into one stage. [buffer-in-several-processes]"
)
HOW_TO_ACCEPT = "Set pipe.verify_steps = False to train without this check."

# Findings.
STATE_IN_BACKWARD = (
    "{stage}: its backward pass writes {places}, and a later forward pass reads it, so results depend on the "
    "schedule. Use micro_batches=1 if results must not depend on the schedule. [state-written-in-backward]"
)
RECOMPUTED_CHANGES = (
    "remat: a forward pass changes {places}, and its recomputation changes the same state again. Keep counts in a "
    "buffer, draw random numbers with torch, or use remat='never' for the stage. [state-written-twice]"
)
NOT_REPRODUCIBLE = (
    "{stage}: {quantity} could not be verified, because it differs each time that it is computed from the same "
    "inputs. Use torch.use_deterministic_algorithms. [nondeterministic-stage]"
)
NOT_REPLAYED = "This step could not be verified: {why}. Training continues without a check. [not-verified]"
WRITTEN_WEIGHTS = (
    "This step could not be verified, because it writes the weights {names}. gpipe verifies the next step. If that "
    "step raises an error, call the optimizer after pipe.step(...). [weights-written-in-step]"
)


@dataclass
class Comparison:
    """Compares the record of a step with replays.

    Attributes:
        is_conclusive: Whether the comparison has a result. If not, a later step is verified.
        writing: The weights that the step writes, if the comparison is not conclusive because of these weights.
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
        """Replays the step and returns findings. Raises a `VerificationError` if the step differs."""
        finding = self._compare(in_threads=in_threads)
        return [text for text in (finding, self._recomputed_changes()) if text]

    def _compare(self, *, in_threads: bool) -> str:
        self._raise_if_leaves_are_shared()
        self._raise_if_other_processes_have_buffers()
        shared = self.ended.several_reach_changes(self.evidence.began)
        try:
            replay = self.replays.stages_alone(in_threads=in_threads and not shared)
            self._raise_if_written(replay)
            alone = self._differences(replay)
            self._raise_if_sums_are_reordered(() if alone else replay.stages.items())
        except (*OUT_OF_MEMORY, VerificationError):
            raise
        except Exception as error:  # A replay of all stages in order may not raise it.
            alone = [(next(iter(self.record.stages)), Quantity(f"a replay raises {type(error).__name__}", 0))]
        if not alone and not shared:
            return ""
        copied = set(map(id, self.evidence.copied))
        written = {name: weight for name, weight in self.written.items() if id(weight) not in copied}
        if alone and written:
            self.writing, self.is_conclusive = [*written.values()], False
            return WRITTEN_WEIGHTS.format(names=", ".join([*written][:MOST_PLACES]))
        try:
            order = self.replays.reference_order([*self.record.stages])
            first, again = self.replays.all_stages(order), self.replays.all_stages(order)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            return NOT_REPLAYED.format(why=f"a replay raised {type(error).__name__}: {error}")
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
        raise self._error(self._explain(stage, quantity, first.stages[stage]))

    def _error(self, text: str) -> VerificationError:
        error = VerificationError(text)
        error.add_note(HOW_TO_ACCEPT)
        return error

    def _recomputed_changes(self) -> str:
        """Returns a finding if a recomputation changes Python state that its forward pass has changed."""
        again = [stage for stage in self.record.stages if self.run.routes[stage].micro_batches[Kind.RECOMPUTE]]
        buffers = {id(buffer) for stage in again for buffer in buffers_of(self._stage(stage))}
        if not again or not self.ended.changed_since(self.evidence.began, except_for=buffers, by_value=True):
            return ""
        self.replays.restore()
        places = dict[str, None]()
        with self.replays.new_run() as replay:
            for stage in again:
                forward, *_ = self.replays.reference_order([stage])
                saved = Buffers(self._stage(stage).submodules)
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
                    # Exclude changes by other threads: they differ from one run of this forward pass to the next.
                    self.replays.restore()
                    self.replays.perform(replay, [forward])
                    unsteady = set(self.replays.state().changed_since(once, except_for=buffers, by_value=True))
                    changes = [p for p in changes if not (p in unsteady and p.startswith(GLOBAL_GENERATOR))]
                places.update(dict.fromkeys(changes))
        # A recomputation does not call the loss. Random numbers that layers draw with torch have keys.
        places = {place: None for place in places if not place.startswith((LOSS, f"{GLOBAL_GENERATOR} of torch"))}
        return RECOMPUTED_CHANGES.format(places=in_words(places)) if places else ""

    def _raise_if_leaves_are_shared(self) -> None:
        """Raises an error if backward passes of different stages accumulate gradients in the same tensor."""
        users: dict[int, list[int]] = {}
        for stage, record in self.record.stages.items():
            for key in record.weights.leaves if record.weights is not None else ():
                users.setdefault(key, []).append(stage)
        for key, stages in users.items():
            if len(stages) > 1:
                weights = self.record.stages[stages[0]].weights
                assert weights is not None
                name, _ = _name_of(self.run, weights.leaves[key])
                users_only = [stage for stage in stages if key not in parameters_of(self.run, self._stage(stage))]
                user = self._stage((users_only or stages)[-1])
                raise self._error(USES_FOREIGN_WEIGHTS.format(stage=user, name=name))

    def _raise_if_other_processes_have_buffers(self) -> None:
        """Raises an error if the step changes a buffer of a module that a stage of a different process uses too."""
        local = self.run.stages.local
        elsewhere = {module for stage in self.run.stages.all if stage not in local for module in stage.modules}
        for stage in local:
            shared = [module for module in stage.modules if module in elsewhere]
            holders = {id(holder) for module in shared for holder in (module._buffers, *module._buffers.values())}
            ended, began = self.ended.states[stage.index], self.evidence.began.states[stage.index]
            changes = ended.changed_since(began) if shared else []
            others = ended.changed_since(began, except_for=holders) if changes else []
            if places := [place for place in changes if place not in others]:
                raise self._error(IN_OTHER_PROCESSES.format(stage=stage, places=in_words(places)))

    def _raise_if_written(self, replay: StepRecord) -> None:
        """Raises an error if a stage writes tensors that other stages hold."""
        for index, record in replay.stages.items():
            for quantity in record.written:
                stage = self._stage(index)
                if quantity.text != INPUT:
                    raise self._error(WRITES_RETURNED.format(stage=stage, quantity=quantity))
                layer = self._writer(index) or "one of its layers"
                raise self._error(WRITES_INPUT.format(stage=stage, layer=layer, micro_batch=quantity.micro_batch))

    def _raise_if_sums_are_reordered(self, replayed: Iterable[tuple[int, StageRecord]]) -> None:
        """Raises an error if a forward adds gradients in a different order than the reference loop.

        The sums of this step can be equal by chance, and the sums of later steps different.
        """
        for index, record in replayed:
            order = self.replays.reference_order([index]) if record.calls_backward else []
            if order != [task for task in self.record.order if task in order]:
                text = CALLS_BACKWARD.format(stage=self._stage(index), quantity="the order of gradients in a sum")
                raise self._error(text)

    def _writer(self, stage: int) -> str | None:
        """Returns the layer that writes the input of its stage, or None if no single layer writes it."""
        self.replays.restore()
        with self.replays.new_run() as replay:
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
        """Describes state that a backward pass of a stage writes and a later forward pass reads, if any."""
        if self._differences(self.replays.all_stages(self.record.order)):
            return ""
        self.replays.restore()
        with self.replays.new_run() as replay:
            forward, backward, *_ = self.replays.reference_order([stage])
            self.replays.perform(replay, [forward])
            before = self.replays.state()
            self.replays.perform(replay, [backward])
            return in_words(self.replays.state().changed_since(before))

    def _explain(self, index: int, quantity: Quantity, replay: StageRecord) -> str:
        """Returns the message for a difference, with its likely cause and a fix."""
        stage = self._stage(index)
        if replay.calls_backward:
            return CALLS_BACKWARD.format(stage=stage, quantity=quantity)
        if self.written:
            names = ", ".join([*self.written][:MOST_PLACES])
            return WRITES_WEIGHTS.format(stage=stage, quantity=quantity, names=names)
        places = in_words(self.ended.changed_since(self.evidence.began))
        template = CHANGES_STATE if places else UNKNOWN
        return template.format(stage=stage, quantity=quantity, places=places)


def in_words(places: Collection[str]) -> str:
    """Lists at most `MOST_PLACES` places."""
    shown = "; ".join([*places][:MOST_PLACES])
    return f"{shown}; and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else shown


def _name_of(run: Run, leaf: Tensor) -> tuple[str, str | None]:
    """Returns the name of a parameter in the pipe, and a description of its layer."""
    for stage in run.stages.local:
        for layer in stage.layers:
            for name, parameter in layer.module.named_parameters():
                if parameter is leaf:
                    return layer.full_name(name), str(layer)
    return f"a tensor of shape {tuple(leaf.shape)}", None
