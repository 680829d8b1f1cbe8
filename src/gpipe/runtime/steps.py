"""How a stage is connected in a program: looked up once, used for every micro-batch."""

from dataclasses import dataclass
from functools import cached_property

from gpipe.plan.action import MAIN, Kind
from gpipe.plan.program import Program


@dataclass(frozen=True, slots=True)
class Wire:
    """One route as its stage sees it: its number in the program, its name, and the rank at the other end.

    `alone` is whether no other route starts where it does.
    """

    number: int
    name: str
    rank: int
    alone: bool

    @property
    def stash(self) -> str:
        """The name of the stash that a skip route carries."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True)
class Wiring:
    """The wires of one stage, the main line last, and the micro-batches that it recomputes.

    Skips out of the stage are in the order in which their gradients are added: the last layer's pop first (note
    "Sums" in skips.py).
    """

    ins: tuple[Wire, ...]
    outs: tuple[Wire, ...]
    recomputed: frozenset[int]

    @cached_property
    def skips_in(self) -> tuple[str, ...]:
        """The names of the skip routes that end here."""
        return tuple(wire.name for wire in self.ins if wire.name != MAIN)

    @cached_property
    def skips_out(self) -> tuple[tuple[str, str], ...]:
        """The names of the skip routes that start here, each with the name of its stash."""
        return tuple((wire.name, wire.stash) for wire in self.outs if wire.name != MAIN)


def wiring(program: Program, stage: int) -> Wiring:
    """Looks up how a stage is connected."""
    ins, outs = [], []
    for number, route in enumerate(program.routes):
        alone = len(program.routes_from[route.source]) == 1
        if route.target == stage:
            ins.append(Wire(number, route.name, program.rank_of[route.source], alone))
        if route.source == stage:
            outs.append(Wire(number, route.name, program.rank_of[route.target], alone))
    row = program.rows[program.rank_of[stage]]
    recomputed = (a.micro_batch for a in row if a.kind is Kind.RECOMPUTE and a.stage == stage)
    return Wiring(
        tuple(sorted(ins, key=_place)),
        tuple(sorted(outs, key=_place)),
        frozenset(m for m in recomputed if m is not None),
    )


def _place(wire: Wire) -> tuple[bool, int]:
    return (True, 0) if wire.name == MAIN else (False, -int(wire.name.rpartition("/")[2]))
