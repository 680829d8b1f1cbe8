"""One process among those of a pipe: sends and receives messages, and learns when another fails.

Note "Room". Only a few messages can be under way to a process that takes none, so whoever waits, for a message or for
room, meanwhile takes all that its row has received by now. In the order in which the transfers were placed each SEND
is followed by its RECEIVE; of what is not done, the first in that order can therefore always go on. And nothing is
taken that the row does not have yet: what waits here does not grow with M.

Note "Runs". All processes count their runs alike, and a message says of which run it is: what a failed run has left
on its way is thrown away by the next.

Note "Parting". A run ends when all have told rank 0 that they have come to its end, and rank 0 all others. Who knows
that may leave at once, while others do not know it yet: for these it is no failure that somebody is gone.
"""

import logging
import math
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from gpipe.comm.codec import Encoded, decode, encode
from gpipe.comm.failures import LONG, SILENCE, SOON, error_of, last_seen, report_of
from gpipe.comm.frames import Frame, Gone
from gpipe.comm.local import Link
from gpipe.comm.nccl import Coming, NcclGroups
from gpipe.comm.status import Seen, Status
from gpipe.comm.untrusted import Damaged
from gpipe.errors import heard
from gpipe.values.boundary import BoundaryValue
from gpipe.values.messages import Control, Label, Message, ReadyEvent
from gpipe.values.tree import Tree

logger = logging.getLogger("gpipe")

HANGS_UP = getattr(select, "POLLRDHUP", select.POLLHUP)

_NOTHING = nullcontext()


