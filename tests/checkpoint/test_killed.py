"""Law: a process that is killed at any operation on files leaves the previous checkpoint or the new one, never a mix.

And so does a machine that loses power: what has a name was synced before it got it.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpipe
from tests.support import progress
from tests.support.checkpointed import trained
from tests.support.killed import CASES, OPERATIONS
from tests.support.processes.fork_server import ROOT


@pytest.mark.parametrize("case", CASES)
def test_killed_at_each_operation_it_leaves_the_previous_or_the_new_checkpoint(case: str, tmp_path: Path) -> None:
    done = progress.run([sys.executable, "-m", "tests.support.killed", str(tmp_path), case], cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    before, _ = CASES[case]
    steps, previous, new = found["steps"], before or None, before + 1
    assert found["wrong"] == []
    assert set(steps) == {previous, new}
    if "background" not in case and case != "parts":  # there the order of the threads' operations varies
        assert steps == sorted(steps, key=lambda step: step == new)  # once it is the new one it stays
    assert steps.count(previous) > 40
    assert steps.count(new) > 4


Log = list[tuple[str, str]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Log:
    """All operations on files, each with the path that it was on. Pytest makes `tmp_path` before the first."""
    log: Log = []
    paths: dict[int, str] = {}

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def operate(*args: Any, **options: Any) -> Any:
            made = original(*args, **options)
            if name == "open":
                paths[made] = str(args[0])
            named = args[:2] if name in ("rename", "replace") else args[:1]
            called = "look" if name == "open" and args[1] & os.O_NONBLOCK else name  # at what may be anything
            log.append((called, paths.get(args[0], "") if args[0] in paths else " > ".join(map(str, named))))
            return made

        return operate

    for name in OPERATIONS:
        monkeypatch.setattr(os, name, noting(name))
    return log


def test_everything_is_synced_before_it_gets_its_name(log: Log, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    gpipe.save(folder, *trained(), extra={}).wait()
    names = [operation for operation, _ in log]
    renames = [at for at, name in enumerate(names) if name in ("rename", "replace") and "part_" not in log[at][1]]
    final, latest = renames
    draft, where = log[final][1].split(" > ")
    assert where == str(folder / "step_2")
    assert log[latest][1].endswith(f" > {folder / 'latest'}")

    def last(operation: str, path: str, before: int) -> int:
        return max(at for at in range(before) if log[at] == (operation, path))

    written = {path for operation, path in log[:final] if operation == "write"}
    assert len(written) == 7 + 1  # the note of the part is gone
    for path in written:
        assert last("write", path, final) < last("fsync", path, final)
    changed = [
        at for at in range(final) if names[at] in ("open", "unlink", "replace") and log[at][1].startswith(draft + "/")
    ]
    assert max(changed) < last("fsync", draft, final)
    assert ("fsync", str(folder)) in log[final:latest]
    temporary = log[latest][1].split(" > ")[0]
    assert final < last("write", temporary, latest) < last("fsync", temporary, latest)
    assert ("fsync", str(folder)) in log[latest:]
    assert ("fsync", str(tmp_path)) in log[:final]  # the folder itself was new


def test_what_has_a_name_is_never_changed(log: Log, tmp_path: Path) -> None:
    pipe, optimizer = trained()
    for _ in range(2):
        gpipe.save(tmp_path, pipe, optimizer, keep=1)
    for operation, path in log:
        if operation in ("open", "write", "unlink", "rmdir") and path.startswith(str(tmp_path)):
            assert path == str(tmp_path) or ".tmp-" in path
