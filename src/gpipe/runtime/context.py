"""Connects the ranks in one mini-batch: sends messages between ranks, and runs collective operations of processes.

`Context` is the implementation for one process, whose ranks pass messages by reference. `ProcessContext` in
`gpipe.distributed` is the implementation for several processes.
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
    """The context of a pipe in one process. Collective operations do nothing, because there is only one process."""

    replica, replicas = 0, 1  # the number of this replica, and the number of replicas
    runs_every_backward = False  # whether other replicas wait for each backward pass, even if its loss has weight 0
    notes_messages = False  # whether to record the messages between processes

    def __init__(self, ranks: int) -> None:
        self._queues = [SimpleQueue[tuple[Label, Message, ReadyEvent] | None]() for _ in range(ranks)]
        # Messages that came early, by receiving rank. Only the thread of that rank reads them.
        self._early = defaultdict[int, dict[Label, tuple[Message, ReadyEvent]]](dict)
        self.cancelled = False  # whether a rank has failed

    # Collective operations of processes, before and after the actions of a mini-batch.

    run_scope: Callable[[], AbstractContextManager[object]] = nullcontext
    """Returns a context for a step, call or backward pass. An error in one process ends it in all processes."""

    def agree(self, run: Run, request: Request) -> None:
        """Checks that all processes make the same request, and sends them the settings of the first stage."""

    def check_same(self, **settings: object) -> None:
        """Raises an error if replicas have different settings."""

    sum_over_replicas: Callable[[float], float] = staticmethod(float)  # sums one number per replica

    def gather_outputs(self, outputs: Sequence[Output], micro_batches: int) -> list[Output]:
        """Sends the outputs of the last stage to every process of the replica, and returns them."""
        return list(outputs)

    def check_inputs(self, shapes: Sequence[Any]) -> None:
        """Checks that the same inputs of a call require gradients in all processes, by comparing their shapes."""

    def share_input_gradients(self, gradients: Gradients, shapes: Sequence[Any]) -> Gradients:
        """Sends the gradients of a call's inputs to every process whose inputs require gradients."""
        return gradients

    def finish(self, run: Run, value: Tree = None, *, trains: bool = False) -> list[Any]:
        """Waits until all processes have finished, completes the features, and gathers a value from each process."""
        run.hooks.complete(run)
        return [value]

    def begin_to_generate(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends the prompts and the random state of the first stage's process to all processes."""
        return settings

    def end_generation(self) -> None:
        """Waits until all processes have finished generating."""

    # Operations of ranks, between the actions of a mini-batch.

    def name(self, rank: int) -> str:
        """Returns the name of a rank for error messages."""
        return f"rank {rank}"

    new_progress: Callable[[], LayerProgress] = staticmethod(LayerProgress)
    """Creates a `LayerProgress`, which records how far a run through a stage has come."""

    def running(self, table: CompiledTable, aliases: WeightAliases) -> AbstractContextManager[object]:
        """Returns a context for the actions of all ranks of this process."""
        return nullcontext()

    def reach(self, at: int) -> None:
        """Records the position of the current action in the row of its rank."""

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Sends a message to a rank without waiting for its receipt."""
        self._queues[rank].put((label, message, mark))

    def receive(self, rank: int, sender: int, label: Label) -> tuple[Message, ReadyEvent]:
        """Waits for the message with this label. Keeps other messages that arrive first."""
        early = self._early[rank]
        if label in early:
            return early.pop(label)
        while (arrived := self._queues[rank].get()) is not None:
            other, message, mark = arrived
            if other == label:
                return message, mark
            early[other] = (message, mark)
        self._queues[rank].put(None)  # The next call must find it, too.
        raise Cancelled

    def cancel(self) -> None:
        """Raises `Cancelled` in every rank that waits for a message, now or later."""
        self.cancelled = True
        for queue in self._queues:
            queue.put(None)

    def keep_exchanges(self, micro_batches: int) -> None:
        """Keeps the messages of other replicas that arrive in the first micro-batches, for a replay."""

    def repeat(self, action: Action) -> None:
        """Prepares to replay an action with the kept messages."""

    def start_exchange(self, action: Action) -> None:
        """Starts a collective action that overlaps with the next actions of its rank."""
        raise AssertionError(action)

    def finish_exchange(self, action: Action) -> None:
        """Performs a collective action, or waits for one that `start_exchange` has started."""
        raise AssertionError(action)

    def of_replicas(self, kind: Control, value: Tree, number: int = 0) -> list[Any]:
        """Gathers the `value` of each replica, in order. Call this once per run for each `kind` and `number`."""
        return [value]