class Net:
    """The links of one process.

    Attributes:
        rank: Its number among them.
        size: How many processes there are.
        run: The number of the current run.
        at: How far its row is.
        due: Where in this rank's row each message is received.
        sees: Says in words what a peer was last seen at.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Link],
        limit: float,
        wires: NcclGroups | None = None,
        shown: Callable[[], object] = object,
    ) -> None:
        """Also shows the others of this host what this process is at; `shown` is called once it can be seen."""
        self.rank = rank
        self.size = len(links) + 1
        self.links = dict(links)
        self.limit = limit
        self._wires = wires
        self.run = 0
        self.due: Mapping[Label, int] = {}
        self.sees: Callable[[int, Seen], str] = _in_no_step
        self.waited = 0.0  # seconds, in all
        self.status = Status()
        self.at = 0
        self._parting = False
        self._tells_at = math.inf
        self._early: dict[tuple[int, Label], tuple[Message | Coming, ReadyEvent]] = {}
        self._sources: Collection[int] = ()
        self._poll = select.poll()
        for link in self.links.values():
            self._poll.register(link.news.connection, select.POLLIN)
            self._poll.register(link, 0)
        self._watched = dict.fromkeys(self.links, 0)
        self._streams = {link.fileno() for link in self.links.values()}
        self.theirs = self.status.shared_with(self.links, limit, shown)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_drop, weakref.ref(self)))

    def begin(self) -> None:
        """Begins a run.

        Raises:
            RemoteError: Another process failed in it already, or is gone.
        """
        self.run += 1
        self._early.clear()
        self.expect({}, (), _in_no_step)
        self._heed()

    def expect(self, due: Mapping[Label, int], sources: Collection[int], sees: Callable[[int, Seen], str]) -> None:
        """Begins a row, in which messages are due from these sources."""
        self.due, self._sources, self.sees = due, sources, sees
        self.reach(0)

    def reach(self, at: int) -> None:
        """Notes how far the row is, for this process and for those who watch it."""
        self.at = at
        self.status.reach(self.run, at)

    def send(self, peer: int, label: Label, message: Message) -> None:
        """Puts a message on its way to a process; waits for room.

        Raises:
            RemoteError: A process failed, or is gone.
        """
        if self._wires is None:
            self._send(peer, label, encode(message))
        else:
            packed, following = self._wires.pack(peer, message)
            self._send(peer, label, encode(packed), following)

    def _send(self, peer: int, label: Label, message: Encoded, following: Sequence[Tensor] = ()) -> None:
        link = self.links[peer]
        self._tells_at = time.monotonic() + LONG
        try:
            while not link.has_room(message.size):
                link.want_room()
                self._wait(peer, room=message.size)
            with self._wires.all_or_nothing() if following and self._wires else _NOTHING:
                left = link.put(self.run, label, message, time.perf_counter())
                if following and self._wires:
                    self._wires.follow(peer, following)
            while not left:
                self._wait(peer, room=0)
                left = link.flush()
        except Gone as gone:
            self._lost(peer, gone)

    def receive(self, peer: int, label: Label) -> tuple[Message, ReadyEvent]:
        """Waits for a message from a process.

        Raises:
            RemoteError: A process failed, or is gone.
        """
        key = (peer, label)
        self._tells_at = time.monotonic() + LONG
        while key not in self._early:
            try:
                taken = self._take(peer, label)
            except Gone:
                self._lost(peer)
            if not taken:
                self._watch(peer, reading=taken is None)
                self._wait(peer)
        message, mark = self._early.pop(key)
        try:
            return (message.finish() if isinstance(message, Coming) else message), mark
        except Gone as gone:
            self._lost(peer, gone)

    def _take(self, peer: int, wanted: Label | None = None) -> bool | None:
        """Takes the next message of a peer if it is wanted or due by now; whether it did, None if there is none."""
        try:
            return self._take_sound(peer, wanted)
        except Damaged as error:
            raise heard(f"rank {peer} sent what gpipe never sends: {error}", peer) from error

    def _take_sound(self, peer: int, wanted: Label | None) -> bool | None:
        link = self.links[peer]
        head = link.head()  # of those that are thrown away, too: new slots come with them
        if head is None:
            return None
        if head.run > self.run:  # the peer has failed, and gone on; the news will say so
            return False
        if head.run == self.run:
            label = head.label
            if label != wanted and self.due.get(label, -1) > self.at:
                return False
            self._early[peer, label] = (self._open(peer, link, head), head.sent or None)
        elif self._wires is not None:  # what follows comes all the same
            self._open(peer, link, head)
        else:
            link.done(head)
        return True

    def _open(self, peer: int, link: Link, head: Frame) -> Message | Coming:
        if self._wires is None:
            message = decode(*link.message(head), size=head.size)
            link.done(head)
            return message
        with self._wires.all_or_nothing():
            coming = self._wires.expect(peer, decode(*link.message(head), size=head.size))
            link.done(head)
            return coming

    def _wait(self, peer: int, *, room: int | None = None) -> None:
        """Waits until something happens that may help; takes what is due meanwhile (note "Room").

        Who waits for a message has looked for it already, and found that peer's stream empty or not to be read on;
        others wait until there is room for so many bytes.
        """
        writing = room is not None
        for source in {*self._sources, peer} if writing else self._sources:
            if source != peer or writing:
                try:
                    while taken := self._take(source):
                        pass
                except Gone:
                    self._lost(source)
                self._watch(source, reading=taken is None, writing=writing and source == peer)
        for other in [other for other, events in self._watched.items() if events]:
            if other != peer and other not in self._sources:  # left from an earlier wait
                self._watch(other, reading=False)
        if room is not None and self.links[peer].has_room(room):
            return  # came meanwhile, and was not told or is not told again
        asked = time.perf_counter()
        self.status.wait(True)
        happened = self._poll_long(peer)
        if not happened:
            self._tire(peer)  # still seen to wait, by those who tire at the same time
        self.status.wait(False)
        self.waited += time.perf_counter() - asked
        if not self._streams.issuperset(handle for handle, _ in happened):
            self._heed(([peer] if writing else []) if self._parting else self.links)

    def _poll_long(self, peer: int) -> list[tuple[int, int]]:
        """What happens until the time is up; tells once of a wait for a message, or for room, that takes long."""
        until = time.monotonic() + self.limit
        if self._tells_at < until:
            happened = self._poll.poll(max(self._tells_at - time.monotonic(), 0.0) * 1000)
            if happened:
                return happened
            self._tells_at = math.inf
            where = (f"rank {rank}: {self._last_seen(rank)}" for rank in self._stuck(peer))
            logger.warning("rank %d has waited %g s for rank %d\n%s", self.rank, LONG, peer, "\n".join(where))
        return self._poll.poll(max(until - time.monotonic(), 0.0) * 1000)

    def _watch(self, peer: int, *, reading: bool, writing: bool = False) -> None:
        """What of a peer's stream `_wait` wakes for."""
        events = self.links[peer].events(reading=reading, writing=writing)
        if self._watched[peer] != events:
            self._watched[peer] = events
            self._poll.modify(self.links[peer], events)

    def _heed(self, needed: Collection[int] | None = None) -> None:
        """Reads the news; by default all are needed.

        Raises:
            RemoteError: Another process failed in this run, or is gone.
        """
        gone = []
        for peer, link in self.links.items():
            try:
                link.listen()
            except Damaged as error:
                raise heard(f"rank {peer} sent what gpipe never sends: {error}", peer) from error
            link.reports = [report for report in link.reports if report["run"] >= self.run]
            if link.news.gone and (needed is None or peer in needed):
                gone.append(peer)
            elif link.news.gone:
                self._ignore(link.news.connection)
        for link in self.links.values():
            for report in link.reports:
                if report["run"] == self.run:
                    raise error_of(report)
        if gone:
            silent = [peer for peer, link in self.links.items() if peer not in gone and link.silent > SILENCE]
            last = [f"rank {peer} is gone; {self._last_seen(peer)}" for peer in gone]
            last += [f"rank {peer}: {self._last_seen(peer)}" for peer in silent]
            raise heard("\n".join(last), gone[0])

    def _ignore(self, connection: socket.socket) -> None:
        with suppress(KeyError):  # done before
            self._poll.unregister(connection)

    def _lost(self, peer: int, gone: Gone | None = None) -> NoReturn:
        """What to do when a stream ends: the news say why, or soon will; or nobody is gone, and it is this device."""
        self._heed()
        news = select.poll()
        news.register(self.links[peer].news.connection, select.POLLIN)
        news.poll(SOON * 1000)
        self._heed()
        if gone is not None and isinstance(gone.__cause__, RuntimeError):  # the backend's
            raise gone.__cause__
        raise heard(f"rank {peer} is gone; {self._last_seen(peer)}", peer)

    def _tire(self, peer: int) -> None:
        """Gives up waiting; names who keeps all waiting, as far as that can be seen."""
        stuck = self._stuck(peer)
        where = [f"rank {rank}: {self._last_seen(rank)}" for rank in stuck]
        raise heard(
            "\n".join([f"nothing came for {self.limit:g} s, the timeout of the process group", *where]), stuck[0]
        )

    def _stuck(self, peer: int) -> list[int]:
        """Who keeps all waiting, as far as that can be seen, while this process waits for `peer`."""
        silent = [rank for rank, link in self.links.items() if link.silent > SILENCE]
        return silent or [rank for rank, watched in self.theirs.items() if not watched.read().waits] or [peer]

    def _last_seen(self, peer: int) -> str:
        seen = self.theirs[peer].read() if peer in self.theirs else None
        return last_seen(seen, self.links[peer].silent, self.run, partial(self.sees, peer))

    def fail(self, error: BaseException) -> None:
        """Tells all others that this process failed in this run."""
        report = report_of(error, self.run, self.rank)
        for link in self.links.values():
            link.report(report)
        if self._wires is not None and (not report["type"] or any(link.news.gone for link in self.links.values())):
            self._wires.end()  # somebody is gone

    def agree(self, told: Tree) -> list[Any]:
        """Tells all processes something, and gives what each told, by rank: nobody has it before all have told.

        Raises:
            RemoteError: A process failed, or is gone.
        """
        label = Label(Control.AGREEMENT, 0, gradient=False)
        if self.rank:
            self.send(0, label, BoundaryValue(told, []))
            with self._at_parting():
                heard_of_all = list(_told(self.receive(0, label)[0]))  # type: ignore[call-overload]  # of rank 0
            return self._settled(heard_of_all)
        every = [told, *(_told(self.receive(peer, label)[0]) for peer in range(1, self.size))]
        message = BoundaryValue(every, [])
        encoded = encode(message) if self._wires is None else None  # once for all
        with self._at_parting():
            for peer in range(1, self.size):
                if encoded is None:
                    self.send(peer, label, message)
                else:
                    self._send(peer, label, encoded)
            for peer in range(1, self.size):
                self._see_off(peer)
        return self._settled(every)

    def _settled(self, every: list[Any]) -> list[Any]:
        if self._wires is not None:
            self._wires.settle()
        return every

    def _see_off(self, peer: int) -> None:
        """Waits until what was sent to a process needs this one no more; who is gone by now has it."""
        with suppress(Gone):
            while not self.links[peer].has_left():
                self._watch(peer, reading=True)
                self._wait(peer)

    @contextmanager
    def _at_parting(self) -> Iterator[None]:
        """While others may be gone with good reason (note "Parting")."""
        self._parting, self._sources = True, ()
        try:
            yield
        finally:
            self._parting = False

    def exchange(self, told: bytes) -> list[bytes]:
        """Tells all processes something between runs, and gives what each told, by rank.

        Raises:
            RemoteError: A process failed, or is gone.
        """
        try:
            self.begin()
            return self.agree(told)
        except BaseException as error:
            self.fail(error)
            raise

    def gone(self) -> list[int]:
        """The ranks whose ends of the links are closed. Any thread may ask."""
        found = []
        for peer, link in self.links.items():
            seen, handle = select.poll(), link.news.connection.fileno()
            if handle >= 0:
                seen.register(handle, HANGS_UP)
                found += [peer] * bool(seen.poll(0))
        return found

    def close(self) -> None:
        """Ends all links; the others see this process as gone."""
        for link in self.links.values():
            link.close()


def _told(message: Message) -> Tree:
    assert isinstance(message, BoundaryValue)
    return message.value


def _drop(reference: "weakref.ref[Net]") -> None:
    """In a forked process, say a DataLoader's: as long as it had the links, nobody would see this process end."""
    net = reference()
    if net is not None:
        for link in net.links.values():
            link.drop()


def _in_no_step(peer: int, seen: Seen) -> str:
    return "outside of any step"
