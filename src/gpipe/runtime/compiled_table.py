"""Compiles a program: joins each SEND or RECEIVE to the action that computes or uses its message.

For example::

    rank 1 of a program    RECEIVE0  RECEIVE1  F0  F1  R0  B0  SEND0  R1  B1  SEND1
    compiled               RECEIVE0+F0  RECEIVE1+F1  R0  B0+SEND0  R1  B1+SEND1

Ranks perform the compiled actions in the order of the program. A RECEIVE can come earlier in the program than the
action that uses its message. If both ends of a route are on one rank, the program has no SEND or RECEIVE, and the
rank keeps the value.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpipe.schedule.action import MAIN, SHARDS, TRANSFERS, Action, Kind, Route
from gpipe.schedule.laws import check
from gpipe.schedule.lower import halves, place_loads, place_shards
from gpipe.schedule.program import Program
from gpipe.schedule.rules import BACKWARDS, fed_by, feeds, linearize
from gpipe.stages.messages import Label


class StageRoutes(NamedTuple):
    """The routes of one stage, and the micro-batches of its actions.

    Attributes:
        ins: The routes into the stage. The main route is last.
        outs: The routes out of the stage. The main route is last. Skips are in the order in which their gradients are
            summed: the skip to the last layer comes first (note "Sums" in `skips.py`).
        skips_in: The names of the skips in `ins`.
        skips_out: For each skip in `outs`, its name and the name of its stash.
        micro_batches: For each kind of action, the micro-batches that have this action at the stage.
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
    """A message that an action sends or receives: the other rank, the label, and the SEND or RECEIVE action.

    `peer` and `action` are None if sender and receiver are stages on the same rank.
    """

    peer: int | None
    label: Label
    action: Action | None


class CompiledAction(NamedTuple):
    """An action other than SEND and RECEIVE, with the messages that it receives and sends."""

    rank: int
    position: int  # in the row of the rank
    action: Action
    stage: int
    micro_batch: int
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


@dataclass(frozen=True)
class CompiledTable:
    """A program, or its forward or backward half, as compiled actions."""

    program: Program
    routes: Sequence[StageRoutes]

    @cached_property
    def actions(self) -> tuple[CompiledAction, ...]:
        """The actions of all ranks in one legal order. All legal orders have the same results."""
        return tuple(
            CompiledAction(rank, position, action, action.stage, action.micro_batch or 0, *self._transfers(action))
            for rank, position, action in linearize(self.program)
            if action.kind not in TRANSFERS
        )

    @cached_property
    def rows(self) -> list[list[CompiledAction]]:
        """The actions of each rank, in order."""
        rows: list[list[CompiledAction]] = [[] for _ in self.program.table]
        for action in self.actions:
            rows[action.rank].append(action)
        return rows

    @cached_property
    def inbound(self) -> Sequence[tuple[Mapping[Label, int], Collection[int]]]:
        """For each rank, the position of each RECEIVE in its row by label, and the ranks that send messages to it."""
        inbound = []
        for row, actions in zip(self.program.table, self.rows, strict=True):
            positions = {action: position for position, action in enumerate(row)}
            receives = [transfer for action in actions for transfer in action.receives if transfer.peer is not None]
            due = {label: positions[action] for _, label, action in receives if action is not None}
            inbound.append((due, {peer for peer, _, _ in receives if peer is not None}))
        return inbound

    def _transfers(self, action: Action) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """Returns the messages that an action receives, and the messages that it sends."""
        receives, sends = fed_by(action, self.program), feeds(action, self.program)
        routes = (*self.routes[action.stage].ins, *self.routes[action.stage].outs)
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
    """A compiled program, its forward and backward halves, and the routes of its stages."""

    whole: CompiledTable
    forward: CompiledTable
    backward: CompiledTable
    routes: tuple[StageRoutes, ...]

    @property
    def program(self) -> Program:
        return self.whole.program

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of actions in the program."""
        return frozenset(action.kind for action in self.program.actions)

    @cached_property
    def checksum(self) -> int:
        """A checksum that processes compare. It excludes UNSHARD and RESHARD actions, which may differ."""
        return zlib.crc32(self.program.only({*Kind} - SHARDS).to_text().encode())

    @classmethod
    def of(cls, program: Program, gathered: Collection[int] = (), resident: int | None = None) -> "CompiledProgram":
        """Compiles a valid program.

        Args:
            program: The program.
            gathered: The stages whose weights are all-gathered from replicas before use.
            resident: The number of stages of a rank whose weights are loaded at the same time. None if weights stay
                on the device.

        Returns:
            The compiled program and its halves.
        """
        routes = tuple(StageRoutes.of(program, stage) for stage in range(program.stages))
        programs = [place_shards(each, gathered) for each in (program, *halves(program))]
        if resident is not None:  # Each half loads and frees, because weights are on the host between the halves.
            programs = [place_loads(each, range(program.stages), resident) for each in programs]
            check(programs[0])
        whole, forward, backward = (CompiledTable(each, routes) for each in programs)
        return cls(whole, forward, backward, routes)
