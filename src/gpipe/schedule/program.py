"""The table: for each rank the ordered actions that it performs."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TypeAlias

from gpipe.schedule.action import Action, Kind, Route, Slice, parse_action, parse_route

RankActions: TypeAlias = tuple[Action, ...]
Table: TypeAlias = Sequence[RankActions]

MOST_MICRO_BATCHES = 100_000  # of a program, which has an action or more for each of them at each stage


class ScheduleError(ValueError):
    """A table that cannot be run: it breaks a law, or it would deadlock.

    >>> from gpipe.schedule.laws import check
    >>> try:
    ...     check(Program.of([[Action(Kind.FORWARD, 0, 0)]], micro_batches=2))
    ... except ScheduleError as error:
    ...     print(error)
    this program breaks the laws:
    - 0F1 is missing
    """


@dataclass(frozen=True)
class Program:
    """What all ranks do in one mini-batch.

    `rank_of[s]` is the rank of stage s; `table[r]` is what rank r does, in order. Equality is by content. Where
    micro-batches are cut into `slices`, those are what `micro_batches` counts: M times as many.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=2), micro_batches=2)
    >>> print(program.to_text())
    rank_of 0 1
    micro_batches 2
    routes x:0>1
    row 0F0 0F1 0B0 0B1
    row 1F0 1F1 1B0 1B1
    """

    rank_of: tuple[int, ...]
    micro_batches: int
    routes: tuple[Route, ...]
    table: tuple[RankActions, ...]
    slices: int = 1

    def __post_init__(self) -> None:
        if self.micro_batches > MOST_MICRO_BATCHES:
            raise ScheduleError(too_many(self.micro_batches))

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
        """Makes a program of the actions of each rank; `rank_of` or each stage its own."""
        listed = tuple(map(tuple, table))
        ranks = tuple(range(len(listed)) if rank_of is None else rank_of)
        main_line = (Route(s, s + 1) for s in range(len(ranks) - 1))
        return cls(ranks, micro_batches, (*main_line, *skips), listed, slices)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each micro-batch, or slice of one."""
        every = range(self.micro_batches)
        return every if self.slices == 1 else [Slice(number, self.slices) for number in every]

    @property
    def words(self) -> str:
        """How many micro-batches there are, and slices of each.

        >>> Program.of([], micro_batches=8, slices=4).words
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
    def routes_into(self) -> tuple[tuple[Route, ...], ...]:
        """By stage, the routes that end there."""
        return tuple(tuple(r for r in self.routes if r.target == s) for s in range(self.stages))

    @cached_property
    def routes_from(self) -> tuple[tuple[Route, ...], ...]:
        """By stage, the routes that start there."""
        return tuple(tuple(r for r in self.routes if r.source == s) for s in range(self.stages))

    def with_table(self, table: Iterable[Iterable[Action]]) -> "Program":
        """The same program with other actions of each rank."""
        return replace(self, table=tuple(map(tuple, table)))

    def only(self, kinds: Iterable[Kind]) -> "Program":
        """The same program with the actions of these kinds alone."""
        kinds = frozenset(kinds)
        return self.with_table((a for a in row if a.kind in kinds) for row in self.table)

    def around(self, rank: int, at: int, reach: int = 4) -> str:
        """The row around a place, for messages: `... 1F2 1F3 >1B3< 1B2 ...`."""
        row = self.table[rank]
        shown = [f">{action}<" if i == at else str(action) for i, action in enumerate(row) if abs(i - at) <= reach]
        before = ["..."] if at > reach else []
        after = ["..."] if at + reach < len(row) - 1 else []
        return " ".join([*before, *shown, *after])

    def to_text(self) -> str:
        """The program as text that `from_text` reads back."""
        return "\n".join(" ".join(cells) for cells in self._cells())

    def to_csv(self) -> str:
        """The program as CSV that `from_csv` reads back."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(self._cells())
        return file.getvalue()

    def _repr_html_(self) -> str | None:
        return in_cell("program", self)

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
        """Reads what `to_text` wrote; ValueError if a line or an action cannot be read."""
        return cls._from_cells(line.split() for line in text.splitlines())

    @classmethod
    def from_csv(cls, text: str) -> "Program":
        """Reads what `to_csv` wrote; ValueError if a line or an action cannot be read."""
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
                    raise ValueError(f"{line!r} is no line of a program")
        return program.with_table(rows)


def too_many(micro_batches: int) -> str:
    """What is said of more micro-batches than a program may have."""
    many = f"micro_batches={micro_batches}; give at most {MOST_MICRO_BATCHES:,}"
    return f"{many}: a table has an action for each of them at each stage"


def in_cell(kind: str, value: object) -> str | None:
    """The HTML that `gpipe.profiling.cells` makes of a value; None has the cell show its text."""
    try:  # found by name once a notebook asks: it stands above all that it draws
        html: str = getattr(import_module("gpipe.profiling.cells"), kind)(value)
    except Exception:  # what cannot be drawn, or only by what is not installed here, is to be shown all the same
        return None
    return html
