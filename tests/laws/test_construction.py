"""Law 5 from the first line on: whatever happens to a rank while a pipe is made, the others soon name it."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gpipe
from gpipe.checkpoint import save
from gpipe.stages.remote_layers import _build_empty
from tests.support.jobs.training import FEATURES, MICRO_BATCHES, Json, batch
from tests.support.plain_loop import squares
from tests.support.processes.faults import EXCEPTIONS, strike
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.marks import FOLDER, mark, wait_for
from tests.support.processes.outcome import Outcome, answers, told_by

OURS = str(Path(gpipe.__file__).parent)
FEW = "few files"
"""A kind of fault: from here on, a process may open no more files than it has open."""
BEFORE = -1
"""A place: the process group is made, the pipe not begun."""


def construct(rank: int, world: int, who: int, kind: str, at: int, holds: bool = False) -> Json:
    """Makes a pipe and does a step of it, while a fault strikes; gives how many calls of ours construction took.

    Args:
        rank: This rank.
        world: How many stages.
        who: Where the fault strikes.
        kind: Which.
        at: At which of the calls, or `BEFORE`.
        holds: Whether rank 0 builds its layer until rank 1 has ended, and rank 2 fails meanwhile.
    """
    if rank == who and at == BEFORE:
        happen(kind)
    layers = [Slowly(stage, holds) for stage in range(world)]
    with limits_as_before(), counted(kind if rank == who else "", at) as seen:
        pipe = gpipe.GPipe(layers, [1] * world, MICRO_BATCHES, seed=0, driver="process")
    pipe.step(*batch(0), squares)
    return seen[0]


class Slowly:
    """Makes a layer; if held, the first until rank 1 has ended, the third fails once that has begun."""

    def __init__(self, stage: int, holds: bool) -> None:
        self.stage, self.holds = stage, holds

    def __call__(self) -> nn.Module:
        layer = nn.Linear(FEATURES, FEATURES)
        if not layer.weight.is_meta and self.holds:
            building = Path(os.environ[FOLDER], "building")
            if self.stage == 0:
                building.touch()
                wait_for(building.with_name("rank_1.json"))
            elif self.stage == 2:
                wait_for(building)
                strike("FaultError")
        return layer


@contextmanager
def counted(kind: str, at: int) -> Iterator[list[int]]:
    """Counts the calls of ours in this thread, and has the fault happen at one of them.

    What is raised while a layer is tried on the meta device is no failure: there it happens at the next call behind.
    How many calls come before depends on what the process has imported by then.
    """
    seen, due = [0], False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal due
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen[0] += 1
            due = due or (bool(kind) and seen[0] == at)
            if due and not (kind in EXCEPTIONS and is_tried(frame)):
                due = False
                happen(kind)

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def is_tried(frame: FrameType | None) -> bool:
    """Whether a layer is being built on the meta device, for the names and shapes in it."""
    while frame is not None and frame.f_code is not _build_empty.__code__:
        frame = frame.f_back
    return frame is not None


def happen(kind: str) -> None:
    if kind != FEW:
        strike(kind)
        return
    mark()
    resource.setrlimit(resource.RLIMIT_NOFILE, (filled_up() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def filled_up() -> int:
    """The highest number of an open file, when all below it are in use."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (filled := os.dup(0)) < highest:
        pass
    return filled


@contextmanager
def limits_as_before() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def again(rank: int, world: int, who: int, kind: str, at: int) -> Json:
    """The same group makes a sound pipe after one that failed; gives what was raised, and the loss."""
    told = ""
    try:
        construct(rank, world, who, kind, at)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    pipe = gpipe.GPipe(
        [nn.Identity(), nn.Linear(FEATURES, FEATURES)], [1, 1], MICRO_BATCHES, seed=0, driver="process"
    )
    pipe.step(*batch(0), squares)
    return [told, ones.item()]


def save_and_die(rank: int, world: int, who: int) -> None:
    """A rank dies when it should write its part of a checkpoint; `limit` is longer than anybody has patience."""
    pipe = gpipe.GPipe(
        [nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)],
        [1, 1],
        MICRO_BATCHES,
        seed=0,
        driver="process",
    )
    if rank == who:
        vars(save)["write_part"] = lambda job: strike("SIGKILL")
    gpipe.save(os.environ[FOLDER], pipe, background=True, limit=3600.0)
    while True:
        pipe.step(*batch(0), squares)


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
    check_told(run_ranks(3, construct, who, "SIGKILL", at), who, " is gone: it ")


@pytest.mark.parametrize("at", PLACES[1:-1])
def test_so_is_one_that_fails_and_goes_on_with_something_else(at: int, pool: WorkerPool) -> None:
    who = at % 3
    outcomes = pool.run(construct, who, "FaultError", at, world=3)
    assert outcomes[who].error == "FaultError", told_by(outcomes)
    check_told(outcomes, who, "FaultError: tired 7")


@pytest.mark.parametrize("at", PLACES[1:-2])
def test_so_is_one_that_may_open_no_more_files(at: int, pool: WorkerPool) -> None:
    who = at % 2
    outcomes = pool.run(construct, who, FEW, at, world=2)
    assert outcomes[who].error == "OSError", told_by(outcomes)
    assert "Too many open files" in outcomes[who].told
    assert "ulimit -n" in outcomes[who].told
    check_told(outcomes, who, "Too many open files")


def test_nobody_waits_for_a_rank_that_builds_to_hear_of_another(pool: WorkerPool) -> None:
    """Rank 0 builds its layer until rank 1 has ended, which it does because rank 2 fails meanwhile."""
    outcomes = pool.run(construct, -1, "", BEFORE, True, world=3)
    assert outcomes[1].error == outcomes[0].error == "RemoteError", told_by(outcomes)


def test_the_group_is_good_for_all_afterwards(pool: WorkerPool) -> None:
    for at in (70, 260, 340):
        found = answers(pool.run(again, 1, "FaultError", at, world=2))
        assert [ones for _, ones in found] == [2.0, 2.0]
        assert "FaultError" in found[0][0]
        assert found[1][0] == "FaultError: tired 7"


def test_a_rank_that_says_nothing_is_named_after_the_timeout(pool: WorkerPool) -> None:
    outcomes = pool.run(construct, 1, "sleep", 100, world=3, timeout=4, stuck=[1])
    for rank in (0, 2):
        assert outcomes[rank].error == "RemoteError", told_by(outcomes)
        assert "rank 1: no message for 4 s, the timeout of the process group" in outcomes[rank].told


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_before_it_has_saved_keeps_nobody(who: int) -> None:
    outcomes = run_ranks(2, save_and_die, who)
    check_told(outcomes, who, "")
