"""Law 5 from the first line on: whatever happens to a rank while a pipe is made, the others soon name it."""

import pytest

from tests.support.jobs import construction as jobs
from tests.support.jobs.construction import BEFORE, FEW
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import Outcome, answers, told_by

PLACES = [BEFORE, 30, 70, 130, 200, 260, 300, 340, 380, 410, 440]
"""Calls of ours from the first to about the last of the construction of two ranks."""


def check_told(outcomes: list[Outcome], who: int, exception: str) -> None:
    """All others have raised and named the rank."""
    for outcome in outcomes:
        if outcome.rank != who:
            assert outcome.error == "RemoteError", told_by(outcomes)
            assert f"rank {who} " in outcome.told, told_by(outcomes)
            assert exception in outcome.told, told_by(outcomes)
            assert outcome.code in (None, 1), told_by(outcomes)  # a thread in gloo may not take the process down


@pytest.mark.parametrize("at", PLACES)
def test_a_rank_that_dies_anywhere_is_named(at: int) -> None:
    who = at % 3
    check_told(run_ranks(3, jobs.construct, who, "SIGKILL", at), who, " is gone; it ")


@pytest.mark.parametrize("at", PLACES[1:-1])
def test_so_is_one_that_fails_and_goes_on_with_something_else(at: int, pool: WorkerPool) -> None:
    who = at % 3
    outcomes = pool.run(jobs.construct, who, "FaultError", at, world=3)
    assert outcomes[who].error == "FaultError", told_by(outcomes)
    check_told(outcomes, who, "FaultError: tired 7")


@pytest.mark.parametrize("at", PLACES[1:-2])
def test_so_is_one_that_may_open_no_more_files(at: int, pool: WorkerPool) -> None:
    who = at % 2
    outcomes = pool.run(jobs.construct, who, FEW, at, world=2)
    assert outcomes[who].error == "OSError", told_by(outcomes)
    assert "Too many open files" in outcomes[who].told
    assert "ulimit -n" in outcomes[who].told
    check_told(outcomes, who, "Too many open files")


def test_nobody_waits_for_a_rank_that_builds_to_hear_of_another(pool: WorkerPool) -> None:
    """Rank 0 builds its layer until rank 1 has ended, which it does because rank 2 fails meanwhile."""
    outcomes = pool.run(jobs.construct, -1, "", BEFORE, True, world=3)
    assert outcomes[1].error == outcomes[0].error == "RemoteError", told_by(outcomes)


def test_the_group_is_good_for_all_afterwards(pool: WorkerPool) -> None:
    for at in (70, 260, 340):
        found = answers(pool.run(jobs.again, 1, "FaultError", at, world=2))
        assert [ones for _, ones in found] == [2.0, 2.0]
        assert "FaultError" in found[0][0]
        assert found[1][0] == "FaultError: tired 7"


def test_a_rank_that_says_nothing_is_named_after_the_timeout(pool: WorkerPool) -> None:
    outcomes = pool.run(jobs.construct, 1, "sleep", 100, world=3, timeout=4, stuck=[1])
    for rank in (0, 2):
        assert outcomes[rank].error == "RemoteError", told_by(outcomes)
        assert "rank 1 said nothing for 4 s, the timeout of the process group" in outcomes[rank].told


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_before_it_has_saved_keeps_nobody(who: int) -> None:
    outcomes = run_ranks(2, jobs.save_and_die, who)
    check_told(outcomes, who, "")
