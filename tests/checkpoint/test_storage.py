"""Faults of storage: the error has the system's words and the path, and what was saved before stays."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpipe
from tests.support.checkpointed import differences, make, remembered, snapshot, train, trained
from tests.support.thread_ranks import rank_pipes, run_ranks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() or not mount:
        pytest.skip("mounting a small file system needs root")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=300k", "none", folder], capture_output=True, timeout=60)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True, timeout=60)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_told_and_the_previous_checkpoint_stays(background: bool, small_disk: Path) -> None:
    pipe, optimizer = trained()
    before = snapshot(pipe, optimizer)
    folder = small_disk / "run"
    gpipe.save(folder, pipe, optimizer)
    train(pipe, optimizer, 1)
    with pytest.raises(OSError, match=r"No space left on device: '.*step_3\.tmp-.*/extra.safetensors'") as raised:
        gpipe.save(folder, pipe, optimizer, extra=torch.zeros(10**5), background=background).wait()
    assert raised.value.errno == errno.ENOSPC
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_2"]
    train(pipe, optimizer, 1)  # training may go on, and save again
    gpipe.save(folder, pipe, optimizer)
    again = make()
    other = torch.optim.AdamW(again.parameters())
    assert gpipe.load(folder / "step_2", again, other).step_number == 2
    assert differences(remembered(again, other), before) == []
    assert gpipe.load(folder).step_number == 4


def test_a_read_only_file_system_is_told(small_disk: Path) -> None:
    pipe, optimizer = trained()
    folder = small_disk / "run"
    gpipe.save(folder, pipe, optimizer)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True, timeout=60)
    train(pipe, optimizer, 1)
    with pytest.raises(OSError, match=r"Read-only file system: '.*/run/step_3\.tmp-") as raised:
        gpipe.save(folder, pipe, optimizer)
    assert raised.value.errno == errno.EROFS
    assert gpipe.load(folder).step_number == 2


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
    with pytest.raises(NotADirectoryError, match=r"Not a directory: '.*file'"):
        gpipe.save(tmp_path / "file", make())
    with pytest.raises(NotADirectoryError, match=r"Not a directory: '.*file.*'"):
        gpipe.save(tmp_path / "file" / "below", make())


AS_NOBODY = """
    import os, sys, torch, gpipe
    pipe = gpipe.GPipe([torch.nn.Linear(2, 2)], 1, 1)
    gpipe.save, gpipe.load  # resolved while all may be read
    try:
        os.setuid(65534)
    except OSError as error:
        sys.exit(f"nobody cannot be: {error}")
    for folder in sys.argv[1:]:
        try:
            gpipe.save(folder, pipe)
        except PermissionError as error:
            print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_folder_that_one_may_not_write_is_told() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:  # pytest's own is closed to others, further up
        tmp_path, there = Path(base), Path(base) / "there"
        there.mkdir()
        for folder in (tmp_path, there):
            folder.chmod(0o755)
        command = [sys.executable, "-c", textwrap.dedent(AS_NOBODY), str(there), str(tmp_path / "new")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    if done.stderr.startswith("nobody cannot be"):  # in a container that has one user alone
        pytest.skip(done.stderr)
    first, second = done.stdout.splitlines()
    assert first.startswith(f"[Errno 13] Permission denied: '{there}/step_0.tmp-")
    assert second == f"[Errno 13] Permission denied: '{tmp_path / 'new'}'"


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
