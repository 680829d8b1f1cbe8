"""What a rank does in one step, and how a stage is connected to others: as the program says it."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpipe.plan.action import MAIN, Action, Kind, Route
from gpipe.plan.program import Program
from gpipe.values.messages import Label


@dataclass(frozen=True, slots=True)
class Connection:
    """A route as the stage at one of its ends sees it; `alone` is whether no other route starts where it does."""

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
    """A message that a step takes or gives, and the rank at the other end: None if that is this rank itself."""

    peer: int | None
    label: Label


class Step(NamedTuple):
    """One action of a row as a worker does it: what it takes from other stages, what it gives to them."""

    rank: int
    at: int  # its place in the program's row
    action: Action
    stage: int
    micro_batch: int
    takes: tuple[Transfer, ...]
    gives: tuple[Transfer, ...]
