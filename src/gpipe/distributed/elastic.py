"""Implements `survive=True`: a pipe continues if a replica is lost, and admits replicas that come back."""

import io
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from gpipe.distributed.communicator import Communicator
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.folder_rendezvous import FolderRendezvous, replica_number
from gpipe.distributed.linking import connect
from gpipe.distributed.mesh import Position
from gpipe.distributed.processes import Processes, Snapshot
from gpipe.distributed.rendezvous import Rendezvous
from gpipe.distributed.stragglers import Stragglers
from gpipe.errors import RemoteError
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.stages.messages import Control, Label, Request
from gpipe.stages.tree import Tree

T = TypeVar("T")
MOST_ATTEMPTS = 8  # to connect again, while more replicas are lost
SILENCE_SECONDS = 15.0  # a host that does not answer for this time is lost; shorter than without survive=True
PAUSE_FACTOR = 4  # after a failed attempt to admit replicas, wait this multiple of its duration before the next
NOT_JOINED = "survive=True requires join(). Call pipe.join(optimizer, ...) in each process first. [join-first]"

logger = logging.getLogger("gpipe")


def is_loss(error: RemoteError) -> bool:
    """Returns whether an error reports that a process was lost or interrupted, and not an exception in a process."""
    return error.received and error.type_name in ("", KeyboardInterrupt.__name__)


class Replica(Communicator):
    """The processes of one replica before `join`. They are not connected, so they meet for each message."""

    def __init__(self, position: Position) -> None:
        self.position, self.rank, self.size = position, position.rank, position.pp_size

    def all_gather(self, message: bytes, /) -> list[bytes]:
        with Rendezvous() as rendezvous:
            rendezvous.greet(self.position)
            gathered = rendezvous.all_gather(message)
            rendezvous.close()
            return gathered


