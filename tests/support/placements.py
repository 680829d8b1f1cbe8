"""Several stages on each rank: placements that no schedule by name has yet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from gpipe.schedule.schedules import SCHEDULES, Placement, Schedule
from gpipe.schedule.schedules.fill_drain import fill_drain_table
from gpipe.schedule.schedules.writing import loop


def there_and_back(ranks: int, stages_per_rank: int) -> Placement:
    """From the first rank to the last, back to the first, and so on: `V` where there are two stages on each.

    >>> there_and_back(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    turn = [*range(ranks), *reversed(range(ranks))] * stages_per_rank
    return tuple(turn[: ranks * stages_per_rank])


def backwards(ranks: int, stages_per_rank: int) -> Placement:
    """From the last rank to the first, in turn: neither end is where one would look for it.

    >>> backwards(2, 2)
    (1, 0, 1, 0)
    """
    return loop(ranks, stages_per_rank)[::-1]


PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "loop": loop,
    "v": there_and_back,
    "backwards": backwards,
}


@contextmanager
def placed(name: str, stages_per_rank: int) -> Iterator[None]:
    """Has pipes that are made inside place so many stages on each rank."""
    schedule = Schedule("gpipe", fill_drain_table, PLACEMENTS[name], stages_per_rank)
    with patch.dict(SCHEDULES, {"gpipe": schedule}):
        yield
