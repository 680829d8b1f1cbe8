"""Defines the program of a mini-batch: the actions that each rank executes, in order."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TypeAlias

from gpipe.schedule.action import COMPUTE, Action, Kind, Route, Slice, parse_action, parse_route

RankActions: TypeAlias = tuple[Action, ...]
Table: TypeAlias = Sequence[RankActions]
"""The actions of each rank, one row per rank."""

MAX_MICRO_BATCHES = 100_000  # Larger tables need too much memory: every micro-batch has actions at every stage.


class ScheduleError(ValueError):
    """Raised if actions cannot be executed, because they deadlock or break a law of `gpipe.schedule.laws`.

    >>> from gpipe.schedule.laws import check
    >>> try:
    ...     check(Program.of([[Action(Kind.FORWARD, 0, 0)]], micro_batches=2))
    ... except ScheduleError as error:
    ...     print(error)
    The program is not valid. Fix these errors:
    - 0F1 is missing.
    """


@dataclass(frozen=True)
class Program:
    """The actions of all ranks in one mini-batch. Two programs are equal if their contents are equal.

    Attributes:
        rank_of: The rank of each stage.
        micro_batches: The number of micro-batches, M. If micro-batches are split into slices, the total number of
            slices.
        routes: The routes of tensors between stages.
        table: The actions of each rank, in order.
        slices: The number of slices of each micro-batch. Default: 1.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=2), micro_batches=2)
    >>> print(program.to_text())
    rank_of 0 1
    micro_batches 2
    routes x:0>1
    row 0F0 0F1 0B0 0B1
    row 1F0 1F1 1B0 1B1
    >>> program
    Program(ranks=2, stages=2, micro_batches=2, 8 actions)
    """

    rank_of: tuple[int, ...]
    micro_batches: int
    routes: tuple[Route, ...]
    table: tuple[RankActions, ...]
    slices: int = 1

    def __post_init__(self) -> None:
        if self.micro_batches > MAX_MICRO_BATCHES:
            raise ScheduleError(too_many_micro_batches(self.micro_batches))

    def __repr__(self) -> str:
        """Returns the sizes of the program. For the actions, call `to_text`."""
        slices = f"slices={self.slices}, " if self.slices > 1 else ""
        sizes = f"ranks={self.ranks}, stages={self.stages}, micro_batches={self.micro_batches // self.slices}"
        return f"Program({sizes}, {slices}{sum(map(len, self.table))} actions)"

    @classmethod
    def of(
        cls,
        table: Iterable[Iterable[Action]],
        micro_batches: int,
        *,
        rank_of: Iterable[int] | None = None,
        skips: Iterable[Route] = (),
        slices: int = 1,
    ) -> "Program":
        """Returns a program with these actions for each rank.

        Args:
            table: The actions of each rank, in order.
            micro_batches: The number of micro-batches. With slices, the total number of slices.
            rank_of: The rank of each stage. Default: stage i is on rank i.
            skips: The routes of skip connections, in addition to the main route between neighboring stages.
            slices: The number of slices of each micro-batch. Default: 1.

        Returns:
            The unchecked program. Call `gpipe.schedule.laws.check` to check it.
        """
        rows = tuple(map(tuple, table))
        ranks = tuple(range(len(rows)) if rank_of is None else rank_of)
        main_routes = (Route(s, s + 1) for s in range(len(ranks) - 1))
        return cls(ranks, micro_batches, (*main_routes, *skips), rows, slices)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @property
    def numbers(self) -> Sequence[int]:
        """The indices of all micro-batches, or of all slices."""
        numbers = range(self.micro_batches)
        return numbers if self.slices == 1 else [Slice(number, self.slices) for number in numbers]

    @property
    def micro_batches_text(self) -> str:
        """The number of micro-batches, and of slices of each, as text.

        >>> Program.of([], micro_batches=8, slices=4).micro_batches_text
        '2 micro-batches of 4 slices'
        """
        count = self.micro_batches // self.slices
        return f"{count} micro-batch{'es' * (count != 1)}" + (f" of {self.slices} slices" if self.slices > 1 else "")

    @property
    def ranks(self) -> int:
        """The number of ranks, K."""
        return len(self.table)

    @cached_property
    def actions(self) -> frozenset[Action]:
        """All actions of all ranks."""
        return frozenset(action for row in self.table for action in row)

    @cached_property
    def load_of(self) -> dict[Action, Action]:
        """The LOAD whose copy of the weights a computation uses, or a FREE frees: the last one before it."""
        found = dict[Action, Action]()
        for row in self.table:
            loads = dict[int, Action]()  # by stage
            for action in row:
                if action.kind is Kind.LOAD:
                    loads[action.stage] = action
                elif action.stage in loads and action.kind in COMPUTE | {Kind.FREE}:
                    found[action] = loads[action.stage]
        return found

    @cached_property
    def uses_of(self) -> dict[Action, list[Action]]:
        """The computations that use the weights of each LOAD, in order."""
        uses = defaultdict[Action, list[Action]](list)
        for action, load in self.load_of.items():
            if action.kind in COMPUTE:
                uses[load].append(action)
        return uses

    @cached_property
    def routes_into(self) -> tuple[tuple[Route, ...], ...]:
        """The routes that end at each stage."""
        return tuple(tuple(r for r in self.routes if r.target == s) for s in range(self.stages))

    @cached_property
    def routes_from(self) -> tuple[tuple[Route, ...], ...]:
        """The routes that start at each stage."""
        return tuple(tuple(r for r in self.routes if r.source == s) for s in range(self.stages))

    def with_table(self, table: Iterable[Iterable[Action]]) -> "Program":
        """Returns the same program with different actions for each rank."""
        return replace(self, table=tuple(map(tuple, table)))

    def only(self, kinds: Iterable[Kind]) -> "Program":
        """Returns the same program with only the actions of these kinds."""
        kinds = frozenset(kinds)
        return self.with_table((a for a in row if a.kind in kinds) for row in self.table)

    def around(self, rank: int, index: int, reach: int = 4) -> str:
        """Returns the actions of a rank near an index, for messages: `... 1F2 1F3 >1B3< 1B2 ...`."""
        row = self.table[rank]
        shown = [
            f">{action}<" if i == index else str(action) for i, action in enumerate(row) if abs(i - index) <= reach
        ]
        before = ["..."] if index > reach else []
        after = ["..."] if index + reach < len(row) - 1 else []
        return " ".join([*before, *shown, *after])

    def to_text(self) -> str:
        """Returns the program as text, for `from_text`."""
        return "\n".join(" ".join(cells) for cells in self._cells())

    def to_csv(self) -> str:
        """Returns the program as CSV, for `from_csv`."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(self._cells())
        return file.getvalue()

    def _repr_html_(self) -> str | None:
        return notebook_html("program", self)

    def _cells(self) -> Iterator[list[str]]:
        yield ["rank_of", *map(str, self.rank_of)]
        yield ["micro_batches", str(self.micro_batches)]
        if self.slices > 1:
            yield ["slices", str(self.slices)]
        yield ["routes", *map(str, self.routes)]
        for row in self.table:
            yield ["row", *map(str, row)]

    @classmethod
    def from_text(cls, text: str) -> "Program":
        """Reads a program from the output of `to_text`.

        Args:
            text: The output of `to_text`. Empty lines are ignored.

        Returns:
            The unchecked program. Call `gpipe.schedule.laws.check` to check it.

        Raises:
            ValueError: If a line or an action cannot be parsed.
        """
        return cls._from_cells(line.split() for line in text.splitlines())

    @classmethod
    def from_csv(cls, text: str) -> "Program":
        """Reads a program from the output of `to_csv`.

        Args:
            text: The output of `to_csv`. Empty lines are ignored.

        Returns:
            The unchecked program. Call `gpipe.schedule.laws.check` to check it.

        Raises:
            ValueError: If a line or an action cannot be parsed.
        """
        return cls._from_cells(csv.reader(io.StringIO(text)))

    @classmethod
    def _from_cells(cls, lines: Iterable[list[str]]) -> "Program":
        program, rows = cls((), 0, (), ()), []
        for line in filter(None, lines):
            match line:
                case ["rank_of", *cells]:
                    program = replace(program, rank_of=tuple(map(int, cells)))
                case ["micro_batches", cell]:
                    program = replace(program, micro_batches=int(cell))
                case ["slices", cell]:
                    program = replace(program, slices=int(cell))
                case ["routes", *cells]:
                    program = replace(program, routes=tuple(map(parse_route, cells)))
                case ["row", *cells]:
                    rows.append([parse_action(cell, program.slices) for cell in cells])
                case _:
                    raise ValueError(f"Program: line {line!r} is not valid. Start it with a keyword such as 'row'.")
        return program.with_table(rows)


def too_many_micro_batches(micro_batches: int) -> str:
    """Returns the error message for more than `MAX_MICRO_BATCHES` micro-batches."""
    return f"micro_batches={micro_batches} exceeds the limit of {MAX_MICRO_BATCHES:,}. Use fewer micro-batches."


def notebook_html(kind: str, value: object) -> str | None:
    """Returns the HTML of an object for a notebook, or None if it cannot be drawn.

    For None, the notebook shows text.
    """
    try:  # Imported on demand, because gpipe.profiling imports this module.
        html: str = getattr(import_module("gpipe.profiling.cells"), kind)(value)
    except Exception:  # A value that cannot be drawn, for example without an optional package, is shown as text.
        return None
    return html
