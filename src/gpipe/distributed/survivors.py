"""Replicas that each have a launcher of their own, and go on when one of them is lost.

They find each other by a folder, where they settle who goes on, in epochs: at first all come together, and again
when one is lost or back. Each process notes that it came; once every replica of the epoch before has come or is gone,
one process claims the next by a file that nobody can make twice, with the names of those that are in. So a cut wire
leaves no two winners: who is not in it ends.

Who is gone is told by a lock that each process holds for life, or by its connection. A replica that was started again
has another name, and no state (it is `fresh`) until those that live have given it theirs.
"""

import fcntl
import hashlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpipe.distributed.agree import Communicator, agree
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.failures import LONG_WAIT_SECONDS
from gpipe.distributed.mesh import Position, host_name
from gpipe.distributed.processes import Note, Processes
from gpipe.distributed.rendezvous import connect
from gpipe.distributed.stragglers import Stragglers
from gpipe.distributed.tls import check_authorities, identity
from gpipe.errors import RemoteError, is_count, received
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.stages.messages import Control, Label, Request
from gpipe.stages.tree import Tree

T = TypeVar("T")
FOLDER, REPLICA, REPLICAS = "GPIPE_MEETING", "GPIPE_REPLICA", "GPIPE_REPLICAS"
POLL_SECONDS = 0.005
FEWER_SECONDS = 3.0  # that who lost sight of more replicas than are left gives these to go on instead
MOST_TRIES = 8  # to come together again, while others are lost in it
SILENCE = 15.0  # seconds after which a host that answers nothing is gone: sooner than where its loss ends all
PAUSE = 4  # times as long as a failed try to let others in no further one is made
NOT_JOINED = "survive=True: call pipe.join(optimizer, ...) in every process before the first step"

logger = logging.getLogger("gpipe")


def is_loss(error: RemoteError) -> bool:
    """Whether an exception tells that a process is gone, or ends by Ctrl-C, and not what else one has raised."""
    return error.received and error.type_name in ("", KeyboardInterrupt.__name__)


def variables() -> tuple[str, int, int]:
    """The folder, the number of this replica and that of all, as its launcher was given them; else a ValueError."""
    folder, *told = (os.environ.get(name, "") for name in (FOLDER, REPLICA, REPLICAS))
    replica, replicas = (int(text) if text.isdecimal() else -1 for text in told)
    if not (folder and is_count(replicas) and 0 <= replica < replicas):
        raise ValueError(
            f"survive=True has a launcher for each replica: give each of them {REPLICAS}, their number, {REPLICA}, "
            f"from 0, and {FOLDER}, a folder that all of them share; they are {replicas}, {replica} and {folder!r}"
        )
    return folder, replica, replicas


