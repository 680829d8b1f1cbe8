"""The processes of one pipe: their connections, and what they say to each other between runs."""

import io
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from gpipe.distributed.agree import CALLED, Communicator, follow_first
from gpipe.distributed.context import ProcessContext
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.meeting import Meeting, is_loss, number_of
from gpipe.distributed.mesh import Position
from gpipe.distributed.nccl import groups_for
from gpipe.distributed.rendezvous import LINKING, Rendezvous, connect
from gpipe.distributed.stragglers import Stragglers
from gpipe.errors import RemoteError
from gpipe.runtime.context import Context, Request
from gpipe.runtime.engine import Engine
from gpipe.stages.batchnorm import find_replica_drift
from gpipe.stages.messages import Control, Label
from gpipe.stages.tree import Tree

T = TypeVar("T")
MOST_TRIES = 8  # to come together again, while others are lost in it
NOT_JOINED = "survive=True: call pipe.join(optimizer, ...) in every process before the first step"

logger = logging.getLogger("gpipe")


class OneProcess(Communicator):
    """The only process of a pipe."""

    position: Position | None = None
    meeting: Meeting | None = None  # where replicas that have launchers of their own come together
    keeps: tuple[Callable[[], Tree], Callable[[Any], object]] | None = (
        None  # the state of a replica, and what takes it
    )

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.context: Callable[[], Context] = partial(Context, max(engine.placement) + 1)
        """Makes what a mini-batch shares with other processes: here nothing."""

    def gather(self, request: Request, value: Tree) -> list[Any]:
        """Gives the value."""
        return [value]

    def survive(self, attempt: Callable[[], T], late: Callable[[list[Any]], T], undo: Callable[[], object]) -> T:
        """Does what all processes do together."""
        return attempt()

    @property
    def living(self) -> list[int]:
        """The replicas that take part, by the numbers that their launchers know."""
        return [0]

    def let_in(self) -> None:
        """Between two steps: comes together with replicas that wait for it."""

    def regroup(self, *, admits: bool = False) -> list[Any] | None:
        """Comes together with all replicas that live."""
        return None

    def findings(self) -> list[str]:
        """What is to be said of the stages before a run: nothing."""
        return []

    def close(self) -> None:
        """Nothing to close."""


