"""What watches test runs: it ends those that stand still, however long they were at work, and no others."""

import signal
import subprocess
import sys
from collections.abc import Collection

import pytest

from tests.support import durations, progress
from tests.support.progress import LEAST_SHARE, LOOK_SECONDS, LOOKS, Progress


def looked_at(monkeypatch: pytest.MonkeyPatch, each: float, looks: int) -> list[bool]:
    """What looks say of a process that computes so long between one and the next."""
    spent = 0.0

    def seconds_of(pids: Collection[int]) -> dict[int, float]:
        nonlocal spent
        spent += each
        return {1: spent}

    monkeypatch.setattr(progress, "seconds_of", seconds_of)
    watched = Progress([1])
    found = []
    for _ in range(looks):
        watched._next = 0.0
        found.append(watched.stands_still())
    return found


def test_who_hardly_computes_stands_still_after_so_many_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    polling = 0.5 * LEAST_SHARE * LOOK_SECONDS
    assert looked_at(monkeypatch, polling, LOOKS + 3) == [False] * LOOKS + [True] * 3
    on_a_loaded_machine = 0.1 * LOOK_SECONDS
    assert not any(looked_at(monkeypatch, on_a_loaded_machine, 2 * LOOKS))


def test_processes_that_end_take_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([{1: 1.0, 2: 9.0}, {1: 2.0}, {1: 3.0, 3: 1.0}])
    monkeypatch.setattr(progress, "seconds_of", lambda pids: next(steps))
    watched, found = Progress([1]), []
    for _ in range(3):
        watched._next = 0.0
        watched.stands_still()
        found.append(watched.seconds)
    assert found == [10.0, 11.0, 13.0]


IMPATIENT = """
import sys
from tests.support import progress
progress.LOOK_SECONDS, progress.LOOKS = 0.01, 5
progress.watch(int(sys.argv[1]))
"""


def test_a_test_that_stands_still_is_named_and_ended() -> None:
    still = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
    watch = [sys.executable, "-c", IMPATIENT, str(still.pid)]
    with subprocess.Popen(
        watch, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=durations.FILE.parents[1]
    ) as made:
        assert made.stdin is not None
        print("test_one\ntest_two", file=made.stdin, flush=True)
        assert still.wait() == -signal.SIGABRT
        assert made.stderr is not None
        assert "test_two stood still" in made.stderr.read()


class Case:
    def __init__(self, **values: int) -> None:
        self.nodeid = "tests/test_one.py::test_two[" + "-".join(map(str, values.values())) + "]"
        self.callspec = type("Spec", (), {"indices": values})


CASES = [Case(a=a, b=b) for a in range(4) for b in range(3)]
TEST = "tests/test_one.py::test_two"


def test_a_tier_takes_the_cases_that_it_has_time_for_of_all_values_if_it_can() -> None:
    def chosen(tier: str, seconds: float) -> list[Case]:
        kept = durations.choose(CASES, tier, {TEST: seconds})  # type: ignore[arg-type]
        return [case for case in CASES if case in kept]  # type: ignore[comparison-overlap]

    some = chosen("test", durations.TIERS["test"].together / 4.5)
    assert len(some) == 4
    assert {case.callspec.indices["a"] for case in some} == {0, 1, 2, 3}  # type: ignore[attr-defined]
    assert {case.callspec.indices["b"] for case in some} == {0, 1, 2}  # type: ignore[attr-defined]
    assert chosen("test", durations.TIERS["test"].together / 4.5) == some
    assert chosen("whole", 1000.0) == chosen("test", 0.0001) == CASES
    assert len(chosen("ci", durations.TIERS["ci"].alone)) == 1
    assert chosen("quick", 1000.0) == chosen("test", 1000.0) == chosen("ci", 1000.0) == []
