"""Sends and receives messages for one process of a pipe, and detects failures of the other processes.

Room:
    Only a few messages can be in flight to a process that does not receive messages. While a process waits for a
    message or for room, it therefore receives all messages that are due at its current action. Deadlocks are
    impossible: in the total order of transfers, each SEND is followed by its RECEIVE, so the first unfinished
        transfer
    can always proceed. Messages that are not due yet stay in the connection, so memory does not grow with the number
    of micro-batches.

Runs:
    All processes number their runs (steps, calls and backward passes) in the same way, and each message has the
    number of its run. The next run drops the messages of a failed run.

End of a run:
    Each process sends a value to rank 0, and rank 0 sends all values to each process. A process that has received the
    values may end immediately. Other processes may still wait for the values, and do not treat this end as a failure.
"""

import logging
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from gpipe.distributed.codec import CorruptMessage, Encoded, PeerClosed, corrupt_message_error, encode, payload_of
from gpipe.distributed.connection import Connection
from gpipe.distributed.failures import LONG_WAIT_SECONDS, FailureDetector, Report, Status, StatusMemory, StatusQuery
from gpipe.distributed.nccl import NcclGroups, PendingMessage
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Control, Label, Message, ReadyEvent
from gpipe.stages.traffic import Crossed
from gpipe.stages.tree import Tree

LONGEST_POLL = 2**31 - 1  # ms
ANSWER_SECONDS = 1.0  # for processes on other hosts to answer a status query

logger = logging.getLogger("gpipe")

T = TypeVar("T")


class WaitCondition(NamedTuple):
    """The condition under which an exchange can continue.

    Attributes:
        peer: The peer that the exchange waits for.
        reading: Whether the exchange waits for a message, and the peer's stream was empty.
        room: The number of bytes to send, if the exchange waits for room.
    """

    peer: int
    reading: bool = False
    room: int | None = None


Exchange: TypeAlias = Generator[WaitCondition, None, T]
"""A coroutine that sends and receives messages. It yields a condition whenever it cannot continue."""


class Encodings(dict[bool, tuple[Encoded, list[Tensor]]]):
    """The encodings of one message, each with the tensors to send by NCCL.

    The key is True for receivers with an NCCL group, and False for receivers without an NCCL group.
    """


class Poll:
    """Waits for data on all control channels and on the streams of watched peers."""

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self._connections = connections
        self._poll = select.poll()
        self._watched = dict.fromkeys(connections, 0)
        self._streams = {connection.fileno() for connection in connections.values()}
        for connection in connections.values():
            self._poll.register(connection.control.socket, select.POLLIN)
            self._poll.register(connection, 0)

    def watch(self, events_of: Mapping[int, int]) -> None:
        """Watches the streams of exactly these peers, each for its events."""
        for peer, events in self._watched.items():
            if events != events_of.get(peer, 0):
                self._watched[peer] = events_of.get(peer, 0)
                self._poll.modify(self._connections[peer], self._watched[peer])

    def ignore(self, peer: int) -> None:
        """Stops watching the control channel of a peer that has closed it."""
        with suppress(KeyError):  # it is ignored already
            self._poll.unregister(self._connections[peer].control.socket)

    def sleep(self, seconds: float) -> bool | None:
        """Waits for data. Returns whether a control channel has data, or None if no data arrived within `seconds`."""
        ready = self._poll.poll(min(max(seconds, 0.0) * 1000, LONGEST_POLL))
        return not self._streams.issuperset(handle for handle, _ in ready) if ready else None


