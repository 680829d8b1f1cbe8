"""What a process reports to others of its failure, what they raise of it, and where they last saw who is silent."""

import json
import select
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, NoReturn

from gpipe.distributed.codec import Gone, reading
from gpipe.distributed.connection import Connection
from gpipe.distributed.status import Memory, Questions, Status
from gpipe.errors import RemoteError, folded, received

SILENT_SECONDS = 2.5  # after which a host that should answer every second counts as out of reach
LONG_WAIT_SECONDS = 10.0  # after which a wait is warned of, once
REPORT_SECONDS = 1.0  # from the end of a process's connection until its own report of why, at most
LONGEST_TEXT = 20_000  # characters of a traceback, and of an exception's text
STILL = (
    "its process has not answered for {seconds:.1f} s, and its host does: it is stopped, or something in it holds "
    "the interpreter's lock; it is waited for"
)
BUSY = (
    "it is waited for, if it is busy there, as with data. Else: is the pipe called on every rank, in the same order?"
)
HANGS_UP = getattr(select, "POLLRDHUP", select.POLLHUP)


class Report(NamedTuple):
    """What a process reports of a failure: the run (0: it leaves), the rank that failed, and its exception."""

    run: int
    rank: int
    type_name: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, run: int, rank: int, at: str = "") -> "Report":
        """The report of an exception, raised `at` what, in words; one of another process is passed on as it came."""
        if isinstance(error, RemoteError) and error.received:
            return cls(run, error.rank, error.type_name, str(error), error.traceback)
        said = "".join(traceback.format_exception_only(error)).strip()  # notes too, and nothing else raises
        if len(said) > LONGEST_TEXT:
            said = f"{said[: LONGEST_TEXT // 2]} [...] {said[-LONGEST_TEXT // 2 :]}"
        lines = traceback.format_exception(type(error), error, folded(error))
        message = f"rank {rank} failed{at and f' {at}'}: {said}"
        return cls(run, rank, type(error).__name__, message, "".join(lines)[-LONGEST_TEXT:])

    @classmethod
    def read(cls, written: bytes) -> "Report":
        match json.loads(written.decode("utf-8", "surrogatepass")):
            case [int(run), int(rank), str(type_name), str(message), str(text)]:
                return cls(run, rank, type_name, message, text)
        raise ValueError("another message")

    def write(self) -> bytes:
        """The report as it is sent: short enough for what a socket takes at once."""
        return json.dumps(self, ensure_ascii=False).encode("utf-8", "surrogatepass")

    def error(self) -> RemoteError:
        return received(self.message, self.rank, self.type_name, self.traceback)


