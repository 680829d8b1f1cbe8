"""Joins each SEND and RECEIVE of a table to the action that it is for.

    rank 1 of the table    RECEIVE0  RECEIVE1  F0  F1  R0  B0  SEND0  R1  B1  SEND1
    compiled               RECEIVE0+F0  RECEIVE1+F1  R0  B0+SEND0  R1  B1+SEND1

Every action of the table is in one compiled action, and ranks perform them in the order of the table. A RECEIVE may
come earlier in the table than the action that uses its message. If both ends of a route are on one rank, the table
has no SEND, and the rank keeps the value.
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


class StageRoutes(NamedTuple):
    """The routes into and out of one stage, the main line last, and the micro-batches of each kind of its actions.

    Skips out of the stage are in the order in which their gradients are added: the last layer's pop first (note
    "Sums" in skips.py). `skips_in` has the names of skip routes, `skips_out` the names of routes and stashes.
    """

    ins: tuple[Route, ...]
    outs: tuple[Route, ...]
    skips_in: tuple[str, ...]
    skips_out: tuple[tuple[str, str], ...]
    micro_batches: Mapping[Kind, Collection[int]]

    @classmethod
    def of(cls, program: Program, stage: int) -> "StageRoutes":
        micro_batches: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        for action in program.table[program.rank_of[stage]]:
            if action.stage == stage:
                micro_batches[action.kind].add(action.micro_batch or 0)
        both = (program.routes_into, program.routes_from)
        ins, outs = (tuple(sorted(routes[stage], key=_order)) for routes in both)
        return cls(
            ins,
            outs,
            tuple(route.name for route in ins[:-1]),
            tuple((route.name, route.name.rpartition("/")[0]) for route in outs[:-1]),
            micro_batches,
        )


def _order(route: Route) -> tuple[bool, int]:
    return (True, 0) if route.name == MAIN else (False, -int(route.name.rpartition("/")[2]))


class Transfer(NamedTuple):
    """A message of an action: the rank at the other end, the label, and its SEND or RECEIVE.

    Both are None if the other end is on the same rank.
    """

    peer: int | None
    label: Label
    action: Action | None


class CompiledAction(NamedTuple):
    """An action that computes, or closes, with the messages that it receives from other stages and sends to them."""

    rank: int
    at: int  # its place among the rank's actions
    action: Action
    stage: int
    micro_batch: int
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


@dataclass(frozen=True)
class CompiledTable:
    """A program, or half of one, as ranks perform it."""

    program: Program
    routes: Sequence[StageRoutes]

    @cached_property
    def actions(self) -> tuple[CompiledAction, ...]:
        """The actions of all ranks, in one legal total order. Every legal order has the same results."""
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
        """For each rank, the place of the RECEIVE of each message in its row, and the ranks that send any."""
        found = []
        for row, actions in zip(self.program.table, self.rows, strict=True):
            place = {action: at for at, action in enumerate(row)}
            receives = [each for action in actions for each in action.receives if each.peer is not None]
            due = {label: place[action] for _, label, action in receives if action is not None}
            found.append((due, {peer for peer, _, _ in receives if peer is not None}))
        return found

    def _transfers(self, action: Action) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """Returns the messages that an action receives and sends."""
        ends, receives, sends = self.routes[action.stage], fed_by(action, self.program), feeds(action, self.program)
        routes = (*ends.ins, *ends.outs)
        return (
            tuple(self._transfer(Kind.RECEIVE, action, route) for route in routes if route in receives),
            tuple(self._transfer(Kind.SEND, action, route) for route in routes if route in sends),
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
    """A program with its halves, and the routes of its stages."""

    whole: CompiledTable
    forward: CompiledTable
    backward: CompiledTable
    routes: tuple[StageRoutes, ...]

    @property
    def program(self) -> Program:
        return self.whole.program

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions."""
        return frozenset(action.kind for action in self.program.actions)

    @cached_property
    def checksum(self) -> int:
        """The same for the same program, whatever is gathered: processes with other stages may not know that yet."""
        return zlib.crc32(self.program.only({*Kind} - SHARDS).to_text().encode())

    @classmethod
    def of(cls, program: Program, gathered: Collection[int] = ()) -> "CompiledProgram":
        """Compiles a program that keeps the laws; some stages gather their weights from replicas, and free them."""
        routes = tuple(StageRoutes.of(program, stage) for stage in range(program.stages))
        every = (place_shards(each, gathered) for each in (program, *halves(program)))
        whole, forward, backward = (CompiledTable(each, routes) for each in every)
        return cls(whole, forward, backward, routes)
