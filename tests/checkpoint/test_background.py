"""Saving in the background: what goes on meanwhile, what waits, and where its errors come out."""

import copy
import gc
import os
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import gpipe
from gpipe.checkpoint import files, writing
from tests.support.checkpointed import differences, fail, make, remembered, snapshot, train, trained
from tests.support.progress import run


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What every thread waits for before it writes."""
    opened = threading.Event()
    original = files.write_file

    def waiting(*args: Any) -> Any:
        if threading.current_thread().name == "gpipe-save":
            opened.wait()
        return original(*args)

    monkeypatch.setattr(writing, "write_file", waiting)
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


@pytest.mark.parametrize("is_another", [False, True])
def test_a_load_waits_for_what_is_being_written(is_another: bool, gate: threading.Event, tmp_path: Path) -> None:
    """Bug story: another pipe took the checkpoint before, silently."""
    pipe, optimizer = trained(steps=1)
    gpipe.save(tmp_path, pipe, optimizer)
    train(pipe, optimizer, 1)
    gpipe.save(tmp_path, pipe, optimizer, background=True)
    threading.Timer(0.1, gate.set).start()
    assert gpipe.load(tmp_path, make() if is_another else pipe).step_number == 2


@pytest.mark.parametrize("act", ["save", "load", "wait"])
def test_an_error_in_the_background_is_logged_and_raised_once_at_the_next_call(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, _ = trained()
    gpipe.save(tmp_path, pipe)
    monkeypatch.setattr(writing, "write_file", fail)
    saving = gpipe.save(tmp_path, pipe, background=True)
    while not saving.done:
        pass
    monkeypatch.undo()
    assert "A checkpoint was not saved: OSError: [Errno 28] No space left on device: 'path'" in caplog.text
    with pytest.raises(OSError, match="No space left on device"):
        {"save": lambda: gpipe.save(tmp_path, pipe), "load": lambda: gpipe.load(tmp_path, pipe), "wait": saving.wait}[
            act
        ]()
    with pytest.raises(RuntimeError, match="This checkpoint was not saved"):
        saving.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_2"]
    pipe.step_number = 3
    assert gpipe.save(tmp_path, pipe, background=True).wait().name == "step_3"
    assert gpipe.load(tmp_path, pipe).step_number == 3


def test_a_script_that_ends_lets_the_checkpoint_be_written(tmp_path: Path) -> None:
    source = """
        import sys, time, torch, gpipe
        from gpipe.checkpoint import writing
        original = writing.write_file
        def slow(*args):
            time.sleep(0.3)
            return original(*args)
        writing.write_file = slow
        pipe = gpipe.GPipe([torch.nn.Linear(2, 2)], 1, 1)
        gpipe.save(sys.argv[1], pipe, background=True)
        raise SystemExit(3)
    """
    command = [sys.executable, "-c", textwrap.dedent(source), str(tmp_path)]
    assert run(command).returncode == 3
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
    monkeypatch.setattr(writing, "write_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpipe.save(tmp_path, pipe)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    for background in (False, True):
        gpipe.save(tmp_path, pipe, background=background).wait()
    assert set(os.listdir("/proc/self/fd")) <= before
