"""Recordings over processes: each has the timelines of all ranks, and the parts of its own wall time."""

import pytest

from tests.support.jobs import recorded
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

CLOCKS_APART = 1.0
"""Seconds: one host has one clock, but what else runs on it may hold up what the clocks are compared by."""


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_has_all_ranks_and_parts_that_sum_to_its_wall_time(world: int, pool: WorkerPool) -> None:
    for found in answers(pool.run(recorded.record, world=world)):
        assert found["ranks"] == world
        assert sum(found["shares"].values()) == pytest.approx(1)
        asleep = recorded.STEPS * recorded.MICRO_BATCHES * 4 * recorded.SECONDS  # the first stage, at least
        assert asleep <= found["seconds"] <= found["wall since all met"] + CLOCKS_APART
        assert len(found["spans"]) == recorded.STEPS
        assert all(found["spans"])
