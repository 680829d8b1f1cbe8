"""A table, compiled: actions that compute, each with the RECEIVE of what it takes and the SEND of what it gives.

    rank 1 of the table    RECEIVE0  RECEIVE1  F0  F1  R0  B0  SEND0  R1  B1  SEND1
    compiled               RECEIVE0+F0  RECEIVE1+F1  R0  B0+SEND0  R1  B1+SEND1

Every action of the table is in one of these, and ranks do them in the order of the table. A RECEIVE may stand there
before what it is for: a message may come sooner than it is used. Where both ends of a route are on one rank, the
table sends nothing, and the rank hands the value over to itself.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpipe.schedule.action import MAIN, SHARDS, TRANSFERS, Action, Kind, Route
from gpipe.schedule.lower import halves, place_shards
from gpipe.schedule.program import Program
from gpipe.schedule.rules import BACKWARDS, fed_by, feeds, linearize
from gpipe.stages.messages import Label


class Connections(NamedTuple):
    """The routes into and out of one stage, the main line last, and the micro-batches it recomputes or offloads.

    Skips out of the stage are in the order in which their gradients are added: the last layer's pop first (note
    "Sums" in skips.py). `skips_in` and `skips_out` are the names of skip routes, and for these those of the stashes.
    """

    ins: tuple[Route, ...]
    outs: tuple[Route, ...]
    skips_in: tuple[str, ...]
    skips_out: tuple[tuple[str, str], ...]
    recomputed: frozenset[int]
    offloaded: frozenset[int]

    @classmethod
    def of(cls, program: Program, stage: int) -> "Connections":
        row = [action for action in program.table[program.rank_of[stage]] if action.stage == stage]
        both = (program.routes_into, program.routes_from)
        ins, outs = (tuple(sorted(routes[stage], key=_order)) for routes in both)
        return cls(
            ins,
            outs,
            tuple(route.name for route in ins[:-1]),
            tuple((route.name, route.name.rpartition("/")[0]) for route in outs[:-1]),
            frozenset(a.micro_batch or 0 for a in row if a.kind is Kind.RECOMPUTE),
            frozenset(a.micro_batch or 0 for a in row if a.kind is Kind.OFFLOAD),
        )


def _order(route: Route) -> tuple[bool, int]:
    return (True, 0) if route.name == MAIN else (False, -int(route.name.rpartition("/")[2]))


class Transfer(NamedTuple):
    """A message that an action takes or gives: the rank at the other end, the label, and its SEND or RECEIVE.

    Where the other end is this rank itself, there is no rank and no action: the table has none either.
    """

    peer: int | None
    label: Label
    action: Action | None


class CompiledAction(NamedTuple):
    """An action that computes, or closes: what it takes from other stages, and gives to them."""

    rank: int
    at: int  # its place among the rank's actions
    action: Action
    stage: int
    micro_batch: int
    takes: tuple[Transfer, ...]
    gives: tuple[Transfer, ...]


@dataclass(frozen=True)
class CompiledTable:
    """A program or half of one, as it is walked."""

    program: Program
    connections: Sequence[Connections]

    @cached_property
    def actions(self) -> tuple[CompiledAction, ...]:
        """What all ranks do, in one legal total order; any gives the same bits."""
        return tuple(
            CompiledAction(rank, at, action, action.stage, action.micro_batch or 0, *self._transfers(action))
            for rank, at, action in linearize(self.program)
            if action.kind not in TRANSFERS
        )

    @cached_property
    def rows(self) -> list[list[CompiledAction]]:
        rows: list[list[CompiledAction]] = [[] for _ in self.program.table]
        for action in self.actions:
            rows[action.rank].append(action)
        return rows

    @cached_property
    def inbound(self) -> Sequence[tuple[Mapping[Label, int], Collection[int]]]:
        """What each rank receives from others: the place of each message's RECEIVE in the row, and who sends any."""
        found = []
        for row, actions in zip(self.program.table, self.rows, strict=True):
            place = {action: at for at, action in enumerate(row)}
            takes = [taken for action in actions for taken in action.takes if taken.peer is not None]
            due = {label: place[action] for _, label, action in takes if action is not None}
            found.append((due, {peer for peer, _, _ in takes if peer is not None}))
        return found

    def _transfers(self, action: Action) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """What an action takes and gives: values down the routes, gradients up. A recompute waits for nothing."""
        ends, takes, gives = self.connections[action.stage], fed_by(action, self.program), feeds(action, self.program)
        routes = (*ends.ins, *ends.outs)
        return (
            tuple(self._transfer(Kind.RECEIVE, action, route) for route in routes if route in takes),
            tuple(self._transfer(Kind.SEND, action, route) for route in routes if route in gives),
        )

    def _transfer(self, kind: Kind, action: Action, route: Route) -> Transfer:
        assert action.micro_batch is not None
        label = Label(self.program.routes.index(route), action.micro_batch, action.kind in BACKWARDS)
        transfer = Action(kind, action.stage, action.micro_batch, route)
        if transfer not in self.program.actions:
            return Transfer(None, label, None)
        return Transfer(self.program.rank_of[transfer.peer.stage], label, transfer)


@dataclass(frozen=True)
class CompiledProgram:
    """A program with its halves, and how its stages are connected."""

    whole: CompiledTable
    forward: CompiledTable
    backward: CompiledTable
    connections: tuple[Connections, ...]

    @property
    def program(self) -> Program:
        return self.whole.program

    @cached_property
    def ties(self) -> bool:
        """Whether it adds up the gradients of shared weights itself."""
        return any(action.kind is Kind.TIE for action in self.program.actions)

    @cached_property
    def checksum(self) -> int:
        """The same for the same program, whatever is sharded: that processes with other stages may not know yet."""
        return zlib.crc32(self.program.only({*Kind} - SHARDS).to_text().encode())

    @classmethod
    def of(cls, program: Program, sharded: Collection[int] = ()) -> "CompiledProgram":
        """Compiles a program that keeps the laws, with what gathers and frees the weights of sharded stages."""
        connections = tuple(Connections.of(program, stage) for stage in range(program.stages))
        every = (place_shards(each, sharded) for each in (program, *halves(program)))
        whole, forward, backward = (CompiledTable(each, connections) for each in every)
        return cls(whole, forward, backward, connections)
