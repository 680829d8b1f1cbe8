"""`gpipe train` under torchrun: the demo's numbers, one voice, and what a long run needs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpipe.cli.main import main
from gpipe.recipes.training import ENDINGS
from tests.support.jobs.small_digits import EPOCHS, GO
from tests.support.processes.fork_server import ONE_THREAD, ROOT
from tests.support.processes.listening import family, listening_sockets
from tests.support.processes.torchrun import Launched, torchrun, wait_for
from tests.support.progress import run as run_watched
from tests.support.progress import wait_until
from tests.support.small_images import EVERYTHING, flags, shown, train

OPTIONS = replace(EVERYTHING, micro_batches=4, epochs=EPOCHS)
ARGUMENTS = ("train", "digits", *flags(OPTIONS))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What one process that nobody disturbed showed and wrote."""
    out = tmp_path_factory.mktemp("alone")
    return train(replace(OPTIONS, out=out))[1], out


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file without which no process begins its last epoch, unless it is told to end."""
    monkeypatch.setenv(GO, str(tmp_path / "go"))
    return tmp_path / "go"


def metrics(out: Path) -> list[Sequence[float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[line["epoch"], line["loss"], line["accuracy"]] for line in lines]


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def workers_of(launched: Launched) -> list[int]:
    """The ranks' processes; each has started no other."""
    return family(launched.popen.pid)[1:]


# The same numbers.


def test_four_processes_show_and_write_what_one_does(alone: tuple[str, Path], tmp_path: Path) -> None:
    text, expected = alone
    out = tmp_path / "out"
    arguments = (*ARGUMENTS, "--out", str(out))
    with torchrun(4, "tests.support.jobs.small_digits", *arguments, folder=tmp_path) as launched:
        log = launched.wait()
    assert launched.popen.returncode == 0, log
    assert shown(log) == shown(text)
    assert "4 partitions" in log
    assert len(log.partition("busy or receiving, by rank: ")[2].splitlines()[0].split(",")) == 4
    assert log.count("too few for good statistics") == 1  # rank 0 alone talks
    assert weights(out) == weights(expected)
    assert metrics(out) == metrics(expected)
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1, 2, 3}
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in expected.iterdir())


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun not found")
def test_two_processes_of_mpirun_write_what_one_does(alone: tuple[str, Path], tmp_path: Path) -> None:
    """mpirun sets no variables of torch.distributed."""
    out = tmp_path / "out"
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--tag-output", "-n", "2"]
    command = [*launcher, sys.executable, "-m", "tests.support.jobs.small_digits", *ARGUMENTS, "--out", str(out)]
    done = run_watched(command, cwd=ROOT, env={**os.environ, **ONE_THREAD})
    assert done.returncode == 0, done.stdout
    assert "2 partitions" in done.stdout
    assert weights(out) == weights(alone[1])
    assert metrics(out) == metrics(alone[1])


# What ends early goes on as if it had not.


