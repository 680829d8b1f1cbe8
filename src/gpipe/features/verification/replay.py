"""Replays the recorded micro-batches of a step, in the order of the reference loop or in a different order.

A replay does not recompute or offload activations, communicate with other processes, or commit statistics.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

from gpipe._torch.modes import as_rank, is_compiled
from gpipe.features.verification.evidence import StagesState
from gpipe.features.verification.step_record import GradientCalls, StageRecord, StepRecord, copy_gradients
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.context import Context
from gpipe.runtime.executor import begin_ranks
from gpipe.runtime.run import Rank, Run, call_loss_fn
from gpipe.schedule.action import Kind
from gpipe.stages.boundary import copy_boundary
from gpipe.stages.memory_layout import copy_of
from gpipe.stages.messages import Cancelled, Label, Message, ReadyEvent
from gpipe.stages.rng import RankScope
from gpipe.stages.tree import replace_tensors

_ANY_THREAD = nullcontext()


class Playback(Context):
    """The context of a replay: stages receive recorded messages, and the messages that they send are dropped."""

    def __init__(self, context: Context) -> None:
        super().__init__(0)
        self.replica, self.replicas = context.replica, context.replicas
        self.runs_every_backward = context.runs_every_backward
        self.repeat = context.repeat  # type: ignore[method-assign]
        self.name = context.name  # type: ignore[method-assign]

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Drops the message. The record of the replay has a digest of the message."""


def record_of(replay: Run) -> StepRecord:
    """Returns the record of a replay."""
    record = replay.feature(StepRecord)
    assert record is not None
    return record


def wait_for_ranks(run: Run) -> None:
    """Makes the streams of the calling thread wait for the streams of the ranks."""
    for rank in run.ranks:
        rank.stream.end()


@dataclass
class Replays:
    """Replays a recorded step. Each replay starts from the state before the step."""

    run: Run
    record: StepRecord
    began: StagesState

    @contextmanager
    def new_run(self) -> Iterator[Run]:
        """Yields a run for a replay, which has only the features that change the results of layers."""
        run, record = self.run, self.record
        replay = copy.copy(run)
        replay.context, replay.findings, replay.call_loss = Playback(run.context), [], call_loss_fn
        replay.losses, replay.metrics, replay.outputs, replay.input_gradients = {}, {}, {}, {}
        if not record.calls_loss:
            replay.loss_fn = None
        features = [type(feature)() for feature in run.features if feature.alters_layers]
        stages, micro_batches = run.stages.local, len(run.micro_batch_sizes)
        replay_record = StepRecord(stages, micro_batches, run.slices, calls_loss=record.calls_loss, replays=record)
        begin_ranks(replay, [*features, replay_record])
        with replay.hooks.around_pass(replay, run.compiled.whole):
            yield replay

    def restore(self) -> None:
        """Restores the state before the step. The streams of ranks wait until the state is restored."""
        wait_for_ranks(self.run)
        self.began.restore()
        self._queue_ranks_behind()

    def _queue_ranks_behind(self) -> None:
        for rank in self.run.ranks:
            rank.stream.begin([*rank.stream.caller_events])

    def state(self) -> StagesState:
        """Copies the current state."""
        wait_for_ranks(self.run)
        state = StagesState.of(self.run, calls_loss=self.record.calls_loss)
        self._queue_ranks_behind()
        return state

    def reference_order(self, stages: Sequence[int]) -> list[CompiledAction]:
        """Returns the recorded actions of some stages in the order of the reference loop."""
        slices, order = self.run.slices, list[CompiledAction]()
        for first in range(0, self.record.count, slices):
            numbers = range(first, first + slices)
            forwards = [(Kind.FORWARD, m, stage) for m in numbers for stage in stages]
            backwards = [(Kind.BACKWARD, m, stage) for m in reversed(numbers) for stage in reversed(stages)]
            order += [self.record.stages[stage].actions[kind, m] for kind, m, stage in (*forwards, *backwards)]
        return order

    def stages_alone(self, *, in_threads: bool) -> StepRecord:
        """Replays each stage separately, from the state before the step.

        Args:
            in_threads: Whether each rank runs in its own thread, at the same time as the other ranks.
        """
        with self.new_run() as replay:
            if in_threads:
                self.restore()
                jobs = [partial(copy_context().run, self._replay_rank, replay, rank) for rank in replay.ranks]
                self.run.stages.threads.run(jobs, partial(setattr, replay.context, "cancelled", True))
            else:
                for rank in replay.ranks:
                    for stage in rank.stages:
                        self.restore()
                        self.perform(replay, self.reference_order([stage]))
            wait_for_ranks(self.run)
            return record_of(replay)

    def _replay_rank(self, replay: Run, rank: Rank) -> None:
        for stage in rank.stages:
            self.perform(replay, self.reference_order([stage]), as_rank())

    def all_stages(self, order: Sequence[CompiledAction]) -> StepRecord:
        """Replays all stages of this process in one thread, in the given order."""
        self.restore()
        with self.new_run() as replay:
            self.perform(replay, order)
            wait_for_ranks(self.run)
            return record_of(replay)

    def perform(
        self, replay: Run, order: Sequence[CompiledAction], thread: AbstractContextManager[object] = _ANY_THREAD
    ) -> None:
        """Performs recorded actions in the given order, in this thread."""
        stages = {action.stage for action in order}
        for rank in replay.ranks:
            with rank.stream.enter():
                for stage in stages & rank.stages.keys():
                    self.record.stages[stage].put_gradients_before()
        for stage in stages:
            self.run.stages.all[stage].restart()
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
                rank.stream.limit_queue()
        for stage in stages:
            self.record.stages[stage].drop_gradients()


def _perform_again(replay: Run, rank: Rank, action: CompiledAction, record: StageRecord) -> None:
    m = action.micro_batch
    replay.context.repeat(action.action)
    if action.action.kind is Kind.FORWARD:
        crossings = [*map(copy_boundary, record.inputs[m])]
        rank.inbox = [*crossings]
        if not action.stage:
            replay.inputs = {m: crossings[0]}  # type: ignore[assignment]
        if m in record.targets:
            replay.targets = {m: replace_tensors(record.targets[m], copy_of)}  # type: ignore[assignment]
    else:
        received = [copy_gradients(gradients) for gradients in record.gradients[m]]
        rank.inbox = [*received] if action.receives else []
        if not action.receives and received:
            replay.output_gradients = {m: received[0]}  # type: ignore[assignment]
        action = action._replace(action=action.action._replace(kind=Kind.BACKWARD))
    sends = tuple(transfer._replace(peer=rank.rank) for transfer in action.sends)
    stage = replay.stages.all[action.stage]
    watched = action.action.kind is Kind.FORWARD and not any(map(is_compiled, stage.modules))
    with GradientCalls(record_of(replay).stages[action.stage], stage) if watched else nullcontext():
        replay.work[action.action.kind](replay, rank, action._replace(sends=sends))
