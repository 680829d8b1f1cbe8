"""What the ranks of this process share with others in one mini-batch: messages, agreement, reductions, progress.

`Context` is for one process, whose ranks hand messages over by reference; `gpipe.distributed` has the other
implementation, for one of several processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from gpipe.runtime.steps import CompiledTable
from gpipe.schedule.action import Action
from gpipe.stages.batchnorm import DeferredStatistics
from gpipe.stages.boundary import Gradients
from gpipe.stages.messages import Cancelled, Label, Message, ReadyEvent
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.stage import LayerProgress
from gpipe.stages.tree import Tree

if TYPE_CHECKING:
    from gpipe.runtime.run import Output, Run


class Request(StrEnum):
    """What the user called."""

    STEP = "step"
    CALL = "the pipe itself"
    BACKWARD = "backward"
    NORMS = "clip_grad_norm_"
    EXCHANGE = "saving or the like"
    GENERATE = "generate"


class Context:
    """One process alone, in one mini-batch."""

    replica, replicas = 0, 1  # the number of this one, and how many there are
    awaits_backwards = False  # whether other replicas wait for each backward of this one, also of what has no say

    def __init__(self, ranks: int) -> None:
        self._queues = [SimpleQueue[tuple[Label, Message, ReadyEvent] | None]() for _ in range(ranks)]
        self._early = defaultdict[int, dict[Label, tuple[Message, ReadyEvent]]](dict)  # by rank, which alone asks
        self.cancelled = False  # whether a rank has failed

    # Between processes, before and after a pass over the micro-batches.

    entered: Callable[[bool], AbstractContextManager[object]] = nullcontext
    """Around a step, a call or a backward: whoever fails inside has all fail. Given: whether to note crossings."""

    def agree(self, run: Run, request: Request) -> None:
        """Has all processes do the same, and know of the mini-batch what that of the first stage knows.

        Raises:
            ValueError: There are layers under `fully_shard`, which the ranks of one process do not gather or free.
        """
        if run.engine.is_sharded:
            raise ValueError(
                'layers under fully_shard are gathered and freed by processes: make the pipe with driver="process" '
                "in each that a launcher starts (one will do: torchrun --nproc-per-node 1), or leave fully_shard out"
            )

    def check_same(self, **settings: object) -> None:
        """Checks that all replicas were given the same."""

    sum_over_replicas: Callable[[float], float] = staticmethod(float)  # adds up a number of each replica

    def gather_outputs(self, outputs: Sequence[Output], micro_batches: int) -> list[Output]:
        """Gives every process of the replica the outputs that the last stage made."""
        return list(outputs)

    def check_inputs(self, shapes: Sequence[Any]) -> None:
        """Checks that the inputs of a call have a graph in all processes alike, or none; by the shapes in each."""

    def share_input_gradients(self, gradients: Gradients, shapes: Sequence[Any]) -> Gradients:
        """Gives the gradients of a call's inputs to every process whose inputs have a graph."""
        return gradients

    def finish(self, run: Run, value: Tree = None, *, trains: bool = False) -> list[Any]:
        """Ends a pass once all processes have come to its end; gathers a value from each."""
        run.settle()
        if run.recorder is not None:
            run.recorder.keep()
        return [value]

    def begin_to_generate(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Has all processes generate from what that of the first stage was given, and draw alike."""
        return settings

    def end_generation(self) -> None:
        """Ends it once all processes have come to its end."""

    # Of ranks, in a pass.

    def name(self, rank: int) -> str:
        """A rank of this process, in messages."""
        return f"rank {rank}"

    new_progress: Callable[[], LayerProgress] = staticmethod(LayerProgress)
    """Makes where a stage notes which layer it is at, for whoever looks."""

    def running(self, table: CompiledTable, aliases: WeightAliases) -> AbstractContextManager[object]:
        """Around the actions of all ranks of this process."""
        return nullcontext()

    def reach(self, at: int) -> None:
        """Notes which of its actions a rank is at."""

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Hands a message to a rank, without waiting for it."""
        self._queues[rank].put((label, message, mark))

    def receive(self, rank: int, sender: int, label: Label) -> tuple[Message, ReadyEvent]:
        """Waits for a message to a rank, and keeps others that come before it."""
        early = self._early[rank]
        if label in early:
            return early.pop(label)
        while (arrived := self._queues[rank].get()) is not None:
            other, message, mark = arrived
            if other == label:
                return message, mark
            early[other] = (message, mark)
        self._queues[rank].put(None)  # for whoever asks next
        raise Cancelled

    def cancel(self) -> None:
        """Wakes every rank that waits, now or later, with `Cancelled`."""
        self.cancelled = True
        for queue in self._queues:
            queue.put(None)

    def record_exchanges(self, micro_batches: int) -> None:
        """Records what replicas exchange within the forwards and backwards of these micro-batches, for a replay."""

    def begin_replay(self, action: Action) -> None:
        """Begins to replay an action: what was exchanged in it is played back from now on."""

    def begin(self, action: Action) -> None:
        """Begins an UNSHARD or REDUCE, which goes on beside what its rank does next."""
        raise AssertionError(action)

    def close(self, action: Action) -> None:
        """Does a TIE or RESHARD, or ends an UNSHARD or REDUCE, which are for several processes."""
        raise AssertionError(action)

    def share(self, deferred: Mapping[int, DeferredStatistics]) -> None:
        """Has statistics, by stage, be those of all replicas."""
