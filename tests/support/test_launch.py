"""The harness itself: every way in which a rank may end is told, and nothing that it started lives on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import progress
from tests.support.jobs import harness as jobs
from tests.support.processes.fork_server import ROOT
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import HungError, Outcome, answers


def alive(pid: int) -> bool:
    words = progress.stat_of(pid)
    return bool(words) and words[0] != "Z"


def gone(pid: int) -> bool:
    while alive(pid):
        time.sleep(0.01)
    return True


def test_ranks_meet_compute_and_answer(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.add_up, 10))
    assert [answer[:4] for answer in found] == [[60, 4, "4", 1]] * 4


def test_a_pool_keeps_its_processes_and_takes_as_many_as_a_job_wants(pool: WorkerPool) -> None:
    before = answers(pool.run("tests.support.jobs.harness:add_up", 1))
    for world in (2, 3, 1, 4):
        found = answers(pool.run(jobs.add_up, 1, world=world))
        assert [answer[0] for answer in found] == [sum(range(world))] * world
        assert [answer[4] for answer in found] == [answer[4] for answer in before][:world]


def check_raised(outcomes: list[Outcome]) -> None:
    first, second = outcomes
    assert second.error == "OddError"
    assert second.told == "odd 7\nnoted"
    assert "in raises" in second.text
    assert second.text.endswith("OddError: odd 7\nnoted\n")
    assert second.seconds is not None
    assert second.seconds >= 0.05  # that is how long the job waits after its mark
    assert not first.answered
    assert not second.answered


def test_a_rank_that_raises_is_told_in_its_own_words_and_the_pool_lives_on(pool: WorkerPool) -> None:
    before = answers(pool.run(jobs.add_up, 1, world=2))
    outcomes = pool.run(jobs.raises, 1, world=2, timeout=20)
    check_raised(outcomes)
    assert [outcome.code for outcome in outcomes] == [None, None]
    assert outcomes[0].error == "RuntimeError"  # gloo's, since rank 1 has left the group
    assert answers(pool.run(jobs.add_up, 1, world=2)) == before


def test_a_fresh_rank_that_raises_ends_with_a_code_and_takes_the_other_along() -> None:
    outcomes = run_ranks(2, jobs.raises, 1)
    check_raised(outcomes)
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "OddError: odd 7" in outcomes[1].stderr
    with pytest.raises(AssertionError, match=r"(?s)rank 0 raised RuntimeError.*rank 1 raised OddError, exit code 1"):
        answers(outcomes)


@pytest.mark.parametrize(
    ("how", "code", "error"),
    [("os._exit", 0, ""), ("sys.exit", None, "SystemExit"), ("SIGKILL", -9, ""), ("SIGSEGV", -11, "")],
)
def test_a_rank_of_a_pool_that_ends_early_is_told_and_replaced(how: str, code: int | None, error: str) -> None:
    with WorkerPool(2) as pool:
        first, second = pool.run(jobs.ends, 1, how)
        assert (first.answer, first.code, first.hung) == ("fine", None, False)
        assert (second.answered, second.code, second.error, second.hung) == (False, code, error, False)
        assert second.seconds is not None
        with pytest.raises(AssertionError, match="rank 1"):
            answers([first, second])
        assert len(answers(pool.run(jobs.add_up, 1))) == 2


@pytest.mark.parametrize("how", ["sleep", "SIGSTOP"])
def test_ranks_that_stand_still_are_killed_and_their_place_is_told(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(2) as pool:
        pids = [answer[4] for answer in answers(pool.run(jobs.add_up, 1))]
        monkeypatch.setattr(progress, "LOOKS", 3)
        monkeypatch.setattr(progress, "LOOK_SECONDS", 0.5)
        with pytest.raises(HungError, match=r"they stood still: of 2 ranks, still at it: 1") as raised:
            pool.run(jobs.ends, 1, how)
        monkeypatch.undo()
        _, second = raised.value.outcomes
        assert second.hung
        assert ("harness.py" in second.stderr) == (how == "sleep")  # a stopped process says nothing
        assert not any(map(alive, pids))
        assert len(answers(pool.run(jobs.add_up, 1))) == 2


def test_what_a_rank_leaves_running_is_told_and_ended() -> None:
    (outcome,) = run_ranks(1, jobs.leaves_a_process)
    assert outcome.left
    assert gone(outcome.answer)


def test_a_pool_that_is_dropped_in_an_exception_leaves_no_process() -> None:
    pids: list[int] = []

    def fails() -> None:
        with WorkerPool(2) as pool:
            pids.extend(answer[4] for answer in answers(pool.run(jobs.add_up, 1)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(pids) == 2
    assert all(map(gone, pids))


KILLED = """
import os, signal
from tests.support.jobs import harness as jobs
from tests.support.processes.launch import WorkerPool
print(WorkerPool(1).run(jobs.add_up, 1)[0].answer[4], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_die_with_whoever_started_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # which it cannot tidy up
    done = progress.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert gone(int(done.stdout))
