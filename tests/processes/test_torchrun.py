"""Under torchrun nothing outlives what started it (R3), whether the ranks compute or one of them is stuck."""

from pathlib import Path

import pytest

from tests.processes.torchrun import torchrun, wait_for


@pytest.mark.parametrize("stuck", [-1, 1])
def test_workers_end_soon_after_their_launcher_was_killed(stuck: int, tmp_path: Path) -> None:
    with torchrun(2, "tests.processes.worker", str(tmp_path), "gpipe", str(stuck), folder=tmp_path) as launched:
        wait_for(launched, [tmp_path / f"ready_{rank}" for rank in range(2)], limit=120)
        assert len(launched.workers()) >= 2
        assert launched.orphans(30) == []


def test_the_look_sees_orphans_and_they_are_ended(tmp_path: Path) -> None:
    with torchrun(2, "tests.processes.worker", str(tmp_path), "torch", "0", folder=tmp_path) as launched:
        wait_for(launched, [tmp_path / f"ready_{rank}" for rank in range(2)], limit=120)
        orphans = launched.orphans(0.5)
    assert len(orphans) == 2
    assert launched.workers() == []