class Endpoint:
    """The connections of one process to all other processes of its pipe.

    Methods that wait raise a RemoteError when another process fails or ends.

    Attributes:
        rank: The rank of this process within the pipe.
        connections: The connection to each peer, ordered by rank.
        due: For each message, the index of the action of this rank that receives it.
        at: The index of the current action of this rank.
        waited: The total waiting time in seconds.
        crossings: The messages sent and received in this run, or None if messages are not recorded.
        status: The status that other processes can read.
        detector: Detects failures of other processes.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, Connection],
        limit: float,
        status: Status,
        shared: Mapping[int, StatusMemory],
        groups: NcclGroups | None = None,
        query: StatusQuery | None = None,
    ) -> None:
        self.rank = rank
        self.connections = dict(connections)
        self.due: Mapping[Label, int] = {}
        self.at = 0
        self.waited = 0.0
        self.crossings: list[Crossed] | None = None
        self.status = status
        self._groups, self._query = groups, query or StatusQuery({}, status)
        self._run_is_ending = False
        self._failed_run = 0
        self._warns_at = math.inf
        self._early: dict[tuple[int, Label], tuple[Message | PendingMessage, ReadyEvent]] = {}
        self._async = deque[Exchange[None]]()
        self._sources: Collection[int] = ()
        self._poll = Poll(self.connections)
        self.detector = FailureDetector(self.connections, shared, limit, self._query)
        _endpoints.add(self)

    @contextmanager
    def in_run(self, *, records: bool) -> Iterator["Endpoint"]:
        """Surrounds a run of all processes. An exception in the context is reported to all processes.

        Args:
            records: Whether to record the messages of the run in `crossings`.
        """
        try:
            self.begin()
            self.crossings = [] if records else None
            yield self
        except BaseException as error:
            self.fail(error)
            raise

    def begin(self) -> None:
        """Begins the next run. Raises failures that were reported since the last run."""
        self.detector.run += 1
        self._run_is_ending = False
        self._early.clear()
        self._async.clear()
        self.expect({}, (), FailureDetector.describe_idle)
        self._check(self.connections)

    def expect(
        self, due: Mapping[Label, int], sources: Collection[int], describe: Callable[[int, Status], str]
    ) -> None:
        """Begins the actions of this rank.

        Args:
            due: For each message, the index of the action that receives it.
            sources: The peers that send these messages.
            describe: A function that returns a description of the current action of a peer, for error messages.
        """
        self.due, self._sources, self.detector.describe = due, sources, describe
        self.reach(0)

    def reach(self, at: int) -> None:
        """Records that this rank begins the action with this index, and advances asynchronous exchanges."""
        self.at = at
        self.status.reach(self.detector.run, at)
        self._advance_async()

    def start_async(self, exchange: Exchange[None]) -> None:
        """Starts an exchange that advances whenever this process waits or begins an action.

        Until the exchange is done, this process must not exchange other messages with the same peers.
        """
        self._async.append(exchange)
        self._advance_async()

    def wait_async(self, exchange: Exchange[None]) -> None:
        """Waits until an asynchronous exchange and all exchanges that were started earlier are done."""
        self._warns_at = time.monotonic() + LONG_WAIT_SECONDS
        while (condition := self._advance_async()) and exchange in self._async:
            self._wait(condition)

    @torch.no_grad()
    def _advance_async(self) -> WaitCondition | None:
        """Advances the asynchronous exchanges. Returns the condition of the first unfinished exchange, or None."""
        while self._async:
            try:
                return next(self._async[0])
            except StopIteration:
                self._async.popleft()
        return None

    def _complete(self, exchange: Exchange[T]) -> T:
        self._warns_at = time.monotonic() + LONG_WAIT_SECONDS
        try:
            while True:
                self._wait(next(exchange), self._advance_async())
        except StopIteration as ended:
            result: T = ended.value
            return result

    def send(self, peer: int, label: Label, message: Message) -> None:
        """Sends a message. Waits until the connection has room for the message."""
        self._complete(self.sending(peer, label, message))

    def sending(
        self, peer: int, label: Label, message: Message, encodings: Encodings | None = None
    ) -> Exchange[None]:
        """Sends a message like `send`, as an exchange that a caller can advance.

        Args:
            peer: The receiver.
            label: The label of the message.
            message: The message.
            encodings: A cache of encodings. Pass the same cache if the same message goes to several peers.
        """
        called, connection, groups = time.perf_counter(), self.connections[peer], self._groups
        encoded, following = self._encode(peer, message, Encodings() if encodings is None else encodings)
        try:
            while not connection.has_room(encoded.size):
                connection.want_room()
                yield WaitCondition(peer, room=encoded.size)
            with groups.all_or_nothing() if groups and following else nullcontext():
                begun = time.perf_counter()
                is_sent = connection.put(self.detector.run, label, encoded, begun)
                if groups and following:
                    groups.follow(peer, following)
            while not is_sent:
                yield WaitCondition(peer, room=0)
                is_sent = connection.flush()
        except PeerClosed as closed:
            self.detector.raise_lost(peer, closed)
        if self.crossings is not None:
            ended = time.perf_counter()
            self.crossings.append(Crossed(True, peer, label, payload_of(message), called, begun, ended))

    def _encode(self, peer: int, message: Message, encodings: Encodings) -> tuple[Encoded, list[Tensor]]:
        """Returns an encoded message for a peer, and the tensors to send by NCCL."""
        has_group = self._groups is not None and self._groups.has_group(peer)
        if has_group not in encodings:
            packed, following = (message, []) if self._groups is None else self._groups.pack(peer, message)
            encodings[has_group] = encode(packed), following
        return encodings[has_group]

    def send_value(self, peer: int, label: Label, value: Tree) -> None:
        """Sends a value without gradients."""
        self.send(peer, label, BoundaryValue(value, []))

    def receive(self, peer: int, label: Label) -> tuple[Message, ReadyEvent]:
        """Waits for a message, and returns it with the time at which the peer sent it."""
        return self._complete(self.receiving(peer, label))

    def receiving(self, peer: int, label: Label) -> Exchange[tuple[Message, ReadyEvent]]:
        """Receives a message like `receive`, as an exchange that a caller can advance."""
        called = time.perf_counter()
        try:
            while (peer, label) not in self._early:
                if not (taken := self._take(peer, label)):
                    yield WaitCondition(peer, reading=taken is None)
            message, sent = self._early.pop((peer, label))
            if isinstance(message, PendingMessage):
                message = message.finish()
        except PeerClosed as closed:
            self.detector.raise_lost(peer, closed)
        if self.crossings is not None:
            ended = time.perf_counter()
            self.crossings.append(Crossed(False, peer, label, payload_of(message), called, called, ended))
        return message, sent

    def receive_value(self, peer: int, label: Label) -> Any:
        """Waits for a value without gradients, and returns it."""
        return self._complete(self.receiving_value(peer, label))

    def receiving_value(self, peer: int, label: Label) -> Exchange[Any]:
        """Receives a value like `receive_value`, as an exchange that a caller can advance."""
        message, _ = yield from self.receiving(peer, label)
        if not isinstance(message, BoundaryValue):
            raise corrupt_message_error(peer, "gradients instead of a value")
        return message.value

    def broadcast(self, source: int, peers: Iterable[int], label: Label, value: Tree = None) -> Any:
        """Sends the value of rank `source` to all peers, and returns the value on all of these ranks.

        All of these ranks must call this method.
        """
        if self.rank != source:
            return self.receive_value(source, label)
        message, encodings = BoundaryValue(value, []), Encodings()
        for peer in peers:
            if peer != source:
                self._complete(self.sending(peer, label, message, encodings))
        return value

    def all_to_all(self, label: Label, values: Mapping[int, Tree]) -> list[Any]:
        """Sends a value to each of several ranks, and returns the values from these ranks in the same order.

        All of these ranks must call this method.
        """
        return self._complete(self.exchanging(label, values))

    def exchanging(self, label: Label, values: Mapping[int, Tree]) -> Exchange[list[Any]]:
        """Exchanges values like `all_to_all`, as an exchange that a caller can advance."""
        for peer, value in values.items():
            if peer != self.rank:
                yield from self.sending(peer, label, BoundaryValue(value, []))
        received = dict(values)
        for peer in values:
            if peer != self.rank:
                received[peer] = yield from self.receiving_value(peer, label)
        return list(received.values())

    def _take(self, peer: int, wanted: Label | None = None) -> bool | None:
        """Receives the next message of a peer if the message is wanted or due. Drops messages of a failed run.

        Returns whether a message was received or dropped, or None if no message is available.
        """
        connection, groups = self.connections[peer], self._groups
        try:
            head = connection.head()  # also for messages to drop: they may bring new slots
            if head is None:
                return None
            is_stale = head.run < self.detector.run
            if head.run > self.detector.run:  # the peer failed in this run; its report arrives soon
                return False
            if not is_stale and head.label != wanted and self.due.get(head.label, -1) > self.at:
                return False
            if groups is not None:  # NCCL delivers the tensors of dropped messages too
                with groups.all_or_nothing():
                    message: Message | PendingMessage = groups.expect(peer, connection.message(head))
                    connection.done(head)
            else:
                message = [] if is_stale else connection.message(head)
                connection.done(head)
        except CorruptMessage as error:
            raise corrupt_message_error(peer, error) from error
        if not is_stale:
            self._early[peer, head.label] = (message, head.sent or None)
        return True

    def _wait(self, condition: WaitCondition, async_condition: WaitCondition | None = None) -> None:
        """Waits until a condition may be true, and receives due messages (see Room in the module docstring).

        Args:
            condition: The condition of the current exchange.
            async_condition: The condition of the first asynchronous exchange, or None.
        """
        peer, reading, room = condition
        writing = room is not None
        watched = {peer: self.connections[peer].events(reading=reading, writing=False)}
        for source in {*self._sources, peer} if writing else self._sources:
            if source != peer or writing:
                try:
                    while taken := self._take(source):
                        pass
                except PeerClosed:
                    self.detector.raise_lost(source)
                writes = writing and source == peer
                watched[source] = self.connections[source].events(reading=taken is None, writing=writes)
        for each in (condition, async_condition) if async_condition else (condition,):
            if each.room is not None and self.connections[each.peer].has_room(each.room):
                return  # room became free since the check, and would not be reported again
        if async_condition:
            other, reads, async_room = async_condition
            events = self.connections[other].events(reading=reads, writing=async_room is not None)
            watched[other] = watched.get(other, 0) | events
        self._poll.watch(watched)
        started = time.perf_counter()
        self.status.waits = True
        is_control = self._sleep(peer)
        if is_control is None:
            self.detector.raise_timeout(peer)  # `waits` stays True, for ranks that time out at the same time
        self.status.waits = False
        self.waited += time.perf_counter() - started
        if is_control:
            self._check(([peer] if writing else []) if self._run_is_ending else self.connections)

    def _sleep(self, peer: int) -> bool | None:
        """Waits like `Poll.sleep`, up to the timeout of the process group. Logs one warning about a long wait.

        Shortly before the warning and before the timeout, this process queries the status of processes on other
        hosts.
        """
        until, has_asked = time.monotonic() + self.detector.limit, False
        while True:
            reports_at = min(until, self._warns_at)
            is_control = self._poll.sleep(reports_at - (0.0 if has_asked else ANSWER_SECONDS) - time.monotonic())
            now = time.monotonic()
            if is_control is not None or (has_asked and now >= until):
                return is_control
            if not has_asked:
                self._query.ask()
                has_asked = True
            elif now >= self._warns_at:
                self._warns_at, has_asked = math.inf, False
                where = "\n".join(self.detector.all_last_seen(self.detector.stuck(peer)))
                seconds = LONG_WAIT_SECONDS
                logger.warning(f"rank {self.rank} has waited {seconds:g} s for rank {peer}.\n{where}\n[long-wait]")

    def _check(self, needed: Collection[int]) -> None:
        for peer in self.detector.check(needed):
            self._poll.ignore(peer)

    def fail(self, error: BaseException) -> None:
        """Reports an exception of this process to the other processes. Aborts NCCL groups if a process is lost."""
        report = Report.of(error, self.detector.run, self.rank)
        self._failed_run = self.detector.run
        self._send_report(report)
        is_gone = any(connection.control.gone for connection in self.connections.values())
        if self._groups is not None and (is_gone or not report.type_name):
            self._groups.end()

    def fail_next_run(self, error: Exception) -> None:
        """Reports an exception to all other processes, for the next run, in which this process will not take part."""
        run = self.detector.run
        where = "" if self._failed_run == run else f"outside any step, after {run} run{'s' * (run != 1)}"
        self._send_report(Report.of(error, run + 1, self.rank, where))

    def _send_report(self, report: Report) -> None:
        for connection in self.connections.values():
            connection.control.send(report.write())

    def finish_run(self, value: Tree) -> list[Any]:
        """Waits until all processes have reached the end of a run. Returns the value of each process, by rank."""
        label = Label(Control.AGREEMENT, 0, gradient=False)
        values: list[Any] = []
        if self.rank:
            self.send_value(0, label, value)
        else:
            values = [value, *(self.receive_value(peer, label) for peer in self.connections)]
        self._run_is_ending, self._sources = True, ()  # a process that ends from here on has not failed
        values = list(self.broadcast(0, self.connections, label, values))
        for peer, connection in () if self.rank else self.connections.items():
            with suppress(PeerClosed):  # it has received the values
                while not connection.flush():  # unsent bytes would be lost if this process ended now
                    self._wait(WaitCondition(peer, reading=True))
        if self._groups is not None:
            self._groups.settle()
        return values

    def close(self, reason: str = "") -> None:
        """Closes all connections, and sends the reason to the other processes.

        A process that still needs this process reports the reason in an error.
        """
        if reason:
            self._send_report(Report(0, self.rank, "", reason))
        for connection in self.connections.values():
            connection.close()
        self._query.close()

    def end_with(self, owner: object) -> "finalize[..., Any]":
        """Ends the connections when the owner is garbage-collected, unless the result is detached before.

        The result must not refer to this endpoint, which may refer to the owner.
        """
        end = finalize(owner, _abandon, self.connections, self.status, self.rank)
        end.atexit = False  # The other processes notice the end of this process.
        return end

    def drop(self) -> None:
        """Closes the descriptors of this process only: see `Connection.drop`."""
        for connection in self.connections.values():
            connection.drop()
        self._query.drop()


def count_runs(runs: int) -> str:
    """Returns the number of runs as text.

    >>> count_runs(3)
    '3 runs (steps, calls, saves, checks)'
    """
    return f"{runs} run{'s' * (runs != 1)} (steps, calls, saves, checks)"


def _abandon(connections: Mapping[int, Connection], status: Status, rank: int) -> None:
    """Ends connections. The garbage collector may call it in any thread, so it neither waits nor uses locks."""
    runs = count_runs(status.run)
    text = f"rank {rank} dropped its pipe without closing it, after {runs}. Use `with gpipe.GPipe(...) as pipe:`."
    for connection in connections.values():
        connection.control.send(Report(0, rank, "", text).write())
        connection.abandon()


_endpoints: "WeakSet[Endpoint]" = WeakSet()


def _drop_all() -> None:
    """Drops the connections in a forked process, such as a DataLoader worker.

    Otherwise other processes could not detect the end of the parent process while the forked process runs.
    """
    for endpoint in _endpoints:
        endpoint.drop()


os.register_at_fork(after_in_child=_drop_all)
