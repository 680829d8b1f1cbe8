"""Connects the ranks of this process with each other and with other processes, in one mini-batch.

`Context` is for one process, whose ranks pass messages by reference. `gpipe.distributed` has the implementation for
one of several processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from gpipe.runtime.compiled_table import CompiledTable
from gpipe.schedule.action import Action
from gpipe.stages.boundary import Gradients, Output
from gpipe.stages.messages import Cancelled, Control, Label, Message, ReadyEvent, Request
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.stage import LayerProgress
from gpipe.stages.tree import Tree

if TYPE_CHECKING:
    from gpipe.runtime.run import Run


class Context:
    """A process without others, in one mini-batch."""

    replica, replicas = 0, 1  # the number of this one, and how many there are
    runs_every_backward = False  # whether other replicas wait for each backward of this one, also of weight 0
    notes_messages = False  # whether to note what crosses between processes, and when

    def __init__(self, ranks: int) -> None:
        self._queues = [SimpleQueue[tuple[Label, Message, ReadyEvent] | None]() for _ in range(ranks)]
        self._early = defaultdict[int, dict[Label, tuple[Message, ReadyEvent]]](dict)  # by rank, which alone asks
        self.cancelled = False  # whether a rank has failed

    # Between processes, before and after a pass over the micro-batches.

    run_scope: Callable[[], AbstractContextManager[object]] = nullcontext
    """Around a step, a call or a backward: if it fails in one process, it fails in all."""

    def agree(self, run: Run, request: Request) -> None:
        """Checks that all processes do the same, and sends them the settings of the process of the first stage."""

    def check_same(self, **settings: object) -> None:
        """Checks that all replicas were given the same."""

    sum_over_replicas: Callable[[float], float] = staticmethod(float)  # adds up a number of each replica

    def gather_outputs(self, outputs: Sequence[Output], micro_batches: int) -> list[Output]:
        """Sends the outputs of the last stage to every process of the replica."""
        return list(outputs)

    def check_inputs(self, shapes: Sequence[Any]) -> None:
        """Checks that the inputs of a call have a graph in all processes alike, or none; by the shapes in each."""

    def share_input_gradients(self, gradients: Gradients, shapes: Sequence[Any]) -> Gradients:
        """Sends the gradients of a call's inputs to every process whose inputs have a graph."""
        return gradients

    def finish(self, run: Run, value: Tree = None, *, trains: bool = False) -> list[Any]:
        """Ends a pass after all processes have reached its end; gathers a value from each."""
        run.hooks.complete(run)
        return [value]

    def begin_to_generate(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends the prompts and the random state of the process of the first stage to all processes."""
        return settings

    def end_generation(self) -> None:
        """Ends it after all processes have reached its end."""

    # Of ranks, in a pass.

    def name(self, rank: int) -> str:
        """A rank of this process, in messages."""
        return f"rank {rank}"

    new_progress: Callable[[], LayerProgress] = staticmethod(LayerProgress)
    """Makes the record of the layers that a stage has begun."""

    def running(self, table: CompiledTable, aliases: WeightAliases) -> AbstractContextManager[object]:
        """Around the actions of all ranks of this process."""
        return nullcontext()

    def reach(self, at: int) -> None:
        """Notes which of its actions a rank is at."""

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Sends a message to a rank, without waiting for it."""
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
        self._queues[rank].put(None)  # for the next call
        raise Cancelled

    def cancel(self) -> None:
        """Wakes every rank that waits, now or later, with `Cancelled`."""
        self.cancelled = True
        for queue in self._queues:
            queue.put(None)

    def keep_exchanges(self, micro_batches: int) -> None:
        """Keeps what replicas exchange within the forwards and backwards of these micro-batches, to repeat them."""

    def repeat(self, action: Action) -> None:
        """Begins an action again, with the messages that were kept of it."""

    def begin(self, action: Action) -> None:
        """Begins an exchange that overlaps the next actions of its rank."""
        raise AssertionError(action)

    def close(self, action: Action) -> None:
        """Performs an exchange, or ends one that was begun."""
        raise AssertionError(action)

    def of_replicas(self, kind: Control, value: Tree, number: int = 0) -> list[Any]:
        """Gathers a value from each replica, by replica; once a run for each kind and number."""
        return [value]