class ElasticProcesses(Processes):
    """One process of a pipe that survives the loss of replicas.

    When a replica is lost or comes back, all processes connect again. The processes then repeat the interrupted run,
    unless a process has already completed it.

    Attributes:
        rendezvous: The rendezvous of the replicas.
        state_functions: The functions that `join` received: `get_state` and `set_state`.
        received_state: Whether this replica received the state of a different replica when the replicas last
            connected.
    """

    def __init__(
        self,
        rendezvous: FolderRendezvous,
        engine: PipelineStages,
        position: Position,
        *,
        costs: Sequence[float],
        measured: bool,
    ) -> None:
        super().__init__(engine, position, costs=costs, measured=measured)
        self.rendezvous = rendezvous
        self._stragglers = partial(Stragglers, engine.placement, costs, measured=measured)
        self.state_functions: tuple[Callable[[], Tree], Callable[[Any], object]] | None = None
        self.received_state = False
        self._is_connected = False  # whether all processes have completed the connection
        self._replica_waits = False  # whether a replica waits to be admitted
        self._admits_from = 0.0
        self._runs, self._last = 0, list[Any]()  # the number of successful runs, and the values of the last one

    def join(
        self,
        get_state: Callable[[], Tree],
        set_state: Callable[[Any], object],
        digests: Sequence[str],
        classes: Sequence[str],
    ) -> None:
        self.state_functions = get_state, set_state
        self.rendezvous.describe_join(classes)
        self.regroup()
        if not self.received_state:
            self._check_initial_state(digests)

    def _check_initial_state(self, digests: Sequence[str]) -> None:
        gathered = self.gather(Request.EXCHANGE, list(digests))
        for rank, remote in enumerate(gathered):
            first = gathered[rank % self.position.pp_size]
            if remote != first:
                replica = replica_number(self.rendezvous.members[rank // self.position.pp_size])
                what = "weights or buffers" if remote[:1] != first[:1] else "optimizers or other arguments of join()"
                raise ValueError(
                    f"Replicas {self.living[0]} and {replica} begin with different {what}. Build and initialize the "
                    f"model in the same way in every replica: call torch.manual_seed first, and pass the same "
                    f"arguments. [replicas-begin-differently]"
                )

    @property
    def survives(self) -> bool:  # type: ignore[override]  # constant in other classes
        return self.state_functions is not None

    @property
    def readers(self) -> Communicator:
        return self if self.survives else Replica(self.position)

    def note_signal(self) -> None:
        self.rendezvous.note_signal()

    def linked(self) -> Endpoint:
        if self._endpoint is None:
            self.regroup()
        return super().linked()

    def gather(self, request: Request, value: Tree) -> list[Any]:
        gather = super().gather
        return self.survive(lambda: gather(request, value), list, lambda: list)

    def finish_run(self, value: Tree) -> list[Any]:
        may_admit = not self.rank and time.monotonic() > self._admits_from
        gathered = super().finish_run((value, may_admit and self.rendezvous.has_waiting_replica()))
        self._replica_waits = gathered[0][1]
        self._runs, self._last = self._runs + 1, [remote for remote, _ in gathered]
        return self._last

    def survive(self, attempt: Callable[[], T], late: Callable[[list[Any]], T], snapshot: Snapshot) -> T:
        undo = snapshot()
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
        return [*map(replica_number, self.rendezvous.members)]

    def admit_replicas(self) -> None:
        if self._replica_waits:
            self.regroup(admits=True)

    def regroup(self, *, admits: bool = False) -> list[Any] | None:
        """Connects all living replicas again.

        Returns:
            The gathered values of the last run if the run has ended on other processes but not on this process.
            Otherwise None.

        Raises:
            RemoteError: If this replica must end.
            RuntimeError: If the replicas could not connect.
        """
        if self.state_functions is None:
            raise ValueError(NOT_JOINED)
        before, runs, failure = self.rendezvous.members, self._runs, None
        for _ in range(MOST_ATTEMPTS):
            self.rendezvous.meet(self._lost, admits=admits)
            self._is_connected, begun = False, time.monotonic()
            if self._endpoint is not None:
                self._endpoint.close()
            try:
                gathered = self._connect(*self.state_functions)
            except RemoteError as error:
                failure, now, rejoining = error, time.monotonic(), self.rendezvous.rejoining
                if not is_loss(error) or self.rendezvous.name in rejoining:  # its launcher starts it again
                    raise
                if rejoining:
                    self._admits_from = now + PAUSE_FACTOR * (now - begun)
            else:
                self._log_changes(before)
                return gathered if runs < self._runs else None
        raise RuntimeError(
            f"Replicas could not connect in {MOST_ATTEMPTS} attempts. Restart all replicas."
        ) from failure

    def _connect(self, get_state: Callable[[], Tree], set_state: Callable[[Any], object]) -> list[Any]:
        """Connects all replicas, and sends the training state to rejoining replicas.

        Returns:
            The gathered values of the last run.
        """
        rendezvous = self.rendezvous
        rendezvous.greet()
        replicas, members = len(rendezvous.members), tuple(range(rendezvous.size))
        replica = rendezvous.members.index(rendezvous.name)
        self.position = replace(self.position, replica=replica, replicas=replicas, members=members)
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.engine.set_replicas(replicas)
        self.stragglers = self._stragglers(replicas=replicas)
        endpoint = connect(rendezvous, self.position, None, SILENCE_SECONDS)
        self._use(endpoint)
        with endpoint.in_run(records=False):
            runs, last = max(endpoint.finish_run((self._runs, self._last)), key=lambda remote: remote[0])
        with endpoint.in_run(records=False):
            rejoining = [rendezvous.members.index(name) for name in rendezvous.rejoining]
            source = next(index for index in range(replicas) if index not in rejoining)
            ranks = [self.position.rank_of(self.position.pp_rank, index) for index in (source, *rejoining)]
            if rejoining and self.rank in ranks:
                state = _serialize(get_state()) if self.rank == ranks[0] else None
                state = endpoint.broadcast(ranks[0], ranks, Label(Control.STATE, 0, gradient=False), state)
                if self.rank != ranks[0]:
                    set_state(_deserialize(state))
            endpoint.finish_run(None)
        self._runs, self._last, self._replica_waits = runs, list(last), False
        self.received_state = rendezvous.name in rendezvous.rejoining
        self._is_connected, rendezvous.fresh = True, False
        return self._last

    def _lost(self) -> list[str]:
        """Returns the replicas whose connections have ended, or an empty list while the processes connect.

        In a network partition, connections end one after the other. A host that has not answered for half the limit
        counts as lost, because its connections will end soon.
        """
        if not self._is_connected or self._endpoint is None:
            return []
        ranks = {*self.gone(), *self._endpoint.detector.silent(SILENCE_SECONDS / 2)}
        return [self.rendezvous.members[rank // self.position.pp_size] for rank in ranks]

    def _log_changes(self, before: Sequence[str]) -> None:
        now = self.rendezvous.members
        for name in {*before} ^ {*now} if before and not self.position.pp_rank else ():
            text = "is lost" if name in before else "is back, with the state of the other replicas"
            logger.warning("Replica %d %s. %d replicas continue.", replica_number(name), text, len(now))


def _serialize(state: Tree) -> torch.Tensor:
    """Serializes a state with `torch.save`, because messages do not support all values in a state."""
    written = io.BytesIO()
    torch.save(state, written)
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def _deserialize(state: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(state.numpy().tobytes()), map_location="cpu", weights_only=True)
