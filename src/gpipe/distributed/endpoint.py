"""One process among those of a pipe: sends and receives messages, and learns when another fails.

Note "Room". Only a few messages can be under way to a process that takes none, so whoever waits, for a message or for
room, meanwhile takes all that its rank's actions have received by now. In the order in which the transfers were
placed each SEND is followed by its RECEIVE; of what is not done, the first in that order can therefore always go on.
And nothing is taken that is not due yet: what waits here does not grow with M.

Note "Runs". All processes count their runs alike, and a message says of which run it is: what a failed run has left
on its way is thrown away by the next.

Note "Parting". A run ends when all have sent rank 0 a value at its end, and rank 0 those of all to all others. Who
has these may leave at once, while others wait for them: for these it is no failure that somebody is gone.
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
from weakref import WeakSet

import torch

from gpipe.distributed.codec import Damaged, Gone, damaged, encode, payload_of
from gpipe.distributed.connection import Connection
from gpipe.distributed.failures import (
    LONG_WAIT_SECONDS,
    FailureDetector,
    Memory,
    Questions,
    Report,
    Status,
    in_no_step,
)
from gpipe.distributed.nccl import Coming, NcclGroups
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Control, Label, Message, ReadyEvent
from gpipe.stages.traffic import Crossed
from gpipe.stages.tree import Tree

LONGEST_POLL = 2**31 - 1  # ms
ANSWER_SECONDS = 1.0  # that processes of other hosts have to say what they are at

logger = logging.getLogger("gpipe")

T = TypeVar("T")


class Awaited(NamedTuple):
    """What an exchange waits for: a peer, a message of it that was not there (`reading`), or room for such bytes."""

    peer: int
    reading: bool = False
    room: int | None = None


Exchange: TypeAlias = Generator[Awaited, None, T]
"""Sends and receives, and says whenever it can do nothing what it waits for."""


class Poll:
    """Sleeps until something comes by any control channel, or by the streams of those that are watched."""

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self._connections = connections
        self._poll = select.poll()
        self._watched = dict.fromkeys(connections, 0)
        self._streams = {connection.fileno() for connection in connections.values()}
        for connection in connections.values():
            self._poll.register(connection.control.socket, select.POLLIN)
            self._poll.register(connection, 0)

    def watch(self, wanted: Mapping[int, int]) -> None:
        for peer, events in self._watched.items():
            if events != wanted.get(peer, 0):
                self._watched[peer] = wanted.get(peer, 0)
                self._poll.modify(self._connections[peer], self._watched[peer])

    def ignore(self, peer: int) -> None:
        with suppress(KeyError):  # it is ignored already
            self._poll.unregister(self._connections[peer].control.socket)

    def sleep(self, seconds: float) -> bool | None:
        """Sleeps until something comes; whether by a control channel; None if nothing came in so many seconds."""
        happened = self._poll.poll(min(max(seconds, 0.0) * 1000, LONGEST_POLL))
        return not self._streams.issuperset(handle for handle, _ in happened) if happened else None


class Endpoint:
    """The connections of one process; what waits raises a RemoteError once another process has failed or is gone."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, Connection],
        limit: float,
        status: Status,
        shared: Mapping[int, Memory],
        groups: NcclGroups | None = None,
        questions: Questions | None = None,
    ) -> None:
        self.rank = rank
        self.connections = dict(connections)  # in the order of their ranks
        self.due: Mapping[Label, int] = {}  # at which of its actions each message is received
        self.at = 0  # how many of them are done
        self.waited = 0.0  # seconds, in all
        self.noted: list[Crossed] | None = None  # what crossed in this run, if anybody wants to know
        self.status = status
        self._groups, self._questions = groups, questions or Questions({}, status)
        self._parting = False
        self._warns_at = math.inf
        self._early: dict[tuple[int, Label], tuple[Message | Coming, ReadyEvent]] = {}
        self._beside = deque[Exchange[None]]()
        self._sources: Collection[int] = ()
        self._poll = Poll(self.connections)
        self.detector = FailureDetector(self.connections, shared, limit, self._questions)
        _endpoints.add(self)

    @contextmanager
    def in_run(self, *, notes: bool) -> Iterator["Endpoint"]:
        """Around what all processes do together: whoever fails inside has all fail. `notes` what crosses."""
        try:
            self.begin()
            self.noted = [] if notes else None
            yield self
        except BaseException as error:
            self.fail(error)
            raise

    def begin(self) -> None:
        self.detector.run += 1
        self._parting = False
        self._early.clear()
        self._beside.clear()
        self.expect({}, (), in_no_step)
        self._check(self.connections)

    def expect(self, due: Mapping[Label, int], sources: Collection[int], sees: Callable[[int, Status], str]) -> None:
        """Begins the actions of a rank, by which messages are due from these sources."""
        self.due, self._sources, self.detector.sees = due, sources, sees
        self.reach(0)

    def reach(self, at: int) -> None:
        """Notes how many actions are done, for this process and for those who watch it."""
        self.at = at
        self.status.reach(self.detector.run, at)
        self._go_on()

    def begin_beside(self, exchange: Exchange[None]) -> None:
        """Begins an exchange that goes on whenever this process waits, or comes to its next action.

        It has a stream of messages to itself: with its peers nothing else is exchanged meanwhile.
        """
        self._beside.append(exchange)
        self._go_on()

    def end_beside(self, exchange: Exchange[None]) -> None:
        """Waits until what was begun beside is done, and what was begun before it."""
        self._warns_at = time.monotonic() + LONG_WAIT_SECONDS
        while (awaited := self._go_on()) and exchange in self._beside:
            self._wait(awaited)

    @torch.no_grad()
    def _go_on(self) -> Awaited | None:
        """Does what can be done of what goes on beside; what that waits for then, None if nothing is left of it."""
        while self._beside:
            try:
                return next(self._beside[0])
            except StopIteration:
                self._beside.popleft()
        return None

    def _do(self, exchange: Exchange[T]) -> T:
        self._warns_at = time.monotonic() + LONG_WAIT_SECONDS
        try:
            while True:
                self._wait(next(exchange), self._go_on())
        except StopIteration as ended:
            found: T = ended.value
            return found

    def send(self, peer: int, label: Label, message: Message) -> None:
        self._do(self.sending(peer, label, message))

    def sending(self, peer: int, label: Label, message: Message) -> Exchange[None]:
        asked, connection, groups = time.perf_counter(), self.connections[peer], self._groups
        packed, following = (message, []) if groups is None else groups.pack(peer, message)
        encoded = encode(packed)
        try:
            while not connection.has_room(encoded.size):
                connection.want_room()
                yield Awaited(peer, room=encoded.size)
            with groups.all_or_nothing() if groups and following else nullcontext():
                begun = time.perf_counter()
                left = connection.put(self.detector.run, label, encoded, begun)
                if groups and following:
                    groups.follow(peer, following)
            while not left:
                yield Awaited(peer, room=0)
                left = connection.flush()
        except Gone as gone:
            self.detector.raise_lost(peer, gone)
        if self.noted is not None:
            self.noted.append(Crossed(True, peer, label, payload_of(message), asked, begun, time.perf_counter()))

    def send_value(self, peer: int, label: Label, value: Tree) -> None:
        """Puts a value on its way that belongs to no graph."""
        self.send(peer, label, BoundaryValue(value, []))

    def receive(self, peer: int, label: Label) -> tuple[Message, ReadyEvent]:
        return self._do(self.receiving(peer, label))

    def receiving(self, peer: int, label: Label) -> Exchange[tuple[Message, ReadyEvent]]:
        asked = time.perf_counter()
        try:
            while (peer, label) not in self._early:
                if not (taken := self._take(peer, label)):
                    yield Awaited(peer, reading=taken is None)
            message, mark = self._early.pop((peer, label))
            if isinstance(message, Coming):
                message = message.finish()
        except Gone as gone:
            self.detector.raise_lost(peer, gone)
        if self.noted is not None:
            self.noted.append(Crossed(False, peer, label, payload_of(message), asked, asked, time.perf_counter()))
        return message, mark

    def receive_value(self, peer: int, label: Label) -> Any:
        return self._do(self.receiving_value(peer, label))

    def receiving_value(self, peer: int, label: Label) -> Exchange[Any]:
        message, _ = yield from self.receiving(peer, label)
        if not isinstance(message, BoundaryValue):
            raise damaged(peer, "gradients in place of a value")
        return message.value

    def spread(self, source: int, peers: Iterable[int], label: Label, value: Tree = None) -> Any:
        """Gives all these processes the value that one of them, the source, has."""
        if self.rank != source:
            return self.receive_value(source, label)
        for peer in peers:
            if peer != source:
                self.send_value(peer, label, value)
        return value

    def swap(self, label: Label, values: Mapping[int, Tree]) -> list[Any]:
        return self._do(self.swapping(label, values))

    def swapping(self, label: Label, values: Mapping[int, Tree]) -> Exchange[list[Any]]:
        """Sends each process a value, and gathers what they send, in their order; this process gets its own."""
        for peer, value in values.items():
            if peer != self.rank:
                yield from self.sending(peer, label, BoundaryValue(value, []))
        found = dict(values)
        for peer in values:
            if peer != self.rank:
                found[peer] = yield from self.receiving_value(peer, label)
        return list(found.values())

    def _take(self, peer: int, wanted: Label | None = None) -> bool | None:
        """Takes the next message of a peer if it is wanted or due by now; whether it did, None if there is none."""
        connection, groups = self.connections[peer], self._groups
        try:
            head = connection.head()  # of those that are thrown away, too: new slots come with them
            if head is None:
                return None
            is_stale = head.run < self.detector.run
            if head.run > self.detector.run:  # the peer has failed, and gone on; its report will come
                return False
            if not is_stale and head.label != wanted and self.due.get(head.label, -1) > self.at:
                return False
            if groups is not None:  # what follows comes also for what is thrown away
                with groups.all_or_nothing():
                    message: Message | Coming = groups.expect(peer, connection.message(head))
                    connection.done(head)
            else:
                message = [] if is_stale else connection.message(head)
                connection.done(head)
        except Damaged as error:
            raise damaged(peer, error) from error
        if not is_stale:
            self._early[peer, head.label] = (message, head.sent or None)
        return True

    def _wait(self, awaited: Awaited, beside: Awaited | None = None) -> None:
        """Waits until something happens that may help; takes what is due meanwhile (note "Room").

        Who waits for a message has looked for it already, and found that peer's stream empty (`reading`) or not to be
        read on; others wait until there is room for so many bytes. What goes on beside waits as well.
        """
        peer, reading, room = awaited
        writing = room is not None
        watched = {peer: self.connections[peer].events(reading=reading, writing=False)}
        for source in {*self._sources, peer} if writing else self._sources:
            if source != peer or writing:
                try:
                    while taken := self._take(source):
                        pass
                except Gone:
                    self.detector.raise_lost(source)
                writes = writing and source == peer
                watched[source] = self.connections[source].events(reading=taken is None, writing=writes)
        for one in (awaited, beside) if beside else (awaited,):
            if one.room is not None and self.connections[one.peer].has_room(one.room):
                return  # came meanwhile, and is not announced again
        if beside:
            events = self.connections[beside.peer].events(reading=beside.reading, writing=beside.room is not None)
            watched[beside.peer] = watched.get(beside.peer, 0) | events
        self._poll.watch(watched)
        started = time.perf_counter()
        self.status.waits = True
        is_control = self._sleep(peer)
        if is_control is None:
            self.detector.raise_timeout(peer)  # still seen to wait, by those who give up at the same time
        self.status.waits = False
        self.waited += time.perf_counter() - started
        if is_control:
            self._check(([peer] if writing else []) if self._parting else self.connections)

    def _sleep(self, peer: int) -> bool | None:
        """Sleeps as `Poll` does, until the time is up; warns once of a wait that takes long.

        Before it says something of others it asks them, a little earlier.
        """
        until, has_asked = time.monotonic() + self.detector.limit, False
        while True:
            speaks_at = min(until, self._warns_at)
            is_control = self._poll.sleep(speaks_at - (0.0 if has_asked else ANSWER_SECONDS) - time.monotonic())
            now = time.monotonic()
            if is_control is not None or (has_asked and now >= until):
                return is_control
            if not has_asked:
                self._questions.ask()
                has_asked = True
            elif now >= self._warns_at:
                self._warns_at, has_asked = math.inf, False
                where = "\n".join(self.detector.all_last_seen(self.detector.stuck(peer)))
                logger.warning("rank %d has waited %g s for rank %d\n%s", self.rank, LONG_WAIT_SECONDS, peer, where)

    def _check(self, needed: Collection[int]) -> None:
        for peer in self.detector.check(needed):
            self._poll.ignore(peer)

    def fail(self, error: BaseException) -> None:
        report = Report.of(error, self.detector.run, self.rank)
        for connection in self.connections.values():
            connection.control.send(report.write())
        is_gone = any(connection.control.gone for connection in self.connections.values())
        if self._groups is not None and (is_gone or not report.type_name):  # somebody is gone
            self._groups.end()

    def exchange(self, value: Tree) -> list[Any]:
        """Sends a value to all processes, and gathers those of all, by rank: nobody has them before all have sent."""
        label = Label(Control.AGREEMENT, 0, gradient=False)
        every: list[Any] = []
        if self.rank:
            self.send_value(0, label, value)
        else:
            every = [value, *(self.receive_value(peer, label) for peer in self.connections)]
        self._parting, self._sources = True, ()  # until the next run others may be gone with good reason
        every = list(self.spread(0, self.connections, label, every))
        for peer, connection in () if self.rank else self.connections.items():
            with suppress(Gone):  # who is gone by now has it
                while not connection.flush():  # what was sent needs this process
                    self._wait(Awaited(peer, reading=True))
        if self._groups is not None:
            self._groups.settle()
        return every

    def close(self, why: str = "") -> None:
        """Ends all connections; the others see this process as gone, or are told why."""
        for connection in self.connections.values():
            if why:
                connection.control.send(Report(0, self.rank, "", why).write())
            connection.close()
        self._questions.close()

    def drop(self) -> None:
        for connection in self.connections.values():
            connection.drop()
        self._questions.drop()


_endpoints: "WeakSet[Endpoint]" = WeakSet()


def _drop_all() -> None:
    """In a forked process, say a DataLoader's, as long as it had connections nobody would see this process end."""
    for endpoint in _endpoints:
        endpoint.drop()


os.register_at_fork(after_in_child=_drop_all)
