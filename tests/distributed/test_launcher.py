"""Under torchrun nothing outlives what started it (R3), whether the ranks compute or one of them is stuck."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpipe.distributed import launcher
from tests.support.processes.torchrun import torchrun, wait_for

WORKER = "tests.support.jobs.worker"


@pytest.mark.parametrize("stuck", [-1, 1])
def test_workers_end_soon_after_their_launcher_was_killed(stuck: int, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with torchrun(2, WORKER, str(tmp_path), str(stuck), folder=tmp_path) as launched:
        wait_for(launched, [tmp_path / f"trains_{rank}" for rank in range(2)])
        assert len(launched.workers()) >= 2
        assert launched.orphans(240) == []


def test_workers_end_also_if_their_launcher_was_killed_before_they_made_a_pipe(tmp_path: Path) -> None:
    """They have joined the group; who their parent is by the time that they make a pipe tells nothing any more."""
    with torchrun(2, WORKER, str(tmp_path), "-1", folder=tmp_path) as launched:
        wait_for(launched, [tmp_path / f"joined_{rank}" for rank in range(2)])
        assert len(launched.workers()) >= 2
        launched.popen.kill()
        launched.popen.wait()
        (tmp_path / "go").touch()
        assert launched.outlive(240) == []


def test_workers_behind_a_script_end_with_their_launcher_too(tmp_path: Path) -> None:
    """The shell between outlives torchrun, and takes nobody in."""
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} -m {WORKER} {tmp_path} -1\nexit 0\n")
    script.chmod(0o700)
    (tmp_path / "go").touch()
    with torchrun(2, str(script), folder=tmp_path, options=("--no-python",), is_module=False) as launched:
        wait_for(launched, [tmp_path / f"trains_{rank}" for rank in range(2)])
        assert [pid for pid in launched.orphans(240) if WORKER in command_of(pid)] == []


def command_of(pid: int) -> str:
    """How a process was called; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


WATCH = """
import os, resource, signal, time
from gpipe.distributed import launcher

def lose_descriptors(seconds):
    if polls:
        raise SystemExit("no signal")
    polls.append(seconds)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))

def kill(pid, number):
    if number:
        raise SystemExit(signal.Signals(number).name)

polls = []
above = launcher.find_launcher()
assert above not in (os.getppid(), os.getpid()), above
time.sleep, os.kill = lose_descriptors, kill
launcher._watch(above)
"""


def test_a_process_without_free_descriptors_does_not_miss_its_launcher() -> None:
    """Behind a script, where it takes a look at other processes to find the launcher."""
    script = ["sh", "-c", f"{sys.executable} -c '{WATCH}'; exit 0"]
    ran = subprocess.run(
        script, env=os.environ | dict.fromkeys(launcher.WORKER_VARIABLES, "a test"), capture_output=True
    )
    assert ran.stderr.decode() == "no signal\n"


def test_a_launcher_that_runs_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launcher.WORKER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a test")
    assert launcher.find_launcher() == os.getppid()
    assert not launcher.was_gone(os.getpid())  # Python, as torchrun is
    with socket.create_server(("127.0.0.1", 0)) as store:
        single = {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (single | {"MASTER_PORT": str(store.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        assert not launcher.was_gone(os.getpid())
    assert launcher.was_gone(os.getpid())  # nobody is where its store was
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert not launcher.was_gone(os.getpid())  # the store may be another host's


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_restarts_that_fail_by_chance_are_warned_of_once(
    variables: dict[str, str], warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`False` is what torchrun sets if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has an effect."""

    class Group:
        pass

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for rank, safe in ((0, False), (1, False), (0, True)):
        group, before = Group(), len(caplog.records)
        group_of_world = SimpleNamespace(WORLD=group)
        monkeypatch.setattr(launcher, "dist", SimpleNamespace(group=group_of_world, get_rank=lambda rank=rank: rank))
        if safe:
            launcher.accept_store()
        launcher.warn_of_restarts()
        launcher.warn_of_restarts()
        assert len(caplog.records) - before == (warns and rank == 0 and not safe)
    assert ("[torchrun-restarts]" in caplog.text) == warns
