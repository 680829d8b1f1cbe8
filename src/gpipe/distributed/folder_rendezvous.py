"""Implements a rendezvous in a shared folder, for replicas that have separate launchers and may come and go.

Time is divided into numbered epochs. In each epoch, the set of member replicas is fixed. A new epoch begins when a
replica is lost or comes back:

1. Each process writes a file to announce that it has reached the next epoch.
2. When every replica of the last epoch has announced the next epoch or is lost, one process creates the file of the
   next epoch with a hard link. Only one process can succeed. The file lists the members.

A network partition therefore cannot leave two groups, because a replica that is not in the file ends.

A process holds a lock on a file while it runs. A free lock or a closed connection shows that the process is lost. A
restarted replica has a new name and is `fresh`, which means that the replica has no training state yet.
"""

import atexit
import fcntl
import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpipe.distributed.communicator import Communicator, all_gather_checked
from gpipe.distributed.failures import LONG_WAIT_SECONDS
from gpipe.distributed.mesh import host_name
from gpipe.distributed.tls import check_authorities, identity
from gpipe.errors import is_count, received_error

FOLDER, REPLICA, REPLICAS = "GPIPE_MEETING", "GPIPE_REPLICA", "GPIPE_REPLICAS"
POLL_SECONDS = 0.005
DONE_SECONDS = 30.0  # how long a replica that missed the end of the job waits for replicas that begin a new one
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # torchrun sets it: how often it has started this process again
MINORITY_SECONDS = 3.0  # how long the smaller side of a partition waits for the larger one to claim the epoch

logger = logging.getLogger("gpipe")


def variables() -> tuple[str, int, int]:
    """Returns the folder, the number of this replica, and the number of replicas, from the environment.

    Raises:
        ValueError: If a variable is missing or invalid.
    """
    folder, *texts = (os.environ.get(name, "") for name in (FOLDER, REPLICA, REPLICAS))
    replica, replicas = (int(text) if text.isdecimal() else -1 for text in texts)
    if not (folder and is_count(replicas) and 0 <= replica < replicas):
        raise ValueError(
            f"survive=True: the environment has {FOLDER}={folder!r}, {REPLICA}={texts[0]!r} and "
            f"{REPLICAS}={texts[1]!r}. Set {FOLDER} to a folder that all replicas share, {REPLICA} to the number of "
            f"this replica from 0, and {REPLICAS} to the number of replicas. [meeting-folder]"
        )
    return folder, replica, replicas


