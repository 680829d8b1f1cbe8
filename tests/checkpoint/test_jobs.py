"""Saving in the background, in several processes, by several jobs, again and again: what waits, and what stays."""

import copy
import gc
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpipe
from gpipe.checkpoint import files, write
from gpipe.checkpoint.folder import begin
from gpipe.errors import RemoteError
from tests.support.checkpointed import build, differences, make, remembered, snapshot, train, trained
from tests.support.thread_ranks import LIMIT, RankPipe, all_well, optimizer_of, rank_pipes, run_ranks, save_in_ranks


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What every thread waits for before it writes."""
    opened = threading.Event()
    original = files.write_file

    def waiting(*args: Any) -> Any:
        if threading.current_thread().name == "gpipe-save":
            assert opened.wait(LIMIT)
        return original(*args)

    monkeypatch.setattr(write, "write_file", waiting)
    return opened


# In the background.


def test_in_the_background_training_goes_on_and_the_next_save_waits(gate: threading.Event, tmp_path: Path) -> None:
    pipe, optimizer = trained()
    expected = snapshot(pipe, optimizer)
    first = gpipe.save(tmp_path, pipe, optimizer, background=True)
    assert not first.done
    assert gpipe.find_checkpoint(tmp_path) is None
    train(pipe, optimizer, 1)
    threading.Timer(0.1, gate.set).start()
    second = gpipe.save(tmp_path, pipe, optimizer, background=True)
    assert first.done
    assert gpipe.load(tmp_path / "step_2").step_number == 2
    assert second.wait() == second.wait() == tmp_path / "step_3"
    other = make()
    again = torch.optim.AdamW(other.parameters())
    gpipe.load(tmp_path / "step_2", other, again)
    assert differences(remembered(other, again), expected) == []


def test_a_load_waits_for_what_is_being_written(gate: threading.Event, tmp_path: Path) -> None:
    pipe, _ = trained()
    gpipe.save(tmp_path, pipe, background=True)
    threading.Timer(0.1, gate.set).start()
    assert gpipe.load(tmp_path, pipe).step_number == 2


def fail(*args: Any) -> Any:
    raise OSError(28, "No space left on device", "path")


@pytest.mark.parametrize("act", ["save", "load", "wait"])
def test_an_error_in_the_background_is_logged_and_raised_once_at_the_next_call(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, _ = trained()
    gpipe.save(tmp_path, pipe)
    monkeypatch.setattr(write, "write_file", fail)
    saving = gpipe.save(tmp_path, pipe, background=True)
    while not saving.done:
        pass
    monkeypatch.undo()
    assert "a checkpoint could not be saved: OSError: [Errno 28] No space left on device: 'path'" in caplog.text
    with pytest.raises(OSError, match="No space left on device"):
        {"save": lambda: gpipe.save(tmp_path, pipe), "load": lambda: gpipe.load(tmp_path, pipe), "wait": saving.wait}[
            act
        ]()
    with pytest.raises(RuntimeError, match="this checkpoint was not saved, as was said"):
        saving.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_2"]
    pipe.step_number = 3
    assert gpipe.save(tmp_path, pipe, background=True).wait().name == "step_3"
    assert gpipe.load(tmp_path, pipe).step_number == 3


def test_a_script_that_ends_lets_the_checkpoint_be_written(tmp_path: Path) -> None:
    source = """
        import sys, time, torch, gpipe
        from gpipe.checkpoint import files, write
        original = write.write_file
        def slow(*args):
            time.sleep(0.3)
            return original(*args)
        write.write_file = slow
        pipe = gpipe.GPipe([torch.nn.Linear(2, 2)], 1, 1)
        gpipe.save(sys.argv[1], pipe, background=True)
        raise SystemExit(3)
    """
    command = [sys.executable, "-c", textwrap.dedent(source), str(tmp_path)]
    assert subprocess.run(command, timeout=170).returncode == 3
    assert gpipe.load(tmp_path).step_number == 0


def test_a_pipe_can_be_copied_and_forgotten_while_it_is_saved(gate: threading.Event, tmp_path: Path) -> None:
    pipe = make()
    saving = gpipe.save(tmp_path, pipe, background=True)
    again = copy.deepcopy(pipe)
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
    gate.set()
    assert gpipe.load(saving.wait(), again).step_number == 0


def test_an_interrupted_save_lets_go_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    pipe = make()
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(write, "write_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpipe.save(tmp_path, pipe)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    for background in (False, True):
        gpipe.save(tmp_path, pipe, background=background).wait()
    assert set(os.listdir("/proc/self/fd")) <= before


# Several processes.


def test_all_ranks_must_be_given_the_same(tmp_path: Path) -> None:
    pipes = rank_pipes(trained()[0])
    pipes[2].step_number = 7
    raised = run_ranks(lambda own: gpipe.save(tmp_path / str(min(own.team.rank, 1)), own), pipes)
    for error in raised:
        assert isinstance(error, ValueError)
        assert str(error) == (
            f"all ranks must be given the same: folder is '{tmp_path}/1' on rank 1 and '{tmp_path}/0' on rank 0; "
            f"folder is '{tmp_path}/1' on rank 2 and '{tmp_path}/0' on rank 0; "
            f"step_number is 7 on rank 2 and 2 on rank 0"
        )
    assert [list(folder.iterdir()) for folder in tmp_path.iterdir()] == [[]]


def test_what_one_rank_cannot_save_no_rank_saves(tmp_path: Path) -> None:
    pipes = rank_pipes(trained()[0])
    pipes[1].register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    raised = run_ranks(lambda own: gpipe.save(tmp_path, own, background=True), pipes)
    assert isinstance(raised[1], ValueError)
    for rank in (0, 2):
        assert isinstance(raised[rank], RemoteError)
        assert "rank 1 failed: ValueError: nothing was saved:\n- wide is of torch.complex128" in str(raised[rank])
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_are_not_stages_of_one_pipe_are_refused(tmp_path: Path) -> None:
    pipes = rank_pipes(trained()[0])
    pipes[1]._modules.update(pipes[0]._modules)
    raised = run_ranks(lambda own: gpipe.save(tmp_path, own), pipes)
    assert isinstance(raised[0], ValueError)
    assert "several ranks hold 0.weight, 0.bias" in str(raised[0])
    assert list(tmp_path.iterdir()) == []


def test_a_rank_of_which_nothing_comes_is_given_up_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, all_but_1 = write.write_part, threading.Barrier(2)

    def write_part(job: write.Job) -> None:
        if job.rank != 1:
            original(job)
            all_but_1.wait(LIMIT)

    monkeypatch.setattr("gpipe.checkpoint.save.write_part", write_part)
    pipes = rank_pipes(trained()[0])
    raised = run_ranks(lambda own: gpipe.save(tmp_path, own, background=True, limit=0.3).wait(), pipes)
    assert isinstance(raised[0], TimeoutError)
    assert str(raised[0]).startswith("ranks [1] wrote nothing into ")
    assert "for 0.3 seconds; look whether they are alive, and whether the folder is one that all hosts" in str(
        raised[0]
    )
    assert all(isinstance(error, RemoteError) for error in raised[1:])
    assert list(tmp_path.iterdir()) == []


class ClockOfRank0:
    """Stands for the module `time`: so many seconds go by between two looks of rank 0, and then no more."""

    def __init__(self, looks: int, seconds: float) -> None:
        self.now, self.looks, self.seconds = 0.0, looks, seconds
        self.left, self.looked, self.may_look = looks, threading.Semaphore(0), threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if not self.left:
            time.sleep(seconds)
            return
        self.left -= 1
        self.now += self.seconds
        self.looked.release()
        assert self.may_look.acquire(timeout=LIMIT)

    @contextmanager
    def between_looks(self) -> Iterator[None]:
        """What another rank does meanwhile."""
        assert self.looked.acquire(timeout=LIMIT)
        yield
        self.may_look.release()


def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, clock = write.write_part, ClockOfRank0(looks=12, seconds=0.7)

    def slowly(job: write.Job) -> None:
        for size in range(clock.looks if job.rank == 1 else 0):
            with clock.between_looks():
                (job.path / "growing").write_bytes(b"x" * size)
        (job.path / "growing").unlink(missing_ok=True)
        original(job)

    monkeypatch.setattr("gpipe.checkpoint.save.write_part", slowly)
    monkeypatch.setattr(write, "time", clock)
    pipes = rank_pipes(trained()[0])
    all_well(run_ranks(lambda own: gpipe.save(tmp_path, own, background=True, limit=0.8).wait(), pipes))
    assert clock.now > 10 * 0.8
    assert gpipe.load(tmp_path).step_number == 2


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_dies_leaves_no_checkpoint(background: bool, tmp_path: Path) -> None:
    pipes = rank_pipes(trained()[0])

    def save(own: RankPipe) -> Any:
        if own.team.rank == 2:
            exchange, times = own.team.exchange, iter([1])

            def die(told: bytes) -> list[bytes]:
                if next(times, 0):
                    return exchange(told)
                own.team.meeting.leave()
                raise SystemExit

            own.team.exchange = die  # type: ignore[method-assign]
        return gpipe.save(tmp_path, own, background=background).wait()  # type: ignore[arg-type]

    raised = run_ranks(save, pipes)
    assert [type(error) for error in raised] == [RemoteError, RemoteError, SystemExit]
    if not background:  # else rank 2 had written its part, and the others may have made it whole before it died
        assert gpipe.find_checkpoint(tmp_path) is None


# One folder, many checkpoints.


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_keep_keeps_the_last_ones(tmp_path: Path) -> None:
    pipe = make()
    for step in range(12):
        pipe.step_number = step
        gpipe.save(tmp_path, pipe, keep=3)
    assert names(tmp_path) == ["latest", "step_10", "step_11", "step_9"]
    gpipe.save(tmp_path, pipe, keep=1)
    assert names(tmp_path) == ["latest", "step_11.2"]


def test_a_step_that_is_there_is_never_touched(tmp_path: Path) -> None:
    """A run that went back to an earlier checkpoint comes by the same steps again."""
    pipe, optimizer = trained()
    first = gpipe.save(tmp_path, pipe, optimizer).wait()
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    pipe.step_number = 5
    gpipe.save(tmp_path, pipe, optimizer)
    with torch.no_grad():
        pipe.get_parameter("0.weight").zero_()
    pipe.step_number = 2
    again = gpipe.save(tmp_path, pipe, optimizer).wait()
    assert again.name == "step_2.2"
    assert gpipe.load(tmp_path).path == again
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    pipe.step_number = 3
    gpipe.save(tmp_path, pipe, optimizer, keep=2)
    assert names(tmp_path) == ["latest", "step_2.2", "step_3", "step_5"]  # what comes later is not of this past


def test_what_was_left_behind_is_cleared_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    dead, alive, odd = (begin(tmp_path, 1) for _ in range(3))
    elsewhere = odd.path.with_name("step_1.tmp-00000000-00000000")
    odd.path.rename(elsewhere)
    (dead.path / "stage_0.safetensors").write_bytes(b"half")
    for draft in (dead, odd):
        draft.close()
    (tmp_path / "step_1.tmp-notes").mkdir()
    gpipe.save(tmp_path, make(), keep=1)
    assert names(tmp_path) == sorted(["latest", "step_0", "step_1.tmp-notes", elsewhere.name, alive.path.name])
    alive.close()


def test_two_jobs_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    """Each checkpoint is wholly of one job, though both save the same steps at the same time."""
    jobs = [trained(build(seed), partitions=seed, steps=1) for seed in (1, 2, 3)]
    expected: dict[float, dict[str, Any]] = {}

    def run(at: int) -> None:
        pipe, optimizer = jobs[at]
        for step in range(6):
            pipe.step_number = step
            gpipe.save(tmp_path, pipe, optimizer, background=at == 1, keep=6 if at == 2 else None).wait()

    for pipe, optimizer in jobs:
        expected[float(pipe.get_parameter("0.weight").data[0, 0])] = snapshot(pipe, optimizer)
    threads = [threading.Thread(target=run, args=[at], daemon=True) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    paths = list(tmp_path.glob("step_*"))
    assert len(paths) >= 6
    pipe = make()
    optimizer = torch.optim.AdamW(pipe.parameters())
    for path in [tmp_path, *paths]:
        gpipe.load(path, pipe, optimizer)
        assert (
            differences(remembered(pipe, optimizer), expected[float(pipe.get_parameter("0.weight").data[0, 0])]) == []
        )


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path) -> None:
    pipe = make()
    for step in (1, 2, 3):
        pipe.step_number = step
        path = gpipe.save(tmp_path, pipe, keep=2).wait()
        os.utime(path, (10**9 - step, 10**9 - step))
    assert names(tmp_path) == ["latest", "step_2", "step_3"]
    assert gpipe.load(tmp_path).step_number == 3


def test_a_folder_may_be_moved_and_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = gpipe.save("run", make()).wait()
    assert path == tmp_path / "run" / "step_0"
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert gpipe.find_checkpoint("moved") == gpipe.load("moved").path == tmp_path / "moved" / "step_0"
    assert gpipe.load(tmp_path / "moved" / "step_0").step_number == 0


def test_older_checkpoints_that_cannot_be_removed_are_told_and_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = make()
    gpipe.save(tmp_path, pipe)
    pipe.step_number = 1
    monkeypatch.setattr("gpipe.checkpoint.write.prune", fail)
    with caplog.at_level(logging.WARNING):
        assert gpipe.save(tmp_path, pipe, keep=1).wait().name == "step_1"
    assert "step_1 is saved, but older checkpoints could not be removed: [Errno 28]" in caplog.text


def test_a_checkpoint_is_no_folder_to_save_to(tmp_path: Path) -> None:
    path = gpipe.save(tmp_path, make()).wait()
    with pytest.raises(ValueError, match=f"is a checkpoint itself, not the folder of a run; save to {tmp_path}"):
        gpipe.save(path, make())
    assert gpipe.load(path).step_number == 0


def test_all_ranks_hear_what_the_first_one_finds(tmp_path: Path) -> None:
    pipes = rank_pipes(make())

    def find(own: RankPipe) -> Path | None:
        return gpipe.find_checkpoint(tmp_path, own)

    assert all_well(run_ranks(find, pipes)) == [None] * 3
    path = gpipe.save(tmp_path, make()).wait()
    assert all_well(run_ranks(find, pipes)) == [path] * 3
    (tmp_path / "latest").write_text("x")
    assert all(isinstance(error, gpipe.CheckpointError) for error in run_ranks(find, pipes))


def test_a_stage_without_parameters_has_no_optimizer(tmp_path: Path) -> None:
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)]
    pipe, optimizer = trained(layers, [1, 1, 1])
    save_in_ranks(tmp_path, pipe, optimizer)
    whole = make([nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)], [1, 1, 1])
    other = torch.optim.AdamW(whole.parameters())

    def load(own: RankPipe) -> dict[str, Any]:
        mine = optimizer_of(whole, other, own)
        assert (mine is None) == (own.team.rank == 1)
        gpipe.load(tmp_path, own, mine)
        return remembered(own, mine)

    found = [pair for own in all_well(run_ranks(load, rank_pipes(whole))) for pair in own.items()]
    assert differences(dict(found), remembered(pipe, optimizer)) == []
