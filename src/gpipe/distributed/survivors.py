"""The processes of a pipe whose replicas have launchers of their own, and go on when one of them is lost."""

import io
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.meeting import Meeting, is_loss, number_of
from gpipe.distributed.mesh import Position
from gpipe.distributed.processes import Note, Processes
from gpipe.distributed.rendezvous import connect
from gpipe.distributed.stragglers import Stragglers
from gpipe.errors import RemoteError
from gpipe.runtime.context import Request
from gpipe.runtime.engine import Engine
from gpipe.stages.messages import Control, Label
from gpipe.stages.tree import Tree

T = TypeVar("T")
MOST_TRIES = 8  # to come together again, while others are lost in it
SILENCE = 15.0  # seconds after which a host that answers nothing is gone: sooner than where its loss ends all
PAUSE = 4  # times as long as a failed try to let others in no further one is made
NOT_JOINED = "survive=True: call pipe.join(optimizer, ...) in every process before the first step"

logger = logging.getLogger("gpipe")


class Survivors(Processes):
    """One of the processes of all replicas that take part, which come together at a meeting.

    All connections are made anew when a replica is lost or back; its run is then done again by those that are left,
    unless some have seen it end well.
    """

    survives = True

    def __init__(
        self, meeting: Meeting, engine: Engine, position: Position, *, costs: Sequence[float], measured: bool
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
        self.engine.among(replicas)
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
        """The replicas that have ended a connection; while they link up they may, and live."""
        return [self.meeting.members[rank // self.position.rows] for rank in self.gone()] if self._is_whole else []

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
