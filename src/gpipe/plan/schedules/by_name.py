"""The programs that schedules have by their names, and what is said of names and sizes that cannot be."""

from collections.abc import Iterable, Iterator

from gpipe.plan.program import Program
from gpipe.plan.schedules import SCHEDULES, Placement, Schedule

MOST_STAGES = 64
"""The stages a rank among which the nearest number that a page can have is looked for."""


def program_of(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Program:
    """The forwards and backwards of a schedule, for a mini-batch of so many micro-batches.

    Args:
        name: Of the schedule, as `SCHEDULES` has it.
        ranks: K.
        micro_batches: M.
        stages_per_rank: How many stages each rank holds; by default what the schedule has.

    Raises:
        ValueError: There is no such schedule, or it has no table of this size; a line for each mistake.

    >>> print(program_of("1f1b", ranks=2, micro_batches=2).to_csv())
    rank_of,0,1
    micro_batches,2
    routes,x:0>1
    row,0F0,0F1,0B0,0B1
    row,1F0,1B0,1F1,1B1
    <BLANKLINE>
    >>> program_of("zb_v", ranks=2, micro_batches=2, stages_per_rank=3)
    Traceback (most recent call last):
    ValueError: schedule='zb_v' cannot place stages_per_rank=3; the nearest that it can is 2
    """
    counts = {"partitions": ranks, "micro_batches": micro_batches, "stages_per_rank": stages_per_rank}
    mistakes = [] if name in SCHEDULES else [unknown(name)]
    mistakes += _uncountable(counts)
    if mistakes:
        raise ValueError("\n".join(mistakes))
    schedule = SCHEDULES[name]
    each = schedule.stages_per_rank if stages_per_rank is None else stages_per_rank
    placement = schedule.placement(ranks, each)
    if placement is None:
        raise ValueError(unplaced(schedule, ranks, each))
    rows = schedule.rows(placement, micro_batches)
    if rows is None:
        raise ValueError(without_table(schedule, placement, micro_batches))
    return Program.of(rows, micro_batches, rank_of=placement)


def _uncountable(counts: dict[str, int | None]) -> Iterator[str]:
    for name, count in counts.items():
        if count is not None and count < 1:
            yield f"{name}={count}; give a whole number of at least 1"


def unknown(name: object) -> str:
    """What is said of a name that no schedule has.

    >>> unknown("zbv")[:40]
    "schedule='zbv'; known are 'gpipe', '1f1b"
    """
    return f"schedule={name!r}; known are {', '.join(map(repr, SCHEDULES))}"


def unplaced(schedule: Schedule, ranks: int, each: int) -> str:
    """What is said of a number of stages that a schedule cannot place on a rank.

    >>> unplaced(SCHEDULES["1f1b"], ranks=4, each=2)
    "schedule='1f1b' cannot place stages_per_rank=2; the nearest that it can is 1"
    """
    nearest = _nearest(each, (n for n in range(1, MOST_STAGES) if schedule.placement(ranks, n)))
    return f"schedule={schedule.name!r} cannot place stages_per_rank={each}; the nearest that it can is {nearest}"


def without_table(schedule: Schedule, placement: Placement, micro_batches: int) -> str:
    """What is said of a number of micro-batches for which a schedule has no table.

    >>> print(without_table(SCHEDULES["dualpipe_v"], (0, 1, 1, 0), micro_batches=3).split("; ")[1])
    the nearest that it can have is micro_batches=4
    """
    ranks = max(placement) + 1
    around = range(1, 2 * (micro_batches + 2 * ranks))
    nearest = _nearest(micro_batches, (m for m in around if schedule.rows(placement, m)))
    remedy = "" if nearest is None else f"; the nearest that it can have is micro_batches={nearest}"
    return f"schedule={schedule.name!r} has no table for micro_batches={micro_batches} over K={ranks} ranks{remedy}"


def _nearest(wanted: int, candidates: Iterable[int]) -> int | None:
    return min(candidates, key=lambda number: abs(number - wanted), default=None)
