"""Messages within one process: a queue for each rank, tensors handed over by reference."""

from queue import SimpleQueue

from gpipe.values.messages import Cancelled, Label, Message, ReadyEvent


class Mailbox:
    """One run's messages; made anew for every run, so that nothing outlives a failed one."""

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
