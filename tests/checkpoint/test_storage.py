"""Faults of storage: the error has the system's words and the path, and what was saved before stays."""

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import gpipe
from tests.support.checkpointed import differences, make, remembered, snapshot, train, trained
from tests.support.thread_ranks import rank_pipes, run_ranks

FAULTS = {
    "mkdir": (errno.EACCES, "Permission denied"),
    "open": (errno.EACCES, "Permission denied"),
    "write": (errno.ENOSPC, "No space left on device"),
    "fsync": (errno.EIO, "Input/output error"),
    "rename": (errno.EROFS, "Read-only file system"),
    "replace": (errno.EDQUOT, "Disk quota exceeded"),
}


class Failing:
    """A function of `os` that fails the n-th time."""

    def __init__(self, operation: str, nth: int) -> None:
        self.original = getattr(os, operation)
        self.number = FAULTS[operation][0]
        self.nth = nth
        self.count = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        if self.count == self.nth:
            path = [] if isinstance(args[0], int) else [str(args[0])]
            raise OSError(self.number, os.strerror(self.number), *path)
        return self.original(*args, **options)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("operation", FAULTS)
def test_every_operation_may_fail_any_time(
    operation: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th of a kind fails, for each n: the error has the system's words and a path, and nothing is lost."""
    pipe, optimizer = trained()
    gpipe.save(tmp_path, pipe, optimizer)
    expected = snapshot(pipe, optimizer)
    train(pipe, optimizer, 1)
    errors = []
    for nth in range(1, 60):
        failing = Failing(operation, nth)
        monkeypatch.setattr(os, operation, failing)
        try:
            gpipe.save(tmp_path, pipe, optimizer, background=background).wait()
        except OSError as error:
            errors.append(error)
        finally:
            monkeypatch.undo()
        if failing.count < nth:
            break
        again = make()
        other = torch.optim.AdamW(again.parameters())
        gpipe.load(tmp_path / "step_2", again, other)
        assert differences(remembered(again, other), expected) == []
        gpipe.load(tmp_path)
        assert not list(tmp_path.glob("step_*.tmp-*"))
    number, text = FAULTS[operation]
    assert nth - 2 <= len(errors) > 0  # one open only asks whether the folder was left behind
    assert [
        str(error) for error in errors if not str(error).startswith(f"[Errno {number}] {text}: '{tmp_path}")
    ] == []


def test_permission_to_make_the_folder_is_asked_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match=r"Not a directory: '.*file.*'"):
            gpipe.save(folder, make())


def test_one_rank_that_cannot_write_fails_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, _ = trained()
    folder = tmp_path / "run"
    gpipe.save(folder, pipe)
    pipe.step_number = 3
    original = os.open

    def failing(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith("stage_1.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, *args, **options)

    for background in (False, True):
        monkeypatch.setattr(os, "open", failing)
        pipes = rank_pipes(pipe, 2)
        raised = run_ranks(lambda own: gpipe.save(folder, own, background=background).wait(), pipes)  # noqa: B023
        monkeypatch.undo()
        assert isinstance(raised[1], OSError)
        assert raised[1].errno == errno.ENOSPC
        for rank in (0, 2, 3, 4, 5):
            assert isinstance(raised[rank], gpipe.RemoteError)
            assert "rank 1 failed: OSError: [Errno 28] No space left on device: '" in str(raised[rank])
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_2"]
        good = run_ranks(lambda own: gpipe.save(tmp_path / "good", own).wait(), pipes)  # the next one works
        assert all(isinstance(path, Path) for path in good)


def test_without_file_descriptors_a_good_checkpoint_is_not_called_damaged(tmp_path: Path) -> None:
    pipe = gpipe.GPipe([torch.nn.Linear(2, 3)], partitions=1, micro_batches=2)
    gpipe.save(tmp_path, pipe).wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = []
    for free in range(4):
        held = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        try:
            with suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(free):
                os.close(held.pop())
            gpipe.load(tmp_path, pipe)
        except OSError as error:
            raised.append(error)
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(raised) in (2, 3)  # more are enough
    assert all(error.errno == errno.EMFILE and str(tmp_path) in str(error.filename) for error in raised), raised
