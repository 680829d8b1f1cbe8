"""The seam between a mini-batch and other processes: what a process that is one of several does otherwise."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

from gpipe.runtime.steps import CompiledProgram, CompiledRows
from gpipe.schedule.action import Action
from gpipe.stages.batchnorm import DeferredStatistics
from gpipe.stages.messages import Cancelled, Label, Message, ReadyEvent, Transport
from gpipe.stages.stage import LayerProgress


class Others:
    """What the ranks of this process do together with other processes in one mini-batch: nothing, if it is alone.

    Attributes:
        transport: Carries messages between ranks.
    """

    transport: Transport

    def __init__(self, compiled: CompiledProgram) -> None:
        self.transport = Mailbox(compiled.program.ranks)

    def name(self, rank: int) -> str:
        """A rank of this process, in messages."""
        return f"rank {rank}"

    def new_progress(self) -> LayerProgress:
        """Where a stage notes how far it is, for whoever looks."""
        return LayerProgress()

    def around(self, rows: CompiledRows) -> AbstractContextManager[object]:
        """What is done before and behind the rows."""
        return nullcontext()

    def close(self, action: Action) -> None:
        """Does a TIE or REDUCE, which are for several processes."""
        raise AssertionError(action)

    def share(self, deferred: Mapping[int, DeferredStatistics]) -> None:
        """Has statistics, by stage, be those of all replicas."""


class Mailbox:
    """Messages between the ranks of one process, by reference: made anew for every run, so that none outlives it."""

    def __init__(self, ranks: int) -> None:
        self._queues: list[SimpleQueue[tuple[Label, Message, ReadyEvent] | None]] = [
            SimpleQueue() for _ in range(ranks)
        ]
        self._early: list[dict[Label, tuple[Message, ReadyEvent]]] = [{} for _ in range(ranks)]
        self.cancelled = False

    def reach(self, at: int) -> None:
        """Nothing to note: there is always room."""

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Hands a message to a rank."""
        self._queues[rank].put((label, message, mark))

    def receive(self, rank: int, sender: int, label: Label) -> tuple[Message, ReadyEvent]:
        """Waits for a message; others that come before it are kept."""
        early = self._early[rank]
        if label in early:
            return early.pop(label)
        while (arrived := self._queues[rank].get()) is not None:
            found, message, mark = arrived
            if found == label:
                return message, mark
            early[found] = (message, mark)
        self._queues[rank].put(None)  # for whoever asks next
        raise Cancelled

    def cancel(self) -> None:
        """Wakes every rank that waits, now or later."""
        self.cancelled = True
        for queue in self._queues:
            queue.put(None)
