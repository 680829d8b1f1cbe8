"""One folder, many checkpoints, perhaps of several jobs: what stays, and what is cleared."""

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import gpipe
from gpipe.checkpoint.folder import begin
from tests.support.checkpointed import build, differences, fail, make, remembered, snapshot, trained

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
        os.close(draft.lock)
    (tmp_path / "step_1.tmp-notes").mkdir()
    gpipe.save(tmp_path, make(), keep=1)
    assert names(tmp_path) == sorted(["latest", "step_0", "step_1.tmp-notes", elsewhere.name, alive.path.name])
    alive.end()


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
        thread.join()
    paths = list(tmp_path.glob("step_*"))
    assert len(paths) >= 6
    pipe = make()
    optimizer = torch.optim.AdamW(pipe.parameters())
    for path in [tmp_path, *paths]:
        gpipe.load(path, pipe, optimizer)
        assert (
            differences(remembered(pipe, optimizer), expected[float(pipe.get_parameter("0.weight").data[0, 0])]) == []
        )


def test_a_folder_that_another_job_takes_for_left_behind_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that saved found the fresh folder of another, not locked yet, and removed it: the other's save failed."""
    taken: list[Path] = []

    def opening(path: str | Path, *how: Any, **more: Any) -> int:
        if ".tmp-" in Path(path).name and not taken:
            taken.append(Path(path))
            os.rmdir(path)
        return opened(path, *how, **more)

    opened = os.open
    monkeypatch.setattr(os, "open", opening)
    pipe = make()
    gpipe.save(tmp_path, pipe).wait()
    assert taken
    assert gpipe.load(tmp_path, pipe).step_number == pipe.step_number


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
    monkeypatch.setattr("gpipe.checkpoint.writing.prune", fail)
    with caplog.at_level(logging.WARNING):
        assert gpipe.save(tmp_path, pipe, keep=1).wait().name == "step_1"
    assert "step_1 is saved, but old checkpoints were not removed: [Errno 28]" in caplog.text


def test_a_checkpoint_is_no_folder_to_save_to(tmp_path: Path) -> None:
    path = gpipe.save(tmp_path, make()).wait()
    with pytest.raises(ValueError, match=f"is a checkpoint itself. Save to {tmp_path}"):
        gpipe.save(path, make())
    assert gpipe.load(path).step_number == 0