class FolderRendezvous(Communicator):
    """The rendezvous of one process with the processes of all replicas.

    Args:
        pp_rank: The pipeline rank of this process.
        pp_size: The number of processes per replica.
        nonce: A random string, equal on all processes of the replica.
        timeout: The timeout in seconds.
        settings: Settings that must be the same in all replicas, by name.

    Attributes:
        name: The name of this replica: its number and the nonce.
        fresh: Whether this replica has no training state yet.
        epoch: The number of the current epoch.
        members: The names of the replicas in the current epoch.
        rejoining: The members that receive the training state from a different member.
        hosts: The host of each process, after `greet`.
        tls: The TLS contexts, if TLS is configured.
    """

    def __init__(self, pp_rank: int, pp_size: int, nonce: str, timeout: float, settings: Mapping[str, Any]) -> None:
        folder, replica, self.expected = variables()
        self.folder = Path(folder)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{FOLDER}={folder} is not a folder and cannot be created ({error}). Set it to a folder that all "
                f"replicas share. [meeting-folder]"
            ) from error
        stat = self.folder.stat()
        if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
            raise ValueError(
                f"{FOLDER}={folder} is accessible by other users, and they could join. Use a folder of your own with "
                f"mode 0700. [meeting-folder]"
            )
        self.pp_rank, self.pp_size = pp_rank, pp_size
        self.name, self.settings = f"{replica}-{nonce}", {**settings, REPLICAS: self.expected}
        self.digest, self.join_digest = _digest(sorted(self.settings.items())), ""
        self.fresh = True
        self.epoch = 0
        self.members: list[str] = []
        self.rejoining: list[str] = []
        self.hosts: list[str] = []
        self.tls = identity()
        self._timeout, self._exchanges = timeout, 0
        self.same: list[list[str]] = []  # the digests of the members, by pipeline rank
        self._end = _CleanEnd(self._path("finished", self.name, pp_rank))
        path = self._path("alive", self.name, pp_rank)
        with _naming(path):
            alive = open(path.with_suffix(".new"), "w")  # noqa: SIM115  # open as long as it lives
            fcntl.lockf(alive, fcntl.LOCK_EX)
            os.rename(alive.name, path)
        self._alive = alive

    def describe_join(self, arguments: Sequence[str]) -> None:
        """Sets a description of the arguments of `join`. A replica with a different description cannot come back."""
        self.join_digest = _digest(arguments)

    def meet(self, lost: Callable[[], Collection[str]], *, admits: bool = False) -> None:
        """Begins the next epoch with all living replicas.

        Args:
            lost: A function that returns the names of replicas whose connections have ended.
            admits: Whether this process admits replicas that come back. False in the middle of a step.

        Raises:
            RemoteError: If this replica has lost a process, if the other replicas continue without it, or after the
                timeout.
            SystemExit: If torchrun has started this replica again, and all others have finished. The status is 0.
            OSError: If the folder cannot be written.
            ValueError: If this replica does not fit the others, or if a file in the folder is damaged.
        """
        began, warns_at = time.monotonic(), time.monotonic() + LONG_WAIT_SECONDS
        while True:
            epochs = [int(path.name[6:]) for path in self.folder.glob("epoch-*")] if self.fresh else [self.epoch]
            last = max(epochs, default=0)
            before, same = self._last_epoch(last)
            epoch = last + 1
            arrival = [self.fresh, admits, self.digest, self.join_digest]
            while True:
                if (
                    self._read(came := f"came-{epoch}-{self.name}-{self.pp_rank}") != arrival
                ):  # torn by a crash, or new
                    self._put(came, json.dumps(arrival).encode())
                gone = {name for name in {*before, self.name} if self._is_gone(name)} | {*lost()}
                if decided := self._read(f"epoch-{epoch}"):  # after `gone`: processes in the epoch close connections
                    break
                self._end_if_done(epoch, before, gone, time.monotonic() - began)
                if self.name in gone:
                    raise received_error("This replica lost a process. The other replicas continue.", self.rank)
                waited = time.monotonic() - began
                if chosen := self._choose(epoch, before, gone, waited, same):
                    self._claim(epoch, chosen)
                elif waited > self._timeout:
                    raise received_error(f"Timeout: {self._describe_wait(epoch, before, gone)}", self.rank)
                elif time.monotonic() > warns_at:
                    warns_at = math.inf
                    logger.warning(self._describe_wait(epoch, before, gone) + " [long-wait]")
                else:
                    time.sleep(POLL_SECONDS)
            if not _is_epoch(decided):
                raise ValueError(
                    f"{FOLDER}: {self._path('epoch', epoch)} is damaged. Stop all replicas, empty the folder, and "
                    f"start them again. [meeting-folder]"
                )
            if self.name in decided["members"]:
                break
            if not self.fresh:
                raise received_error("The other replicas treat this replica as lost, and continue.", self.rank)
        self.epoch, self.members, self.rejoining = epoch, decided["members"], decided["rejoining"]
        self.same, self._exchanges = decided["same"], 0
        self._end.register()
        self.rank = self.members.index(self.name) * self.pp_size + self.pp_rank
        self.size = len(self.members) * self.pp_size

    def note_signal(self) -> None:
        """Notes that this process ends because of a signal, so that its end is not the end of the job."""
        self._end.is_clean = False

    def _last_epoch(self, last: int) -> tuple[list[str], list[list[str]]]:
        """Returns the members of the last epoch, and their digests.

        If the file is damaged, a member writes it again. A replica that comes back considers all living ones members.
        """
        decided = self._read(f"epoch-{last}")
        if _is_epoch(decided):
            return decided["members"], decided["same"]
        if not self.fresh:
            self._put(f"epoch-{last}", json.dumps(self._as_json(self.members, self.rejoining, self.same)).encode())
            return self.members, self.same
        if not last:
            return [], []
        alive = [path.name for path in self.folder.glob("alive-*") if path.suffix != ".new"]
        names = {name.removeprefix("alive-").rpartition("-")[0] for name in alive} - {self.name}
        return sorted(name for name in names if not self._is_gone(name)), []

    def _end_if_done(self, epoch: int, before: Sequence[str], gone: Collection[str], waited: float) -> None:
        """Ends this process if the others have finished, and its launcher would start it again and again."""
        numbers = {*map(replica_number, before)}
        restarted = self.fresh and os.environ.get(RESTARTS, "0") != "0" and replica_number(self.name) not in numbers
        if not (restarted and before and {*before} <= {*gone}):
            return
        finished = [self._path("finished", name, row).exists() for name in before for row in range(self.pp_size)]
        begins = any(replica_number(name) in numbers and not self._is_gone(name) for name in self._arrivals(epoch))
        if all(finished) and not begins and (waited > min(DONE_SECONDS, self._timeout) or self.name in gone):
            logger.warning(
                "All other replicas had finished before this one was started again. It ends with status 0. "
                "[replica-after-end]"
            )
            raise SystemExit(0)

    def greet(self) -> None:
        """Gathers the hosts of all processes in the epoch, and checks that their settings are the same."""
        about = [host_name(), self.tls.authority if self.tls else ""]
        gathered = all_gather_checked(self, about, same=self.settings)
        self.hosts = [host for host, _ in gathered]
        check_authorities([authority for _, authority in gathered])

    def _describe_wait(self, epoch: int, before: Collection[str], gone: Collection[str]) -> str:
        came = {name for name, arrivals in self._arrivals(epoch).items() if len(arrivals) == self.pp_size}
        wait = f"replica {replica_number(self.name)} waits in {self.folder}, for up to {self._timeout:g} s"
        if not before or {*before} <= {*gone}:
            missing = {*range(self.expected)} - {*map(replica_number, came)}
            ended = (
                " All replicas that this replica could join have ended. If training is complete, stop this replica."
                * bool(before)
            )
            return f"{wait}, for these replicas to start: {sorted(missing)}.{ended}"
        if missing := {*map(replica_number, {*before} - {*gone} - came)}:
            return f"{wait}, for these replicas: {sorted(missing)}."
        return f"{wait}, until the running replicas admit it after a step."

    def _choose(
        self, epoch: int, before: Sequence[str], gone: Collection[str], waited: float, same: Sequence[Sequence[str]]
    ) -> Mapping[str, Any] | None:
        """Returns the content of the file of the next epoch, or None if this process cannot decide it yet.

        Args:
            epoch: The number of the next epoch.
            before: The members of the last epoch.
            gone: The replicas that are lost.
            waited: The seconds since this process arrived.
            same: The digests of the settings and of the arguments of `join`, by pipeline rank.

        Returns:
            A dict with the names of the members, the names of the rejoining members, and the digests.

        Raises:
            ValueError: If this replica cannot join because its digests differ.
        """
        came = self._arrivals(epoch)
        whole = {name: arrivals for name, arrivals in came.items() if len(arrivals) == self.pp_size}
        has_state = {name: not any(fresh for fresh, *_ in arrivals) for name, arrivals in came.items()}
        living = [name for name in before if name not in gone and has_state.get(name, True)]
        new = {replica_number(name): name for name in whole if name not in living and not self._is_gone(name)}
        if not living:
            chosen = [new[number] for number in sorted(new)]
            if len(new) < self.expected:
                return None
            return self._as_json(chosen, [], _digests_of(whole[chosen[0]]))
        if self.fresh and same:
            settings, arguments = same[self.pp_rank]
            what = (
                "layers or settings" * (settings != self.digest) or "classes of optimizers or other join() arguments"
            )
            if [settings, arguments] != [self.digest, self.join_digest]:
                raise ValueError(
                    f"This replica has different {what} than the replicas that it would join. Start it with the same "
                    f"script and arguments. [replicas-begin-differently]"
                )
        members = [name for name in living if name in whole]
        if self.name not in members or (len(members) < len(living) and waited < self._timeout):
            return None
        unseen = [name for name in before if name in gone and not self._is_gone(name)]  # they may see each other
        if len(members) < len(unseen) and waited < MINORITY_SECONDS:
            return None
        taken, admitted = set(map(replica_number, members)), list[str]()
        if all(admits for name in members for _, admits, *_ in whole[name]):
            fits = {name for name, arrivals in whole.items() if _digests_of(arrivals) == same}
            admitted = [name for number, name in new.items() if number not in taken and name in fits]
        return self._as_json(sorted(members + admitted, key=replica_number), admitted, same)

    @staticmethod
    def _as_json(members: Sequence[str], rejoining: Sequence[str], same: Sequence[Sequence[str]]) -> dict[str, Any]:
        return {"members": members, "rejoining": rejoining, "same": same}

    def has_waiting_replica(self) -> bool:
        """Returns whether a replica waits to be admitted, and all of its processes have announced the next epoch."""
        came = self._arrivals(self.epoch + 1)
        return any(len(came[name]) == self.pp_size and not self._is_gone(name) for name in came.keys() - self.members)

    def all_gather(self, message: bytes, /) -> list[bytes]:
        self._exchanges += 1
        place = f"said-{self.epoch}-{self._exchanges}"
        self._put(f"{place}-{self.rank}", message)
        until = time.monotonic() + self._timeout
        paths = [self._path(place, rank) for rank in range(self.size)]
        while not all(path.exists() for path in paths):
            self.check()
            if time.monotonic() > until:
                raise received_error(f"no message in {self.folder} for {self._timeout:g} s.", self.rank)
            time.sleep(POLL_SECONDS)
        return [path.read_bytes() for path in paths]

    def check(self, _: float = 0.0) -> None:
        """Raises a RemoteError if a member is lost, or waits for the next epoch."""
        for index, name in enumerate(self.members):
            if self._is_gone(name) or [*self.folder.glob(f"came-{self.epoch + 1}-{name}-*")]:
                text = f"replica {replica_number(name)} is lost, or has lost its connection to a different replica."
                raise received_error(text, index * self.pp_size)

    def close(self) -> None:
        """Waits until all members have called `close`, and removes the files of earlier epochs."""
        self.all_gather(b"")
        for path in self.folder.iterdir() if not self.rank else ():
            kind, _, rest = path.name.partition("-")
            if kind in ("came", "said") and int(rest.partition("-")[0]) < self.epoch:
                path.unlink(missing_ok=True)

    def _arrivals(self, epoch: int) -> dict[str, list[Any]]:
        """Returns the announcements for an epoch: for each replica, a list of announcements ordered by rank."""
        came: dict[str, list[Any]] = {}
        for path in sorted(self.folder.glob(f"came-{epoch}-*"), key=lambda path: int(path.name.rpartition("-")[2])):
            name = path.name.removeprefix(f"came-{epoch}-").rpartition("-")[0]
            if _is_arrival(arrival := self._read(path.name)):  # Otherwise its process writes it again.
                came.setdefault(name, []).append(arrival)
        return came

    def _is_gone(self, name: str) -> bool:
        """Returns whether a process of a replica has ended.

        Skips this process, because opening and closing its own file would release the lock.
        """
        for pp_rank in range(self.pp_size):
            if (name, pp_rank) != (self.name, self.pp_rank):
                with suppress(OSError), open(self._path("alive", name, pp_rank)) as alive:
                    fcntl.lockf(alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return True
        return False

    def _path(self, *parts: object) -> Path:
        return self.folder / "-".join(map(str, parts))

    def _read(self, name: str) -> Any:
        """Returns the content of a file, None if it does not exist, or a text if it is damaged."""
        try:
            return json.loads(self._path(name).read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return "damaged"

    def _put(self, name: str, message: bytes) -> None:
        new, path = self._path("new", self.name, self.pp_rank), self._path(name)
        with _naming(path):
            new.write_bytes(message)
            os.rename(new, path)  # atomic: other processes see the whole file or none

    def _claim(self, epoch: int, chosen: Mapping[str, Any]) -> None:
        new, path = self._path("new", self.name, self.pp_rank), self._path("epoch", epoch)
        with _naming(path):
            new.write_text(json.dumps(chosen))
            with suppress(FileExistsError):  # a different process has claimed it
                os.link(new, path)
            new.unlink()


def replica_number(name: str) -> int:
    """Returns the number in the name of a replica. The launcher of the replica sets this number."""
    return int(name.partition("-")[0])


class _CleanEnd:
    """Writes a file when this process ends without an error, which shows that the job is done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_clean, self._is_registered = True, False

    def register(self) -> None:
        """Registers the process, which has become a member."""
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self._write)

    def _write(self) -> None:
        if self.is_clean and getattr(sys, "last_value", None) is None:  # Python sets it for an unhandled exception.
            with suppress(OSError):
                self.path.touch()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raises errors of the file system with the file and a fix."""
    try:
        yield
    except OSError as error:
        text = (
            f"{FOLDER}: a file cannot be written ({error.strerror}). Check the folder and its free space, and restart"
        )
        raise OSError(error.errno, text, str(path)) from error


def _is_epoch(content: Any) -> bool:
    """Returns whether a process has written this content of the file of an epoch."""
    names = ("members", "rejoining", "same")
    return isinstance(content, dict) and all(isinstance(content.get(name), list) for name in names)


def _is_arrival(content: Any) -> bool:
    return isinstance(content, list) and [type(value) for value in content] == [bool, bool, str, str]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _digests_of(arrivals: Sequence[Sequence[Any]]) -> list[list[str]]:
    return [digests for _, _, *digests in arrivals]