def test_a_rank_is_killed_and_torchrun_goes_on_from_the_latest_checkpoint(
    alone: tuple[str, Path], go: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = (*ARGUMENTS, "--out", str(out))
    options = ("--max-restarts", "1")  # one must do
    with torchrun(2, "tests.support.jobs.small_digits", *arguments, folder=tmp_path, options=options) as launched:
        wait_for(launched, [out / "checkpoints" / "latest"])
        subprocess.run(["kill", "-KILL", str(workers_of(launched)[1])], check=True)
        go.touch()
        log = launched.wait()
    assert launched.popen.returncode == 0, log
    assert "rank 1 is gone" in log
    assert re.search(rf"Resuming after epoch [1-{EPOCHS - 1}]", log)
    assert weights(out) == weights(alone[1])
    assert metrics(out) == metrics(alone[1])


@pytest.mark.usefixtures("go")
def test_sigterm_saves_at_the_end_of_a_step_and_three_threads_go_on_where_two_processes_ended(
    alone: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And meanwhile no other host can connect to any of the processes, torchrun's own included (R12)."""
    out = tmp_path / "out"
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = ("--rdzv-conf", "store_type=file", "--rdzv-endpoint", "")
    arguments = (*ARGUMENTS, "--out", str(out))
    with torchrun(2, "tests.support.jobs.small_digits", *arguments, folder=tmp_path, options=options) as launched:
        wait_for(launched, [out / "checkpoints" / "latest"])
        open_ports = listening_sockets(family(launched.popen.pid))
        launched.popen.terminate()
        log = launched.wait()
    assert open_ports
    assert [port for port in open_ports if not port.is_loopback] == []
    assert log.count("SIGTERM: saved a checkpoint to") == 1, log
    assert not (out / "model.safetensors").exists()
    train(replace(OPTIONS, out=out, partitions=3, resume=True))
    assert weights(out) == weights(alone[1])
    assert metrics(out) == metrics(alone[1])


def test_processes_without_a_shared_folder_resume_and_write_what_one_does(
    alone: tuple[str, Path], go: Path, tmp_path: Path
) -> None:
    """Each keeps its part of the checkpoints, and rank 0 gathers the final weights, here of their averages."""
    outs = [tmp_path / f"out_{rank}" for rank in range(2)]
    command = ("train", "digits", "--out", str(tmp_path / "out_{rank}"))
    with torchrun(2, "tests.support.jobs.small_digits", *ARGUMENTS, *command[2:], folder=tmp_path) as launched:
        wait_until(lambda: all(list(out.glob("checkpoints/step_*/part_*.json")) for out in outs), launched.log)
        launched.popen.terminate()
        log = launched.wait()
    assert log.count("SIGTERM: saved a checkpoint to") == 1, log
    assert log.count("[checkpoint-in-parts]") == 1, log
    go.touch()
    settings = outs[1] / "config.toml"
    text = settings.read_text()
    settings.write_text(text.replace("learning_rate = 0.02", "learning_rate = 0.03"))
    with torchrun(2, "tests.support.jobs.small_digits", *command, "--resume", folder=tmp_path) as launched:
        log = launched.wait()
    assert launched.popen.returncode != 0
    assert "gpipe: --learning-rate: 0.03 on rank 1 differs from 0.02 on rank 0. Pass the same options" in log
    settings.write_text(text)
    with torchrun(2, "tests.support.jobs.small_digits", *command, "--resume", folder=tmp_path) as launched:
        log = launched.wait()
    assert launched.popen.returncode == 0, log
    assert re.search(rf"Resuming after epoch [1-{EPOCHS - 1}]", log)
    assert weights(outs[0]) == weights(alone[1])
    assert metrics(outs[0]) == metrics(alone[1])
    assert {path.name for path in outs[1].iterdir()} == {"checkpoints", "config.toml"}
    saved = [{path.name for path in (out / "checkpoints").rglob("stage_?.safetensors")} for out in outs]
    assert saved == [{"stage_0.safetensors"}, {"stage_1.safetensors"}]
    with torchrun(2, "tests.support.jobs.small_digits", *ARGUMENTS, *command[2:], folder=tmp_path) as launched:
        log = launched.wait()
    assert weights(outs[0]) == weights(alone[1]), log
    assert all((out / "checkpoints.old").exists() for out in outs)  # none may resume the earlier run


@pytest.mark.usefixtures("go")
@pytest.mark.parametrize("number", ENDINGS)
def test_one_process_that_is_told_to_end_says_how_to_go_on(
    number: signal.Signals, alone: tuple[str, Path], tmp_path: Path
) -> None:
    """By SIGTERM or by Ctrl-C: with the status of a process that these end, and nothing is lost."""
    out, log = tmp_path / "out", tmp_path / "log"
    command = [sys.executable, "-m", "tests.support.jobs.small_digits", *ARGUMENTS, "--out", str(out)]
    with log.open("wb") as stream:
        popen = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ONE_THREAD}, stdout=stream, stderr=stream)
    try:
        wait_until((out / "checkpoints" / "latest").exists, log)
        popen.send_signal(number)
        wait_until(lambda: popen.poll() is not None, log)
        assert popen.returncode == 128 + number, log.read_text()
    finally:
        popen.kill()
    said = log.read_text()
    assert f"{ENDINGS[number]}: saved a checkpoint to {out / 'checkpoints'}" in said
    assert "Traceback" not in said
    again = said.splitlines()[-1].strip()
    assert again == f"gpipe train digits --out {out} --resume"
    main(again.split()[1:])
    assert weights(out) == weights(alone[1])
    assert metrics(out) == metrics(alone[1])


def test_all_processes_end_with_a_mistake_which_is_said_once(tmp_path: Path) -> None:
    arguments = (*ARGUMENTS, "--partitions", "4", "--out", str(tmp_path / "out"))
    with torchrun(2, "tests.support.jobs.small_digits", *arguments, folder=tmp_path) as launched:
        log = launched.wait()
    assert launched.popen.returncode != 0
    assert (
        log.count("gpipe: --partitions: 2 processes are not divisible by 4 partitions. Choose one of 1, 2.\n") == 1
    ), log
    assert "Traceback" not in log.partition("torch/distributed/elastic")[0]
