"""Table whose backwards are in two parts, the second later than in any schedule by name, from those of fill-drain."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from gpipe.schedule.action import Action, Kind
from gpipe.schedule.program import Table
from gpipe.schedule.schedules import SCHEDULES, Placement, Schedule
from gpipe.schedule.schedules.fill_drain import fill_drain_table
from gpipe.schedule.schedules.writing import loop


def weights_last(row: Sequence[Action]) -> Iterator[Action]:
    """All weights behind everything.

    >>> from gpipe.schedule.action import parse_action
    >>> [str(action) for action in weights_last(list(map(parse_action, ["0F0", "0F1", "0B0", "0B1"])))]
    ['0F0', '0F1', '0I0', '0I1', '0W0', '0W1']
    """
    yield from (a._replace(kind=Kind.BACKWARD_INPUT) if a.kind is Kind.BACKWARD else a for a in row)
    yield from (a._replace(kind=Kind.BACKWARD_WEIGHT) for a in row if a.kind is Kind.BACKWARD)


def weights_one_later(row: Sequence[Action]) -> Iterator[Action]:
    """The weights of a micro-batch behind the inputs of the next."""
    waiting: dict[int, Action] = {}
    for action in row:
        if action.kind is not Kind.BACKWARD:
            yield action
            continue
        yield action._replace(kind=Kind.BACKWARD_INPUT)
        if action.stage in waiting:
            yield waiting[action.stage]
        waiting[action.stage] = action._replace(kind=Kind.BACKWARD_WEIGHT)
    yield from waiting.values()


def every_second_whole(row: Sequence[Action]) -> Iterator[Action]:
    """Every second backward in one, though weights of the one before it wait."""
    for action in weights_last(row):
        if action.kind is Kind.FORWARD or not (action.micro_batch or 0) % 2:
            yield action
        elif action.kind is Kind.BACKWARD_INPUT:
            yield action._replace(kind=Kind.BACKWARD)


SPLITS: dict[str, Callable[[Sequence[Action]], Iterator[Action]]] = {
    "weights last": weights_last,
    "weights one later": weights_one_later,
    "every second whole": every_second_whole,
}


@contextmanager
def split(name: str, stages_per_rank: int = 1) -> Iterator[None]:
    """Has pipes that are made inside run their backwards so."""

    def rows(placement: Placement, micro_batches: int) -> Table:
        return tuple(tuple(SPLITS[name](row)) for row in fill_drain_table(placement, micro_batches))

    with patch.dict(SCHEDULES, {"gpipe": Schedule("gpipe", rows, loop, stages_per_rank)}):
        yield
