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
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


FAST, SLOW = "tests/test_one.py::test_fast", "tests/test_one.py::test_slow"


def test_make_test_samples_slow_tests_and_leaves_out_slower_ones_beside_fast_ones() -> None:
    fast, slow = Case(FAST), [Case(f"{SLOW}[{number}]") for number in range(12)]

    def selected(seconds: float, *beside: Case) -> list[object]:
        return [*durations.select([*slow, *beside], {SLOW: seconds})]  # type: ignore[list-item]

    some = selected(durations.TEST_SECONDS / 4.5, fast)
    assert len({*some} - {fast}) == 4
    assert selected(durations.TEST_SECONDS / 4.5, fast) == some
    assert {*selected(0.0, fast)} == {*slow, fast}
    assert len(selected(durations.CASE_SECONDS, fast)) == 2
    assert selected(durations.CASE_SECONDS + 1, fast) == [fast]
    assert len(selected(durations.CASE_SECONDS + 1)) == 1
    assert selected(durations.LONGEST_SECONDS + 1) == []
