"""What a process tells the others of its failure, what they raise of it, and where they last saw who says nothing."""

import select
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeAlias

from gpipe.comm.frames import Gone
from gpipe.comm.local import Link
from gpipe.comm.status import Seen, Watched
from gpipe.comm.untrusted import Damaged, damaged
from gpipe.errors import RemoteError, folded, heard

Report: TypeAlias = Mapping[str, Any]
"""In words of JSON: the run, the rank that failed, its exception's type, message and traceback."""

SILENCE = 2.5  # seconds after which a host that should answer every second counts as out of reach
LONG = 10.0  # seconds after which a wait is told of, once
SOON = 1.0  # seconds from the end of a process's connection until its own report of why, at most
LONGEST = 20_000  # characters of a traceback, and of an exception's text
HANGS_UP = getattr(select, "POLLRDHUP", select.POLLHUP)


def report_of(error: BaseException, run: int, rank: int, at: str = "") -> Report:
    """What to tell of an exception; one heard from another process is passed on, so that all tell of the same.

    `at` says in words when it was raised, if that is not in its notes.
    """
    if isinstance(error, RemoteError) and error.heard:
        told = {"rank": error.rank, "type": error.type_name, "message": str(error), "traceback": error.traceback}
        return {"run": run, **told}
    said = "".join(traceback.format_exception_only(error)).strip()  # notes too, and nothing else raises
    return {
        "run": run,
        "rank": rank,
        "type": type(error).__name__,
        "message": f"rank {rank} failed{at and f' {at}'}: {_shortened(said)}",
        "traceback": "".join(traceback.format_exception(type(error), error, folded(error)))[-LONGEST:],
    }


def error_of(report: Report) -> RemoteError:
    """What to raise of a report."""
    return heard(report["message"], report["rank"], report["type"], report["traceback"])


class Lookout:
    """The other processes of a pipe, as one of them knows them: who failed, who is gone, who was last seen where.

    Attributes:
        run: The number of the current run.
        sees: Says in words what a peer was last seen at.
    """

    def __init__(self, links: Mapping[int, Link], watched: Mapping[int, Watched], limit: float) -> None:
        self.run = 0
        self.sees: Callable[[int, Seen], str] = in_no_step
        self.limit = limit  # seconds to wait for one
        self._links = links
        self._watched = watched  # those of this host

    def heed(self, needed: Collection[int]) -> list[int]:
        """Reads the news, and raises what it tells of this run; gives those that are gone and not needed any more."""
        for peer, link in self._links.items():
            try:
                link.listen()
            except Damaged as error:
                raise damaged(peer, error) from error
            link.reports = [report for report in link.reports if report["run"] >= self.run]
        for link in self._links.values():
            for report in link.reports:
                if report["run"] == self.run:
                    raise error_of(report)
        gone = [peer for peer, link in self._links.items() if link.news.gone]
        if missed := [peer for peer in gone if peer in needed]:
            silent = [peer for peer in self._silent() if peer not in missed]
            last = [f"rank {peer} is gone; {self.last_seen(peer)}" for peer in missed]
            raise heard("\n".join(last + self.all_last_seen(silent)), missed[0])
        return gone

    def lose(self, peer: int, gone: Gone | None = None) -> NoReturn:
        """Raises why a stream ended: the news say it, or soon will; or nobody is gone, and it is this device."""
        self.heed(self._links)
        news = select.poll()
        news.register(self._links[peer].news.connection, select.POLLIN)
        news.poll(SOON * 1000)
        self.heed(self._links)
        if gone is not None and isinstance(gone.__cause__, RuntimeError):  # the backend's
            raise gone.__cause__
        raise heard(f"rank {peer} is gone; {self.last_seen(peer)}", peer)

    def give_up(self, peer: int) -> NoReturn:
        """Gives up waiting for a process; names who keeps all waiting, as far as that can be seen."""
        stuck = self.stuck(peer)
        why = f"nothing came for {self.limit:g} s, the timeout of the process group"
        raise heard("\n".join([why, *self.all_last_seen(stuck)]), stuck[0])

    def stuck(self, peer: int) -> list[int]:
        """Who keeps all waiting, as far as that can be seen, while this process waits for `peer`."""
        return self._silent() or [rank for rank, seen in self._watched.items() if not seen.read().waits] or [peer]

    def _silent(self) -> list[int]:
        return [peer for peer, link in self._links.items() if link.silent > SILENCE]

    def all_last_seen(self, peers: Collection[int]) -> list[str]:
        """In words, where some processes were last seen, a line each or more."""
        return [f"rank {peer}: {self.last_seen(peer)}" for peer in peers]

    def last_seen(self, peer: int) -> str:
        """In words, where a process was when it was last seen in this run."""
        silent = self._links[peer].silent
        if peer not in self._watched and silent > SILENCE:
            return f"it cannot be reached: its host has not answered for {silent:.1f} s"
        if peer not in self._watched:
            return "it is on another host: see its own messages"
        seen = self._watched[peer].read()
        if seen.run < self.run or seen.at < 0:
            where = f"it was last seen outside of any step, after {seen.run} runs, while this is run {self.run}"
            return f"{where}: is the pipe called on every rank, in the same order?"
        return f"it was last seen {self.sees(peer, seen)}\n    and that for {time.monotonic() - seen.since:.1f} s"

    def report(self, report: Report) -> None:
        """Tells all of a failure."""
        for link in self._links.values():
            link.report(report)

    def gone(self) -> list[int]:
        """Those whose ends of the links are closed. Any thread may ask."""
        found = []
        for peer, link in self._links.items():
            seen, handle = select.poll(), link.news.connection.fileno()
            if handle >= 0:
                seen.register(handle, HANGS_UP)
                found += [peer] * bool(seen.poll(0))
        return found


def in_no_step(peer: int, seen: Seen) -> str:
    """What a process is at while none of the words of a step hold."""
    return "outside of any step"


def _shortened(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"
