"""How a stage is connected in a program: looked up once, used for every micro-batch."""

from dataclasses import dataclass
from functools import cached_property

from gpipe.plan.action import MAIN, Kind, Route
from gpipe.plan.program import Program


@dataclass(frozen=True, slots=True)
class Wire:
    """One route as its stage sees it: its number in the program, the stage and rank at the other end."""

    route: Route
    number: int
    name: str
    stage: int
    rank: int
    is_local: bool  # both ends on one rank: handed over in the store, never sent

    @property
    def stash(self) -> str:
        """The name of the stash that a skip route carries."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True)
class Wiring:
    """The wires of one stage, and the micro-batches that it recomputes.

    `skips_out` has the last layer's pop first (note "Sums" in skips.py).
    """

    main_in: Wire | None
    main_out: Wire | None
    skips_in: tuple[Wire, ...]
    skips_out: tuple[Wire, ...]
    recomputed: frozenset[int]

    @cached_property
    def stashes(self) -> dict[str, str]:
        """The stash that each outgoing skip route carries."""
        return {wire.name: wire.stash for wire in self.skips_out}

    @cached_property
    def wires_in(self) -> tuple[Wire, ...]:
        """All routes that end at the stage."""
        return (*self.skips_in, self.main_in) if self.main_in else self.skips_in

    @cached_property
    def wires_out(self) -> tuple[Wire, ...]:
        """All routes that start at the stage, in the order in which their gradients are added."""
        return (*self.skips_out, self.main_out) if self.main_out else self.skips_out

    @cached_property
    def remote_in(self) -> tuple[Wire, ...]:
        """The routes that end here and come from another rank."""
        return tuple(wire for wire in self.wires_in if not wire.is_local)

    @cached_property
    def remote_out(self) -> tuple[Wire, ...]:
        """The routes that start here and go to another rank."""
        return tuple(wire for wire in self.wires_out if not wire.is_local)

    @cached_property
    def wire(self) -> dict[Route, Wire]:
        """The wire of each route that starts or ends here."""
        return {wire.route: wire for wire in (*self.wires_in, *self.wires_out)}


def wiring(program: Program, stage: int) -> Wiring:
    """Looks up how a stage is connected."""
    own = program.rank_of[stage]

    def wires(*, out: bool, main: bool) -> tuple[Wire, ...]:
        found = []
        for number, route in enumerate(program.routes):
            near, far = (route.source, route.target) if out else (route.target, route.source)
            if near == stage and (route.name == MAIN) == main:
                rank = program.rank_of[far]
                found.append(Wire(route, number, route.name, far, rank, rank == own))
        return tuple(found)

    recomputed = (a.micro_batch for a in program.rows[own] if a.kind is Kind.RECOMPUTE and a.stage == stage)
    return Wiring(
        main_in=next(iter(wires(out=False, main=True)), None),
        main_out=next(iter(wires(out=True, main=True)), None),
        skips_in=wires(out=False, main=False),
        skips_out=tuple(sorted(wires(out=True, main=False), key=lambda w: -int(w.name.rpartition("/")[2]))),
        recomputed=frozenset(m for m in recomputed if m is not None),
    )