class Meeting(Communicator):
    """One process, as it meets those of all replicas; `words` are what must be the same in all that meet, by name."""

    def __init__(self, row: int, rows: int, drawn: str, timeout: float, words: Mapping[str, Any]) -> None:
        folder, replica, self.expected = variables()
        self.folder = Path(folder)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{FOLDER}={folder} is no folder nor can be one ({error}); give another") from error
        found = self.folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ValueError(f"{FOLDER}={folder} is open to others, who could take part; chmod 700, and your own")
        self.row, self.rows = row, rows
        self.name, self.words = f"{replica}-{drawn}", {**words, REPLICAS: self.expected}
        self.same = hashlib.sha256(repr(sorted(self.words.items())).encode()).hexdigest()[:16]
        self.fresh = True  # whether this process has no state that others need
        self.epoch = 0
        self.members: list[str] = []
        self.newcomers: list[str] = []  # those of the members who are given the state of the others
        self.hosts: list[str] = []
        self.tls = identity()
        self._timeout, self._said = timeout, 0
        alive = open(self._path("alive", self.name, f"{row}.new"), "w")  # noqa: SIM115  # for life
        fcntl.lockf(alive, fcntl.LOCK_EX)
        os.rename(alive.name, self._path("alive", self.name, row))
        self._alive = alive

    def meet(self, lost: Callable[[], Collection[str]], *, admits: bool = False) -> None:
        """Comes together with all that live, and if it `admits` them, between two steps, with those that are back.

        `lost` gives who is seen as gone. Raises a RemoteError if this replica has lost a
        process, or the others have gone on without it.
        """
        began, told_at = time.monotonic(), time.monotonic() + LONG_WAIT_SECONDS
        while True:
            epochs = [int(path.name[6:]) for path in self.folder.glob("epoch-*")] if self.fresh else [self.epoch]
            at = max(epochs, default=0)
            known = self._read(f"epoch-{at}") or {}
            before, at = known.get("members", []), at + 1
            self._put(f"came-{at}-{self.name}-{self.row}", json.dumps([self.fresh, admits, self.same]).encode())
            while True:
                gone = {name for name in {*before, self.name} if self._is_gone(name)} | {*lost()}
                if decided := self._read(f"epoch-{at}"):  # read behind that: who knows of it closes connections
                    break
                if self.name in gone:
                    raise received("this replica lost a process, and ends; the others go on without it", self.rank)
                waited = time.monotonic() - began
                if chosen := self._choose(at, before, gone, waited, known.get("same", self.same)):
                    self._claim(at, chosen)
                elif waited > self._timeout:
                    raise received(f"in vain {self._waiting(at, before, gone)}", self.rank)
                elif time.monotonic() > told_at:
                    told_at = math.inf
                    logger.warning(self._waiting(at, before, gone))
                else:
                    time.sleep(POLL_SECONDS)
            if self.name in decided["members"]:
                break
            if not self.fresh:
                raise received("the others have gone on without this one, which they took for lost", self.rank)
        self.epoch, self.members, self.newcomers, self._said = at, decided["members"], decided["newcomers"], 0
        self.rank = self.members.index(self.name) * self.rows + self.row
        self.size = len(self.members) * self.rows

    def greet(self) -> None:
        told = agree(self, [host_name(), self.tls.authority if self.tls else ""], same=self.words)
        self.hosts = [host for host, _ in told]
        check_authorities([authority for _, authority in told])

    def _waiting(self, at: int, before: Collection[str], gone: Collection[str]) -> str:
        came = {name for name, rows in self._came(at).items() if len(rows) == self.rows}
        missing = {*before} - {*gone} - came
        all_gone = {*before} <= {*gone}
        numbers = {*range(self.expected)} - {*map(number_of, came)} if all_gone else {*map(number_of, missing)}
        who = (
            f"replica {', '.join(map(str, sorted(numbers)))}" if numbers else "those that let others in between steps"
        )
        gone_too = (
            "; all that it would join are gone: if they are through, end this one" if before and all_gone else ""
        )
        return f"replica {number_of(self.name)} waits at {self.folder} for {who}, up to {self._timeout:g} s{gone_too}"

    def _choose(
        self, at: int, before: Sequence[str], gone: Collection[str], waited: float, same: str
    ) -> Mapping[str, Any] | None:
        """Who is in the next epoch, if this process can tell by now."""
        came = self._came(at)
        whole = {name: rows for name, rows in came.items() if len(rows) == self.rows}
        has_state = {name: not any(fresh for fresh, *_ in rows) for name, rows in came.items()}
        living = [name for name in before if name not in gone and has_state.get(name, True)]
        new = {number_of(name): name for name in whole if name not in living and not self._is_gone(name)}
        if not living:
            chosen = [new[number] for number in sorted(new)]
            return {"members": chosen, "newcomers": [], "same": self.same} if len(new) == self.expected else None
        if self.fresh and same != self.same:
            raise ValueError("this replica was made with other layers or settings than those that it would join")
        members = [name for name in living if name in whole]
        if self.name not in members or (len(members) < len(living) and waited < self._timeout):
            return None
        unseen = [name for name in before if name in gone and not self._is_gone(name)]  # they may see each other
        if len(members) < len(unseen) and waited < FEWER_SECONDS:
            return None
        taken, admitted = set(map(number_of, members)), list[str]()
        if all(admits for name in members for _, admits, _ in whole[name]):
            admitted = [name for number, name in new.items() if number not in taken and whole[name][0][2] == same]
        return {"members": sorted(members + admitted, key=number_of), "newcomers": admitted, "same": same}

    def waited_for(self) -> bool:
        came = self._came(self.epoch + 1)
        return any(len(came[name]) == self.rows and not self._is_gone(name) for name in came.keys() - self.members)

    def exchange(self, message: bytes, /) -> list[bytes]:
        self._said += 1
        place = f"said-{self.epoch}-{self._said}"
        self._put(f"{place}-{self.rank}", message)
        until = time.monotonic() + self._timeout
        paths = [self._path(place, rank) for rank in range(self.size)]
        while not all(path.exists() for path in paths):
            self.check()
            if time.monotonic() > until:
                raise received(f"nothing came for {self._timeout:g} s to {self.folder}", self.rank)
            time.sleep(POLL_SECONDS)
        return [path.read_bytes() for path in paths]

    def check(self, _: float = 0.0) -> None:
        """Raises if a member is gone, or has left for another epoch."""
        for at, name in enumerate(self.members):
            if self._is_gone(name) or [*self.folder.glob(f"came-{self.epoch + 1}-{name}-*")]:
                raise received(f"replica {number_of(name)} is gone, or saw another go", at * self.rows)

    def close(self) -> None:
        """Ends what was said in an epoch, once all have come to its end."""
        self.exchange(b"")
        for path in self.folder.iterdir() if not self.rank else ():
            kind, _, rest = path.name.partition("-")
            if kind in ("came", "said") and int(rest.partition("-")[0]) < self.epoch:
                path.unlink(missing_ok=True)

    def _came(self, at: int) -> dict[str, list[Any]]:
        """What those say who have come to an epoch, by the name of their replica, a process each."""
        came: dict[str, list[Any]] = {}
        for path in self.folder.glob(f"came-{at}-*"):
            came.setdefault(path.name.removeprefix(f"came-{at}-").rpartition("-")[0], []).append(
                self._read(path.name)
            )
        return came

    def _is_gone(self, name: str) -> bool:
        """Whether another process of a replica was here and is gone; to ask for this one would unlock it."""
        for row in range(self.rows):
            if (name, row) != (self.name, self.row):
                with suppress(OSError), open(self._path("alive", name, row)) as alive:
                    fcntl.lockf(alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return True
        return False

    def _path(self, *parts: object) -> Path:
        return self.folder / "-".join(map(str, parts))

    def _read(self, name: str) -> Any:
        with suppress(FileNotFoundError):
            return json.loads(self._path(name).read_bytes())
        return None

    def _put(self, name: str, message: bytes) -> None:
        new = self._path("new", self.name, self.row)
        new.write_bytes(message)
        os.rename(new, self._path(name))  # seen whole, or not at all

    def _claim(self, at: int, chosen: Mapping[str, Any]) -> None:
        new = self._path("new", self.name, self.row)
        new.write_text(json.dumps(chosen))
        with suppress(FileExistsError):  # another was first
            os.link(new, self._path("epoch", at))
        new.unlink()


def number_of(name: str) -> int:
    """The number of a replica, as its launcher was given it."""
    return int(name.partition("-")[0])


class Survivors(Processes):
    """One of the processes of all replicas that take part, which come together at a meeting.

    All connections are made anew when a replica is lost or back; its run is then done again by those that are left,
    unless some have seen it end well.
    """

    survives = True

    def __init__(
        self, meeting: Meeting, engine: PipelineStages, position: Position, *, costs: Sequence[float], measured: bool
    ) -> None:
        super().__init__(engine, position, costs=costs, measured=measured)
        self.meeting = meeting
        self._stragglers = partial(Stragglers, engine.placement, costs, measured=measured)
        self.keeps: tuple[Callable[[], Tree], Callable[[Any], object]] | None = None  # what `join` was given
        self.came_back = False  # whether this replica was given the state of others when all last came together
        self._is_whole = False  # whether all have come to the end of linking up
        self._awaited = False  # whether a replica waits to be let in
        self._admits_from = 0.0
        self._runs, self._last = 0, list[Any]()  # how many runs have ended well, and with what the last

    def join(self, keep: Callable[[], Tree], take: Callable[[Any], object], begins: Sequence[str]) -> None:
        self.keeps = keep, take
        self.regroup()
        if not self.came_back:
            self._check_alike(begins)

    def _check_alike(self, begins: Sequence[str]) -> None:
        every = self.gather(Request.EXCHANGE, list(begins))
        for rank, theirs in enumerate(every):
            first = every[rank % self.position.rows]
            if theirs != first:
                replica = number_of(self.meeting.members[rank // self.position.rows])
                what = "weights or buffers" if theirs[:1] != first[:1] else "optimizers, or what else it joins with,"
                raise ValueError(
                    f"replica {replica} begins with other {what} than replica {self.living[0]}: build and set both "
                    "alike in every replica (torch.manual_seed before, the same arguments)"
                )

    def linked(self) -> Endpoint:
        if self._endpoint is None:
            self.regroup()
        return super().linked()

    def gather(self, request: Request, value: Tree) -> list[Any]:
        gather = super().gather
        return self.survive(lambda: gather(request, value), list, lambda: list)

    def end(self, value: Tree) -> list[Any]:
        may_admit = not self.rank and time.monotonic() > self._admits_from
        every = super().end((value, may_admit and self.meeting.waited_for()))
        self._awaited = every[0][1]
        self._runs, self._last = self._runs + 1, [theirs for theirs, _ in every]
        return self._last

    def survive(self, attempt: Callable[[], T], late: Callable[[list[Any]], T], note: Note) -> T:
        """Does what all processes do together, and where a replica is lost in it again with those that are left.

        If some have seen it end well before the loss it has ended for all: `late` takes what these have gathered.
        Else what `note` gives puts back what it has changed.
        """
        undo = note()
        while True:
            try:
                return attempt()
            except RemoteError as error:
                if not is_loss(error):
                    raise
            gathered = self.regroup()
            if gathered is not None:
                return late(gathered)
            undo()

    @property
    def living(self) -> list[int]:
        return [*map(number_of, self.meeting.members)]

    def let_in(self) -> None:
        if self._awaited:
            self.regroup(admits=True)

    def regroup(self, *, admits: bool = False) -> list[Any] | None:
        """Comes together with all replicas that live; gives what a run has gathered that ended for others alone."""
        if self.keeps is None:
            raise ValueError(NOT_JOINED)
        before, runs, failed = self.meeting.members, self._runs, None
        for _ in range(MOST_TRIES):
            self.meeting.meet(self._lost, admits=admits)  # what it raises is the end of this replica
            self._is_whole, begun = False, time.monotonic()
            if self._endpoint is not None:
                self._endpoint.close()
            try:
                gathered = self._link_anew(*self.keeps)
            except RemoteError as error:
                failed, now, new = error, time.monotonic(), self.meeting.newcomers
                if not is_loss(error) or self.meeting.name in new:  # its launcher tries again
                    raise
                if new:
                    self._admits_from = now + PAUSE * (now - begun)
            else:
                self._tell(before)
                return gathered if runs < self._runs else None
        raise RuntimeError(f"{MOST_TRIES} times the replicas could not come together; start anew") from failed

    def _link_anew(self, keep: Callable[[], Tree], take: Callable[[Any], object]) -> list[Any]:
        meeting = self.meeting
        meeting.greet()
        replicas = len(meeting.members)
        replica = meeting.members.index(meeting.name)
        self.position = replace(self.position, replica=replica, replicas=replicas, members=tuple(range(meeting.size)))
        self.rank, self.size = meeting.rank, meeting.size
        self.engine.set_replicas(replicas)
        self.stragglers = self._stragglers(replicas=replicas)
        self._endpoint = connect(meeting, self.position, None, SILENCE)
        with self._endpoint.in_run(notes=False) as endpoint:
            runs, last = max(endpoint.exchange((self._runs, self._last)), key=lambda told: told[0])
        with endpoint.in_run(notes=False):
            takes = [meeting.members.index(name) for name in meeting.newcomers]
            source = next(at for at in range(replicas) if at not in takes)
            ranks = [self.position.rank_of(self.position.row, at) for at in (source, *takes)]
            if takes and self.rank in ranks:
                held = _packed(keep()) if self.rank == ranks[0] else None
                held = endpoint.spread(ranks[0], ranks, Label(Control.STATE, 0, gradient=False), held)
                if self.rank != ranks[0]:
                    take(_unpacked(held))
            endpoint.exchange(None)
        self._runs, self._last, self._awaited = runs, list(last), False
        self.came_back = meeting.name in meeting.newcomers
        self._is_whole, meeting.fresh = True, False
        return self._last

    def _lost(self) -> list[str]:
        """The replicas that have ended a connection; while they link up they may, and live.

        Where a wire is cut connections end one after another: what is silent as long will have ended soon.
        """
        if not self._is_whole or self._endpoint is None:
            return []
        ranks = {*self.gone(), *self._endpoint.detector.silent(SILENCE / 2)}
        return [self.meeting.members[rank // self.position.rows] for rank in ranks]

    def _tell(self, before: Sequence[str]) -> None:
        now = self.meeting.members
        for names, words in ((before, "is lost"), (now, "is back, with the state of the others")):
            for name in names if before else ():
                if name not in (now if names is before else before) and not self.position.row:
                    logger.warning("replica %d %s; %d go on", number_of(name), words, len(now))


def _packed(state: Tree) -> torch.Tensor:
    """A state as one tensor, as `torch.save` has it: it may hold what messages do not."""
    written = io.BytesIO()
    torch.save(state, written)
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def _unpacked(held: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(held.numpy().tobytes()), map_location="cpu", weights_only=True)
