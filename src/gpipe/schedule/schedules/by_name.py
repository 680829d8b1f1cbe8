"""Programs by the names of schedules, and schedules that a user gives: a program, or a function that makes one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, assert_never

from gpipe.errors import int_remedy, is_count
from gpipe.schedule.action import CLOSING, MOVES, SHARDS, TRANSFERS, Kind
from gpipe.schedule.laws import check
from gpipe.schedule.program import MOST_MICRO_BATCHES, Program, ScheduleError, Table, too_many
from gpipe.schedule.schedules import SCHEDULES, Schedule
from gpipe.schedule.schedules.writing import Placement


def program_of(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None, slices: int = 1
) -> Program:
    """The forwards and backwards of a schedule by its name in `SCHEDULES`, for K ranks and M micro-batches.

    Each rank holds `stages_per_rank`, by default what the schedule has; each micro-batch has so many `slices`.

    Raises:
        ValueError: There is no such schedule, or it has no table of this size; a line for each mistake.

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
    """What `program_of` makes a program of: a table, its rows written when they are asked for, and the placement."""
    counts = {"partitions": ranks, "micro_batches": micro_batches, "stages_per_rank": stages_per_rank}
    counts["slices"] = slices
    mistakes = [] if name in SCHEDULES else [unknown(name)]
    if not mistakes and slices > 1 and SCHEDULES[name].sliced is None:
        mistakes.append(unsliced(SCHEDULES[name]))
    few = {what: count for what, count in counts.items() if count is not None and count < 1}
    mistakes += [f"{what}={count}; give a whole number of at least 1" for what, count in few.items()]
    if micro_batches * slices > MOST_MICRO_BATCHES:
        mistakes.append(too_many(micro_batches * slices))
    if mistakes:
        raise ValueError("\n".join(mistakes))
    schedule = SCHEDULES[name]
    each = schedule.stages_per_rank if stages_per_rank is None else stages_per_rank
    placement = schedule.placement(ranks, each)
    if placement is None:
        raise ValueError(unplaced(schedule, each))
    number = micro_batches * slices
    sliced = schedule.sliced
    table = schedule.table(placement, number) if sliced is None else sliced(placement, number, slices)
    if table is None:
        raise ValueError(without_table(schedule, placement, micro_batches))
    return table, placement


@dataclass(frozen=True)
class Interleaved:
    """A schedule with several stages on each rank.

    Args:
        stages: The number of stages on each rank.
        schedule: The name of a schedule that leaves this number open: `"interleaved"`, `"interleaved_zb"` or
            `"gpipe"`.

    >>> named(Interleaved(4)).placement(2, 4)
    (0, 1, 0, 1, 0, 1, 0, 1)
    """

    stages: int = 2
    schedule: str = "interleaved"


@dataclass(frozen=True)
class Sliced:
    """A schedule that cuts each micro-batch of a step into slices along its tokens, for causal language models.

    Args:
        schedule: The name of a schedule that has a table for slices, `"gpipe"` or `"1f1b"`, or `Interleaved`.
        slices: The number of slices of each micro-batch.

    >>> named(Sliced("1f1b", 4)).slices
    4
    """

    schedule: str | Interleaved
    slices: int


Named: TypeAlias = str | Interleaved | Sliced


def named(wanted: Named) -> Schedule:
    """Returns the schedule of a name, with the stages and slices that were asked for.

    Raises:
        ValueError: If there is no such schedule, or it cannot have as many stages or slices.
    """
    match wanted:
        case str():
            if wanted not in SCHEDULES:
                raise ValueError(unknown(wanted))
            return SCHEDULES[wanted]
        case Interleaved(stages, name):
            found = named(name)
            if not is_count(stages):
                raise ValueError(
                    f"{wanted} has stages={stages!r}; give a whole number of at least 1{int_remedy(stages)}"
                )
            if found.placement(1, stages) is None:
                raise ValueError(unplaced(found, stages))
            return replace(found, stages_per_rank=stages)
        case Sliced(inner, slices):
            found = named(inner)
            if not is_count(slices):
                raise ValueError(
                    f"{wanted} has slices={slices!r}; give a whole number of at least 1{int_remedy(slices)}"
                )
            if found.sliced is None:
                raise ValueError(unsliced(found))
            return replace(found, slices=slices)
        case _:
            assert_never(wanted)


def unknown(name: object) -> str:
    """What is said of a name that no schedule has."""
    return f"schedule={name!r}; known are {', '.join(map(repr, SCHEDULES))}"