class Processes(OneProcess):
    """One of several processes of a pipe; which is slow is told by the costs of stages, in seconds if `measured`."""

    def __init__(
        self,
        engine: Engine,
        position: Position,
        *,
        sync_batch_norm: bool = False,
        costs: Sequence[float] = (),
        measured: bool = False,
        meeting: Meeting | None = None,
    ) -> None:
        super().__init__(engine)
        self.context = partial(ProcessContext, self)
        self.position: Position = position
        self.sync_batch_norm = sync_batch_norm
        self.rank, self.size = position.rank, len(position.members)
        self._stragglers = partial(Stragglers, engine.placement, costs, measured=measured)
        self.stragglers = self._stragglers(replicas=position.replicas)
        self.meeting = meeting
        self._endpoint: Endpoint | None = None
        self._is_whole = False  # whether all have come to the end of linking up
        self._awaited = False  # whether a replica waits to be let in
        self._runs, self._last = 0, list[Any]()  # how many runs have ended well, and with what the last

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves the connections behind."""
        return {**vars(self), "_endpoint": None}

    def findings(self) -> list[str]:
        """What is to be said of these stages before a run."""
        if self.engine.deferred_batch_norm or self.sync_batch_norm or self.position.replicas == 1:
            return []
        return find_replica_drift([layer.module for stage in self.engine.own for layer in stage.layers])

    def link(self, rendezvous: Rendezvous) -> None:
        """Connects with the other processes, who do so at the same time; the last that the rendezvous is for."""
        plain = rendezvous.tls is None or len({*rendezvous.hosts}) == 1
        groups = groups_for(self.position, self.engine.crossings(), plain=plain)
        self._endpoint = connect(rendezvous, self.position, groups)

    def linked(self) -> Endpoint:
        """The connections, made anew by all processes at once if they were closed."""
        if self._endpoint is None and self.meeting is not None:
            self.regroup()
        if self._endpoint is None:
            with Rendezvous() as rendezvous:
                rendezvous.greet(self.position)
                rendezvous.phase = LINKING
                self.link(rendezvous)
        assert self._endpoint is not None
        return self._endpoint

    def gather(self, request: Request, value: Tree) -> list[Any]:
        """Gathers a value from all processes between runs, by rank."""

        def attempt() -> list[Any]:
            with self.engine.threads.alone(), self.linked().in_run(notes=False) as endpoint:
                first = self.position.rank_of(self.engine.placement[0])
                follow_first(endpoint, self.position, first, {CALLED: request})
                return self.end(value)

        return self.survive(attempt, list, list)

    def end(self, value: Tree) -> list[Any]:
        """Ends a run once all processes have come to its end; gathers a value from each, by rank."""
        endpoint = self.linked()
        if self.meeting is None:
            return endpoint.exchange(value)
        every = endpoint.exchange((value, not self.rank and self.meeting.waited_for()))
        self._awaited = every[0][1]
        self._runs, self._last = self._runs + 1, [theirs for theirs, _ in every]
        return self._last

    def survive(self, attempt: Callable[[], T], late: Callable[[list[Any]], T], undo: Callable[[], object]) -> T:
        """Does what all processes do together, and where a replica is lost in it again with those that are left.

        If some have seen it end well before the loss it has ended for all: `late` takes what these have gathered.
        Else `undo` puts back what it has changed.
        """
        if self.meeting is None:
            return attempt()
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
        """The replicas that take part, by the numbers that their launchers know."""
        return [*range(self.position.replicas)] if self.meeting is None else [*map(number_of, self.meeting.members)]

    def let_in(self) -> None:
        """Between two steps: comes together with those that wait, and gives them the state."""
        if self.meeting is not None and self.keeps is None:
            raise ValueError(NOT_JOINED)
        if self._awaited:
            self.regroup(admits=True)

    def regroup(self, *, admits: bool = False) -> list[Any] | None:
        """Comes together with all replicas that live; gives what a run has gathered that ended for others alone."""
        assert self.meeting is not None
        if self.keeps is None:
            raise ValueError(NOT_JOINED)
        before, runs = self.meeting.members, self._runs
        for _ in range(MOST_TRIES):
            self.meeting.meet(self._lost, admits=admits)  # what it raises is the end of this replica
            self._is_whole = False
            if self._endpoint is not None:
                self._endpoint.close()
            try:
                gathered = self._link_anew(self.meeting, *self.keeps)
            except RemoteError as error:
                if not is_loss(error):
                    raise
            else:
                self._tell(before)
                return gathered if runs < self._runs else None
        raise RuntimeError(f"{MOST_TRIES} times a process was lost while the others came together; start anew")

    def _link_anew(self, meeting: Meeting, keep: Callable[[], Tree], take: Callable[[Any], object]) -> list[Any]:
        meeting.greet()
        replicas = len(meeting.members)
        replica = meeting.members.index(meeting.name)
        self.position = replace(self.position, replica=replica, replicas=replicas, members=tuple(range(meeting.size)))
        self.rank, self.size = meeting.rank, meeting.size
        self.engine.among(replicas)
        self.stragglers = self._stragglers(replicas=replicas)
        self._endpoint = connect(meeting, self.position, None)
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
        self._is_whole, meeting.fresh = True, False
        return self._last

    def _lost(self) -> list[str]:
        """The replicas that have ended a connection; while they link up they may, and live."""
        assert self.meeting is not None
        return [self.meeting.members[rank // self.position.rows] for rank in self.gone()] if self._is_whole else []

    def _tell(self, before: Sequence[str]) -> None:
        assert self.meeting is not None
        now = self.meeting.members
        for names, words in ((before, "is lost"), (now, "is back, with the state of the others")):
            for name in names if before else ():
                if name not in (now if names is before else before) and not self.position.row:
                    logger.warning("replica %d %s; %d go on", number_of(name), words, len(now))

    def exchange(self, message: bytes, /) -> list[bytes]:
        """Sends a message to all processes between runs, and gathers those of all, by rank."""
        return self.gather(Request.EXCHANGE, message)

    def gone(self) -> Collection[int]:
        """The ranks to which there is no connection any more, as far as that is known. Any thread may ask."""
        endpoint = self._endpoint  # once: another thread may close
        return () if endpoint is None else endpoint.detector.gone()

    def close(self) -> None:
        """Ends the connections; the next run makes new ones."""
        if self._endpoint is not None:
            runs = self._endpoint.detector.run
            self._endpoint.close(f"rank {self.rank} closed its pipe, after {runs} run{'s' * (runs != 1)}")
            self._endpoint = None


def _packed(state: Tree) -> torch.Tensor:
    """A state as one tensor, as `torch.save` has it: it may hold what messages do not."""
    written = io.BytesIO()
    torch.save(state, written)
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def _unpacked(held: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(held.numpy().tobytes()), map_location="cpu", weights_only=True)
