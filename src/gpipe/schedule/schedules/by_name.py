"""Finds schedules by name, and builds schedules from a user's `Program` or function."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, assert_never

from gpipe.errors import int_remedy, is_count
from gpipe.schedule.action import CLOSING, MOVES, SHARDS, STREAMS, TRANSFERS, Kind
from gpipe.schedule.laws import check
from gpipe.schedule.program import MAX_MICRO_BATCHES, Program, ScheduleError, Table, too_many_micro_batches
from gpipe.schedule.schedules import SCHEDULES, Schedule
from gpipe.schedule.schedules.writing import Placement


def program_of(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None, slices: int = 1
) -> Program:
    """Returns the forward and backward actions of a schedule for K ranks and M micro-batches.

    Args:
        name: A name in `SCHEDULES`.
        ranks: K, the number of ranks.
        micro_batches: M, the number of micro-batches.
        stages_per_rank: The number of stages on each rank. Default: the default of the schedule.
        slices: The number of slices of each micro-batch. Default: 1.

    Returns:
        The program, without recomputation and transfers. The functions of `gpipe.schedule.lower` add them.

    Raises:
        ValueError: If the schedule does not exist, or does not support this size. The message has one line per error.

    >>> print(program_of("1f1b", ranks=2, micro_batches=2).to_csv())
    rank_of,0,1
    micro_batches,2
    routes,x:0>1
    row,0F0,0F1,0B0,0B1
    row,1F0,1B0,1F1,1B1
    <BLANKLINE>
    """
    table, placement = table_of(name, ranks, micro_batches, stages_per_rank, slices)
    return Program.of(table, micro_batches * slices, rank_of=placement, slices=slices)


def table_of(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None, slices: int = 1
) -> tuple[Table, Placement]:
    """Returns the table and the placement that `program_of` uses.

    In a large table, the row of a rank is computed on access.
    """
    sizes = {
        "partitions": ranks,
        "micro_batches": micro_batches,
        "stages_per_rank": stages_per_rank,
        "slices": slices,
    }
    mistakes = [] if name in SCHEDULES else [unknown_schedule(name)]
    if not mistakes and slices > 1 and SCHEDULES[name].sliced is None:
        mistakes.append(no_slices(SCHEDULES[name]))
    mistakes += [
        f"{key}={size}. Use an integer >= 1." for key, size in sizes.items() if size is not None and size < 1
    ]
    if micro_batches * slices > MAX_MICRO_BATCHES:
        mistakes.append(too_many_micro_batches(micro_batches * slices))
    if mistakes:
        raise ValueError("\n".join(mistakes))
    schedule = SCHEDULES[name]
    stages = schedule.stages_per_rank if stages_per_rank is None else stages_per_rank
    placement = schedule.placement(ranks, stages)
    if placement is None:
        raise ValueError(no_placement(schedule, stages))
    number = micro_batches * slices
    sliced = schedule.sliced
    table = schedule.table(placement, number) if sliced is None else sliced(placement, number, slices)
    if table is None:
        raise ValueError(no_table(schedule, placement, micro_batches))
    return table, placement


@dataclass(frozen=True)
class Interleaved:
    """A schedule with several stages on each rank.

    Args:
        stages: The number of stages on each rank.
        schedule: The name of a schedule with a variable number of stages per rank: `"interleaved"`,
            `"interleaved_zb"`, `"breadth_first"` or `"gpipe"`.

    >>> schedule_of(Interleaved(4)).placement(2, 4)
    (0, 1, 0, 1, 0, 1, 0, 1)
    """

    stages: int = 2
    schedule: str = "interleaved"


@dataclass(frozen=True)
class BreadthFirst:
    """The schedule `"breadth_first"`, with several stages on each rank.

    Args:
        stages: The number of stages on each rank.
        resident: With `weights="host"`, the number of stages whose weights a rank has on its device at the same time.
            With 2 or more, the weights of the next stage are copied while a stage computes.

    >>> schedule_of(BreadthFirst(stages=4)).placement(2, 4)
    (0, 1, 0, 1, 0, 1, 0, 1)
    """

    stages: int = 2
    resident: int = 2


@dataclass(frozen=True)
class Sliced:
    """A schedule that splits each micro-batch of a step along the sequence dimension, for causal language models.

    Args:
        schedule: The name of a schedule that supports slices, `"gpipe"` or `"1f1b"`, or an `Interleaved`.
        slices: The number of slices of each micro-batch.

    >>> schedule_of(Sliced("1f1b", 4)).slices
    4
    """

    schedule: str | Interleaved
    slices: int


Named: TypeAlias = str | Interleaved | BreadthFirst | Sliced


def schedule_of(wanted: Named) -> Schedule:
    """Returns the schedule with this name, number of stages per rank and number of slices.

    Raises:
        ValueError: If there is no schedule with this name, or if it does not support these numbers.
    """
    match wanted:
        case str():
            if wanted not in SCHEDULES:
                raise ValueError(unknown_schedule(wanted))
            return SCHEDULES[wanted]
        case Interleaved(stages, name):
            schedule = schedule_of(name)
            _check_counts(wanted, stages=stages)
            if schedule.placement(1, stages) is None:
                raise ValueError(no_placement(schedule, stages))
            return replace(schedule, stages_per_rank=stages)
        case BreadthFirst(stages, resident):
            _check_counts(wanted, stages=stages, resident=resident)
            return schedule_of(Interleaved(stages, "breadth_first"))
        case Sliced(inner, slices):
            schedule = schedule_of(inner)
            _check_counts(wanted, slices=slices)
            if schedule.sliced is None:
                raise ValueError(no_slices(schedule))
            return replace(schedule, slices=slices)
        case _:
            assert_never(wanted)


def _check_counts(wanted: Named, **counts: object) -> None:
    mistakes = [
        f"schedule={wanted} has {name}={count!r}. Use an integer >= 1{int_remedy(count)}."
        for name, count in counts.items()
        if not is_count(count)
    ]
    if mistakes:
        raise ValueError("\n".join(mistakes))


def unknown_schedule(name: object, *others: str) -> str:
    """Returns the error message for an unknown name. `others` are additional values that the argument accepts."""
    return f"schedule={name!r} is unknown. Use one of {', '.join(map(repr, (*SCHEDULES, *others)))}."


def no_slices(schedule: Schedule) -> str:
    """Returns the error message for a schedule that does not support slices."""
    sliced = ", ".join(repr(name) for name, each in SCHEDULES.items() if each.sliced is not None)
    return f"schedule={schedule.name!r} does not support slices of micro-batches. Use one of {sliced}."


def no_placement(schedule: Schedule, stages: int) -> str:
    """Returns the error message for a number of stages per rank that a schedule does not support."""
    nearest = schedule.stages_per_rank
    return f"schedule={schedule.name!r} does not support stages_per_rank={stages}. Use stages_per_rank={nearest}."


def no_table(schedule: Schedule, placement: Placement, micro_batches: int) -> str:
    """Returns the error message for a number of micro-batches that a schedule does not support."""
    ranks = max(placement) + 1
    others = [m for m in range(1, 2 * (micro_batches + 2 * ranks)) if schedule.table(placement, m)]
    nearest = min(others, key=lambda m: abs(m - micro_batches), default=None)
    remedy = "Use another schedule." if nearest is None else f"Use micro_batches={nearest}."
    return f"schedule={schedule.name!r} has no table for micro_batches={micro_batches} with {ranks} ranks. {remedy}"


Maker: TypeAlias = Callable[[int, int], Program]
"""A function of K and M that returns a program of forward and backward actions."""


def check_user_program(program: Program) -> None:
    """Checks a program that a user passes as a schedule.

    Raises:
        ScheduleError: If the program breaks the laws, leaves a rank without a stage, or has actions that a pipe adds
            itself.
    """
    added = {action.kind for action in program.actions} & {
        *TRANSFERS,
        *MOVES,
        *SHARDS,
        *STREAMS,
        *CLOSING,
        Kind.RECOMPUTE,
    }
    names = [kind.name for kind in Kind if kind in added]
    if names:
        raise ScheduleError(
            f"schedule= is a Program with {', '.join(names)} actions, but the pipe adds these actions itself. Pass "
            "program.only(kinds), with only the kinds FORWARD, BACKWARD, BACKWARD_INPUT and BACKWARD_WEIGHT."
        )
    idle = set(range(program.ranks)) - set(program.rank_of)
    if idle:
        raise ScheduleError(f"schedule= is a Program without stages on ranks {sorted(idle)}. Use fewer ranks.")
    check(program)


def schedule_of_program(program: Program) -> Schedule:
    """Returns the schedule of one program, for its numbers of ranks and micro-batches."""
    check_user_program(program)
    return Schedule("a program", partial(_restricted, program), partial(_placement, program), stages_per_rank=0)


def _placement(program: Program, ranks: int, stages_per_rank: int) -> Placement | None:
    return program.rank_of if ranks == program.ranks else None


def _restricted(program: Program, placement: Placement, micro_batches: int) -> Table | None:
    """Returns the actions of the first `micro_batches` micro-batches; None if the program has fewer.

    Leaving out the other micro-batches is valid, because micro-batches do not depend on each other.
    """
    if micro_batches > program.micro_batches:
        return None
    return tuple(tuple(a for a in row if (a.micro_batch or 0) < micro_batches) for row in program.table)


def schedule_of_function(make: Maker, micro_batches: int) -> Schedule:
    """Returns a schedule of the programs that `make` returns.

    The placement is from its program for `micro_batches`.
    """
    return Schedule(_name(make), partial(_made_table, make), partial(_made_placement, make, micro_batches), 0)


def _made_placement(make: Maker, micro_batches: int, ranks: int, stages_per_rank: int) -> Placement:
    program = _made(make, ranks, micro_batches)
    if (program.ranks, program.micro_batches) != (ranks, micro_batches):
        raise ScheduleError(
            f"schedule={_name(make)} returned a Program with K={program.ranks} ranks and M={program.micro_batches} "
            f"micro-batches when called with ({ranks}, {micro_batches}). Return a Program of this size."
        )
    return program.rank_of


def _made_table(make: Maker, placement: Placement, micro_batches: int) -> Table | None:
    try:
        program = _made(make, max(placement) + 1, micro_batches)
    except Exception:  # A function may support only some sizes. The caller then uses fill-drain.
        return None
    same = (program.rank_of, program.micro_batches) == (placement, micro_batches)
    return program.table if same else None


def _made(make: Maker, ranks: int, micro_batches: int) -> Program:
    try:
        program = make(ranks, micro_batches)
    except Exception as error:
        error.add_note(f"schedule={_name(make)} raised this error when called with ({ranks}, {micro_batches}).")
        raise
    if not isinstance(program, Program):
        raise ScheduleError(f"schedule={_name(make)} returned a {type(program).__name__}. Return a Program.")
    check_user_program(program)
    return program


def _name(make: Maker) -> str:
    return getattr(make, "__qualname__", type(make).__name__)