def unsliced(schedule: Schedule) -> str:
    """What is said of a schedule that has no table for slices."""
    known = ", ".join(repr(name) for name, each in SCHEDULES.items() if each.sliced is not None)
    return f"schedule={schedule.name!r} has no table for slices of micro-batches; those that have are {known}"


def unplaced(schedule: Schedule, each: int) -> str:
    """What is said of a number of stages that a schedule cannot place on a rank."""
    nearest = schedule.stages_per_rank
    return f"schedule={schedule.name!r} cannot place stages_per_rank={each}; the nearest that it can is {nearest}"


def without_table(schedule: Schedule, placement: Placement, micro_batches: int) -> str:
    """What is said of a number of micro-batches for which a schedule has no table."""
    ranks = max(placement) + 1
    others = [m for m in range(1, 2 * (micro_batches + 2 * ranks)) if schedule.table(placement, m)]
    nearest = min(others, key=lambda m: abs(m - micro_batches), default=None)
    remedy = "" if nearest is None else f"; the nearest that it can have is micro_batches={nearest}"
    return f"schedule={schedule.name!r} has no table for micro_batches={micro_batches} over K={ranks} ranks{remedy}"


Maker: TypeAlias = Callable[[int, int], Program]  # from K and M, a program of forwards and backwards alone


def check_given(program: Program) -> None:
    """Refuses a program that breaks the laws, leaves a rank without a stage, or has what a pipe places itself."""
    placed = {action.kind for action in program.actions} & {*TRANSFERS, *MOVES, *SHARDS, *CLOSING, Kind.RECOMPUTE}
    names = [kind.name for kind in Kind if kind in placed]
    if names:
        raise ScheduleError(
            f"the program has {', '.join(names)}, which a pipe places itself, by remat, skips, replicas and what "
            f"layers share; give forwards and backwards alone (FORWARD, and BACKWARD or BACKWARD_INPUT and "
            f"BACKWARD_WEIGHT): program.only(kinds)"
        )
    idle = set(range(program.ranks)) - set(program.rank_of)
    if idle:
        raise ScheduleError(f"the program leaves ranks {sorted(idle)} without a stage")
    check(program)


def only(program: Program) -> Schedule:
    """The schedule of one program, for its own numbers of ranks and micro-batches."""
    check_given(program)
    return Schedule("a program", partial(_only_table, program), partial(_only_placement, program), stages_per_rank=0)


def _only_placement(program: Program, ranks: int, stages_per_rank: int) -> Placement | None:
    return program.rank_of if ranks == program.ranks else None


def _only_table(program: Program, placement: Placement, micro_batches: int) -> Table | None:
    """The table, or of a smaller mini-batch what it has of its micro-batches: nothing in it waits for another one."""
    if micro_batches > program.micro_batches:
        return None
    return tuple(tuple(a for a in row if (a.micro_batch or 0) < micro_batches) for row in program.table)


def made_by(make: Maker, micro_batches: int) -> Schedule:
    """The schedule of the programs that a function makes, placed as that for so many micro-batches is."""
    return Schedule(_name(make), partial(_made_table, make), partial(_made_placement, make, micro_batches), 0)


def _made_placement(make: Maker, micro_batches: int, ranks: int, stages_per_rank: int) -> Placement:
    program = _made(make, ranks, micro_batches)
    if (program.ranks, program.micro_batches) != (ranks, micro_batches):
        why = f"{_name(make)} was asked for K={ranks} ranks and M={micro_batches} micro-batches"
        raise ScheduleError(f"{why}, and gave a program of K={program.ranks} and M={program.micro_batches}")
    return program.rank_of


def _made_table(make: Maker, placement: Placement, micro_batches: int) -> Table | None:
    try:
        program = _made(make, max(placement) + 1, micro_batches)
    except Exception:  # whatever it is that has no program of this size: a table of another will do
        return None
    same = (program.rank_of, program.micro_batches) == (placement, micro_batches)
    return program.table if same else None


def _made(make: Maker, ranks: int, micro_batches: int) -> Program:
    try:
        program = make(ranks, micro_batches)
    except Exception as error:
        error.add_note(f"in schedule={_name(make)}, asked for K={ranks} ranks and M={micro_batches} micro-batches")
        raise
    if not isinstance(program, Program):
        raise ScheduleError(f"{_name(make)} gave {type(program).__name__}, which is no Program")
    check_given(program)
    return program


def _name(make: Maker) -> str:
    return getattr(make, "__qualname__", type(make).__name__)