class FailureDetector:
    """The other processes of a pipe, as one of them knows them: who failed, who is gone, who was last seen where."""

    def __init__(
        self,
        connections: Mapping[int, Connection],
        shared: Mapping[int, Memory],
        limit: float,
        questions: Questions | None = None,
    ) -> None:
        self.run = 0  # the number of the current one
        self.sees: Callable[[int, Status], str] = in_no_step  # says in words what a peer was last seen at
        self.limit = limit  # seconds to wait for one
        self._connections = connections
        self._reports: list[Report] = []
        self._ends: dict[int, str] = {}  # of who is gone, as it was first seen
        self._shared = shared  # what those of this host are at
        self._questions = questions

    def check(self, needed: Collection[int]) -> list[int]:
        """Reads the control channels, and raises a failure of this run; gives who is gone and not needed any more."""
        for peer, connection in self._connections.items():
            with reading("a report", peer):
                reports = [Report.read(message) for message in connection.control.read() if message]
            self._reports += reports
            self._ends.update((peer, report.message) for report in reports if not report.run)
        self._reports = [report for report in self._reports if report.run >= self.run]
        failed = [report for report in self._reports if report.run == self.run]
        gone = [peer for peer, connection in self._connections.items() if connection.control.gone]
        for peer in gone if not any(report.type_name for report in failed) else ():
            self._ends.setdefault(peer, f"rank {peer} is gone; {self.last_seen(peer, gone=True)}")
        if failed:
            raise failed[0].error()
        if missed := [peer for peer in gone if peer in needed]:
            silent = [peer for peer in self._silent() if peer not in missed]
            raise received("\n".join([self._ends[peer] for peer in missed] + self.all_last_seen(silent)), missed[0])
        return gone

    def raise_lost(self, peer: int, gone: Gone | None = None) -> NoReturn:
        """Raises why a stream ended: a report says it, or soon will; or nobody is gone, and it is this device."""
        self.check(self._connections)
        channel = select.poll()
        channel.register(self._connections[peer].control.socket, select.POLLIN)
        channel.poll(REPORT_SECONDS * 1000)
        self.check(self._connections)
        if gone is not None and isinstance(gone.__cause__, RuntimeError):  # the backend's
            raise gone.__cause__
        raise received(f"rank {peer} is gone; {self.last_seen(peer, gone=True)}", peer)

    def raise_timeout(self, peer: int) -> NoReturn:
        """Gives up waiting for a process; names who keeps all waiting, as far as that can be seen."""
        stuck = self.stuck(peer)
        why = f"nothing came for {self.limit:g} s, the timeout of the process group"
        raise received("\n".join([why, *self.all_last_seen(stuck)]), stuck[0])

    def ask(self) -> None:
        """Asks the processes of other hosts what they are at; the answers are here soon, if any come."""
        if self._questions is not None:
            self._questions.ask()

    def stuck(self, peer: int) -> list[int]:
        """Who keeps all waiting, as far as that can be seen, while this process waits for `peer`."""
        active = {rank for rank, memory in self._known().items() if not Status.from_buffer_copy(memory).waits}
        return self._silent() or sorted(active | self._owed().keys()) or [peer]

    def _known(self) -> dict[int, Memory]:
        return {**(self._questions.answers.copy() if self._questions else {}), **self._shared}

    def _owed(self) -> dict[int, float]:
        return self._questions.owed() if self._questions else {}

    def _silent(self) -> list[int]:
        return [peer for peer, connection in self._connections.items() if connection.control.silent > SILENT_SECONDS]

    def all_last_seen(self, peers: Collection[int]) -> list[str]:
        return [f"rank {peer}: {self.last_seen(peer)}" for peer in peers]

    def last_seen(self, peer: int, *, gone: bool = False) -> str:
        """In words, where a process was when it was last seen in this run, or when it ended."""
        known, owed = self._known(), self._owed()
        if peer not in self._shared:
            if (silent := self._connections[peer].control.silent) > SILENT_SECONDS:
                return f"it cannot be reached: its host has not answered for {silent:.1f} s"
            if peer in owed and not gone:
                return STILL.format(seconds=time.monotonic() - owed[peer])
            if gone or peer not in known:
                return "it is on another host: see its own messages"
        seen = Status.from_buffer_copy(known[peer])
        seconds = time.monotonic() - seen.since
        if seen.run == self.run and seen.at >= 0:
            return f"it was last seen {self.sees(peer, seen)}\n    and that for {seconds:.1f} s"
        where = f"outside of any step, after {seen.run} run{'s' * (seen.run != 1)}"
        if gone:
            return f"it ended {where}"
        return f"it was last seen {where}, and that for {seconds:.1f} s, while this is run {self.run}: {BUSY}"

    def gone(self) -> list[int]:
        """Those whose ends of the connections are closed. Any thread may ask."""
        poll = select.poll()
        peers = {connection.control.socket.fileno(): peer for peer, connection in self._connections.items()}
        for handle in peers.keys() - {-1}:
            poll.register(handle, HANGS_UP)
        return sorted(peers[handle] for handle, _ in poll.poll(0))


def in_no_step(peer: int, seen: Status) -> str:
    """What a process is at while none of the words of a step hold."""
    return "outside of any step"
