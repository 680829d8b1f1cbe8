"""Finds a legal total order of a program, or the reason why there is none."""

from collections.abc import Iterator
from random import Random

from gpipe.schedule.action import Action
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.rules import needs


def linearize(program: Program, rng: Random | None = None) -> Iterator[tuple[int, int, Action]]:
    """Yields (rank, place in its row, action), each action after all that it needs.

    Without `rng` all ranks that can go on do so in turn, one action each, which keeps them in step; with it, one of
    them drawn at random.

    Raises:
        ScheduleError: The program deadlocks; the error says which rank waits for what.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=2), micro_batches=2)
    >>> " ".join(str(action) for _, _, action in linearize(program))
    '0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1'
    """
    for rank, place, action, _ in linearize_with_needs(program, rng):
        yield rank, place, action


def linearize_with_needs(
    program: Program, rng: Random | None = None
) -> Iterator[tuple[int, int, Action, tuple[Action, ...]]]:
    """Yields what `linearize` does, and what each action needs, as `rules.needs` says it.

    Raises:
        ScheduleError: As there.
    """
    at = [0] * program.ranks
    done: set[Action] = set()
    remaining = sum(map(len, program.rows))
    awaited = [needs(row[0], program) if row else () for row in program.rows]
    while remaining:
        ready = [
            (rank, place, program.rows[rank][place])
            for rank, place in enumerate(at)
            if place < len(program.rows[rank]) and done.issuperset(awaited[rank])
        ]
        if not ready:
            raise ScheduleError(_deadlock(program, at, done))
        for rank, place, action in [rng.choice(ready)] if rng else ready:
            yield rank, place, action, awaited[rank]
            done.add(action)
            at[rank] += 1
            remaining -= 1
            row = program.rows[rank]
            awaited[rank] = needs(row[place + 1], program) if place + 1 < len(row) else ()


def _deadlock(program: Program, at: list[int], done: set[Action]) -> str:
    lines = ["deadlock:"]
    for rank, place in enumerate(at):
        if place < len(program.rows[rank]):
            missing = (str(n) for n in needs(program.rows[rank][place], program) if n not in done)
            lines.append(f"rank {rank} waits for {', '.join(missing)}: {program.around(rank, place)}")
    return "\n".join(lines)
