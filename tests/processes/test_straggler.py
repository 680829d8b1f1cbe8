"""Over processes, rank 0 names a slow rank (R14)."""

import pytest

from gpipe.run.straggler import WINDOW
from tests.processes import jobs_straggler
from tests.processes.launch import Crew
from tests.processes.outcome import answers


@pytest.mark.parametrize("measured", [False, True])
def test_a_rank_that_sleeps_longer_is_named_by_rank_0_within_five_steps(measured: bool, crew: Crew) -> None:
    first, *others = answers(crew.run(jobs_straggler.warned, 2, 4.0, measured, WINDOW))
    (text,) = first
    assert text.startswith("rank 2 (stage 2, replica 0) is slow, and the others wait for it: it was busy ")
    assert others == [[], [], []]


def test_nobody_is_named_where_all_sleep_alike(crew: Crew) -> None:
    assert answers(crew.run(jobs_straggler.warned, -1, 1.0, False, 2 * WINDOW)) == [[], [], [], []]
