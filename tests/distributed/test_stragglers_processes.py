"""Over processes, rank 0 names a slow rank (R14)."""

import pytest

from gpipe.distributed.stragglers import WARMING_UP, WINDOW
from tests.support.jobs import stragglers as jobs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers


def test_a_rank_that_takes_longer_is_named_by_rank_0_within_five_steps(pool: WorkerPool) -> None:
    first, *others = answers(pool.run(jobs.warned, 2, 4.0, True, WARMING_UP + WINDOW))
    (text,) = first
    assert text.startswith("rank 2 (stage 2, replica 0) is slow, and the others wait for it: it was busy ")
    assert others == [[], [], []]


@pytest.mark.parametrize(("slow", "times"), [(-1, 1.0), (2, 4.0)])
def test_nobody_is_named_where_all_take_as_long_or_nobody_knows_what_they_should(
    slow: int, times: float, pool: WorkerPool
) -> None:
    assert answers(pool.run(jobs.warned, slow, times, False, WARMING_UP + WINDOW)) == [[], [], [], []]
