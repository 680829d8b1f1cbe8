"""Data that cannot be is refused on every rank, and who goes on alone is told: never other numbers, never a hang."""

import pytest

from tests.support.jobs import data as jobs
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import told_by


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [*jobs.ON_ALL_RANKS, *jobs.ON_THE_LAST])
def test_what_cannot_be_is_refused_on_every_rank_before_the_timeout(name: str, world: int, pool: WorkerPool) -> None:
    outcomes = pool.run(jobs.refused, name, world=world)
    assert all(outcome.told for outcome in outcomes), told_by(outcomes)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_goes_on_alone_learns_that_the_others_have_left(alone: int) -> None:
    outcomes = run_ranks(2, jobs.step_more, alone)
    assert outcomes[1 - alone].answered
    assert outcomes[alone].error == "RemoteError"
    assert f"rank {1 - alone}" in outcomes[alone].told
