"""Law 5 over processes: whatever happens to one rank, all others raise soon and say where it happened."""

import pytest

from tests.support.jobs.training import reference
from tests.support.processes.faults import LAYER_PHASES, Fault
from tests.support.processes.launch import WorkerPool
from tests.support.processes.matrix import Case, cases, find, run, shortfalls
from tests.support.processes.outcome import Outcome

INSIDE = (*LAYER_PHASES, "loss")
ALL = [*cases(2), *cases(4)]
CAUGHT = [case for case in ALL if not case.ends_the_rank and case.must_raise]
QUIET = [case for case in ALL if not case.ends_the_rank and not case.must_raise]
FATAL = [case for case in ALL if case.ends_the_rank and not case.stalls]
STUCK = [case for case in ALL if case.stalls]


@pytest.mark.parametrize("case", CAUGHT, ids=str)
def test_an_exception_is_told_on_every_rank_and_the_next_step_works(case: Case, pool: WorkerPool) -> None:
    findings = run(case, pool)
    assert shortfalls(findings) == []
    assert all(one.seconds is not None for one in findings)


@pytest.mark.parametrize("case", [*cases(2, ["FaultError"], INSIDE)], ids=str)
def test_so_it_is_with_messages_in_shared_memory(case: Case, pool: WorkerPool) -> None:
    assert shortfalls(run(case, pool, length=1500)) == []


@pytest.mark.parametrize("case", QUIET, ids=str)
def test_a_nan_goes_the_way_that_it_goes_without_a_pipeline(case: Case, pool: WorkerPool) -> None:
    assert shortfalls(run(case, pool)) == []


@pytest.mark.parametrize("case", FATAL, ids=str)
def test_a_rank_that_ends_is_told_on_every_other(case: Case, pool: WorkerPool) -> None:
    assert shortfalls(run(case, pool)) == []


@pytest.mark.parametrize("case", STUCK, ids=str)
def test_a_rank_that_stands_still_is_told_after_the_timeout(case: Case, pool: WorkerPool) -> None:
    assert shortfalls(run(case, pool, timeout=4)) == []


CASE = Case(2, 1, Fault("FaultError", "backward", layer=7))
TOLD = "in the backward of micro-batch 1, rank 1, stage 1, layer 7 (7: Faulty), action 9 of 12"


def failed(rank: int, error: str, told: str) -> Outcome:
    return Outcome(rank, error=error, told=told, marked=1.0, seconds=0.5)


def test_a_judge_misses_each_thing_that_a_message_leaves_out() -> None:
    right = reference(CASE.fault)
    whole = failed(0, "RemoteError", f"FaultError: tired 7\n{TOLD}")
    assert shortfalls([find(CASE, whole, right)]) == []
    left_out = {
        "rank 1": "rank",
        "stage 1": "stage",
        "layer 7": "layer",
        "backward": "phase",
        "micro-batch 1": "micro-batch",
        "FaultError": "exception",
        "tired 7": "text",
    }
    for part, name in left_out.items():
        found = find(CASE, failed(0, "RemoteError", whole.told.replace(part, "...")), right)
        assert found.missing == (name,)
    assert find(CASE, failed(0, "RemoteError", whole.told.replace("rank 1", "rank 10")), right).missing


def test_a_judge_sees_silence_hanging_and_contentment() -> None:
    right = reference(CASE.fault)
    assert find(CASE, Outcome(0, answered=True, answer={**right, "failure": None}), right).missing
    assert find(CASE, Outcome(0, hung=True), right).hung
    death = Case(2, 1, Fault("SIGKILL", "forward", layer=7))
    assert find(death, Outcome(0, code=0), right).contented
    assert not find(death, Outcome(1, code=-9), right).missing


def test_a_judge_sees_one_wrong_digit() -> None:
    right = reference(CASE.fault)
    losses = [*right["losses"][:2], right["losses"][2] * (1 + 1e-7)]
    answer = {"losses": losses, "parameters": right["parameters"], "failure": None}
    assert find(CASE, Outcome(0, answered=True, answer=answer), right).wrong
    assert not find(CASE, Outcome(0, answered=True, answer={**right, "failure": None}), right).wrong
