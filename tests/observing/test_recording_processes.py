"""Recordings over processes: each has the timelines of all ranks, and the parts of its own wall time."""

import pytest

from tests.support.jobs import recorded
from tests.support.processes.launch import Crew
from tests.support.processes.outcome import answers


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_has_all_ranks_and_parts_that_sum_to_its_wall_time(world: int, crew: Crew) -> None:
    seconds = [0.02] * 5
    for found in answers(crew.run(recorded.record, seconds, [4, 1], world=world)):
        assert found["ranks"] == world
        assert sum(found["shares"].values()) == pytest.approx(1)
        # Others may begin earlier, and this process may wait for the processor behind its last step.
        assert 0.97 * found["wall"] <= found["seconds"] <= 1.005 * found["wall since all met"]
        assert len(found["spans"]) == recorded.STEPS
        assert all(found["spans"])
        assert any("Stage 0" in advice for advice in found["advice"])
