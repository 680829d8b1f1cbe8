"""A table, cut into steps: an action that computes, with the RECEIVE of what it takes and the SEND of what it gives.

    rank 1 of the table    RECEIVE0  RECEIVE1  F0  F1  R0  B0  SEND0  R1  B1  SEND1
    its steps              RECEIVE0+F0  RECEIVE1+F1  R0  B0+SEND0  R1  B1+SEND1

Every action of the table is in one step, and ranks do their steps in the order of the table. A RECEIVE may stand
there before its step: a message may come sooner than it is used. Where both ends of a route are on one rank, the
table sends nothing, and the rank hands the value over to itself.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpipe.schedule.action import MAIN, TRANSFERS, Action, Kind, Route
from gpipe.schedule.lower import halves
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.rules import BACKWARDS, fed_by, feeds, linearize
from gpipe.stages.messages import Label


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a route, for the stage there; `alone` is whether no other route starts at the same stage."""

    route: Route
    number: int  # in the program
    alone: bool

    @property
    def stash(self) -> str:
        """The name of the stash that a skip route carries."""
        return self.route.name.rpartition("/")[0]

    @property
    def is_main(self) -> bool:
        """Whether this is the main line."""
        return self.route.name == MAIN


@dataclass(frozen=True)
class Connections:
    """The routes of one stage, the main line last, and the micro-batches that it recomputes.

    Skips out of the stage are in the order in which their gradients are added: the last layer's pop first (note
    "Sums" in skips.py).
    """

    ins: tuple[Connection, ...]
    outs: tuple[Connection, ...]
    recomputed: frozenset[int]

    @classmethod
    def of(cls, program: Program, stage: int) -> "Connections":
        """Looks up how a stage is connected."""
        found = [
            Connection(route, number, alone=len(program.routes_from[route.source]) == 1)
            for number, route in enumerate(program.routes)
        ]
        row = program.rows[program.rank_of[stage]]
        recomputed = (a.micro_batch for a in row if a.kind is Kind.RECOMPUTE and a.stage == stage)
        return cls(
            tuple(sorted((one for one in found if one.route.target == stage), key=_order)),
            tuple(sorted((one for one in found if one.route.source == stage), key=_order)),
            frozenset(m for m in recomputed if m is not None),
        )

    @cached_property
    def skips_in(self) -> tuple[str, ...]:
        """The names of the skip routes that end here."""
        return tuple(one.route.name for one in self.ins if not one.is_main)

    @cached_property
    def skips_out(self) -> tuple[tuple[str, str], ...]:
        """The names of the skip routes that start here, each with the name of its stash."""
        return tuple((one.route.name, one.stash) for one in self.outs if not one.is_main)


def _order(one: Connection) -> tuple[bool, int]:
    return (True, 0) if one.is_main else (False, -int(one.route.name.rpartition("/")[2]))


class Transfer(NamedTuple):
    """A message that a step takes or gives: the rank at the other end, the label, and its SEND or RECEIVE.

    Where the other end is this rank itself, there is no rank and no action: the table has none either.
    """

    peer: int | None
    label: Label
    action: Action | None


class Step(NamedTuple):
    """An action that computes, or closes: what it takes from other stages, and gives to them."""

    rank: int
    at: int  # its place among the rank's actions
    action: Action
    stage: int
    micro_batch: int
    takes: tuple[Transfer, ...]
    gives: tuple[Transfer, ...]


@dataclass(frozen=True)
class Inbound:
    """What a rank receives from others: for each message the place of its RECEIVE in the row; and who sends any."""

    due: Mapping[Label, int]
    senders: frozenset[int]


@dataclass(frozen=True)
class CompiledRows:
    """A program or half of one, as it is walked.

    `order`, if given, is the order in which one thread alone walks it; any legal one gives the same bits.
    """

    program: Program
    connections: Sequence[Connections]
    order: Sequence[tuple[int, int, Action]] = ()

    @cached_property
    def rows(self) -> tuple[tuple[Step, ...], ...]:
        """What each rank does."""
        return tuple(
            tuple(self._steps((rank, at, action) for at, action in enumerate(row)))
            for rank, row in enumerate(self.program.rows)
        )

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What all ranks do, in one legal total order."""
        return tuple(self._steps(self.order or linearize(self.program)))

    @cached_property
    def inbound(self) -> tuple[Inbound, ...]:
        """What each rank receives."""
        return tuple(map(self._inbound, self.program.rows))

    def _inbound(self, row: Sequence[Action]) -> Inbound:
        numbers = {route: number for number, route in enumerate(self.program.routes)}
        due, senders = {}, set()
        for at, action in enumerate(row):
            if action.kind is Kind.RECEIVE:
                assert action.route is not None
                assert action.micro_batch is not None
                due[Label(numbers[action.route], action.micro_batch, action.carries_gradient)] = at
                senders.add(self.program.rank_of[action.peer.stage])
        return Inbound(due, frozenset(senders))

    def _steps(self, order: Iterable[tuple[int, int, Action]]) -> Iterator[Step]:
        for rank, at, action in order:
            if action.kind not in TRANSFERS:
                takes, gives = self._transfers(action)
                yield Step(rank, at, action, action.stage, action.micro_batch or 0, takes, gives)

    def _transfers(self, action: Action) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """What an action takes and gives: values down the routes, gradients up. A recompute waits for nothing."""
        ends, takes, gives = self.connections[action.stage], fed_by(action, self.program), feeds(action, self.program)
        return (
            tuple(self._transfer(Kind.RECEIVE, action, one) for one in (*ends.ins, *ends.outs) if one.route in takes),
            tuple(self._transfer(Kind.SEND, action, one) for one in (*ends.ins, *ends.outs) if one.route in gives),
        )

    def _transfer(self, kind: Kind, action: Action, one: Connection) -> Transfer:
        assert action.micro_batch is not None
        label = Label(one.number, action.micro_batch, action.kind in BACKWARDS)
        transfer = Action(kind, action.stage, action.micro_batch, one.route)
        peer = self.program.rank_of[transfer.peer.stage]
        if transfer in self.program.actions:
            return Transfer(peer, label, transfer)
        if peer != self.program.rank_of[action.stage]:
            raise ScheduleError(f"{action} needs {transfer}, which this program does not have")
        return Transfer(None, label, None)


@dataclass(frozen=True)
class CompiledProgram:
    """A program with its halves, and how its stages are connected."""

    whole: CompiledRows
    forward: CompiledRows
    backward: CompiledRows
    connections: tuple[Connections, ...]

    @property
    def program(self) -> Program:
        """The whole table."""
        return self.whole.program

    @cached_property
    def ties(self) -> bool:
        """Whether it adds up the gradients of shared weights itself."""
        return any(action.kind is Kind.TIE for action in self.program.actions)

    @cached_property
    def checksum(self) -> int:
        """The same for the same program."""
        return zlib.crc32(self.program.to_text().encode())

    @classmethod
    def of(cls, program: Program) -> "CompiledProgram":
        """Compiles a program that keeps the laws."""
        connections = tuple(Connections.of(program, stage) for stage in range(program.stages))
        forward, backward = (CompiledRows(half, connections) for half in halves(program))
        return cls(CompiledRows(program, connections), forward, backward, connections)
