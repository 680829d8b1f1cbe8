"""What srun and mpirun say to each process, as Slurm 22.05 and Open MPI 4.1 do, and MPICH documents it."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import gpipe
from gpipe.distributed.launch_variables import assignment_of, find_launcher_of_several, missing_variables

JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "host[0-1]", "SLURM_NTASKS": "4"}
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}  # of the script that sbatch starts: one process
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "host[0-1]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1072627713",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SEVERAL = {"srun": STEP, "Open MPI": OPEN_MPI, "MPICH": MPICH}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lists the hosts of `STEP`."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$*" = "show hostnames host[0-1]" ] && printf "host0\\nhost1\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("scontrol")
def test_the_variables_of_torchrun_are_those_of_the_launcher() -> None:
    found = missing_variables(STEP)
    port = found.pop("MASTER_PORT")
    assert found == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host0"}
    assert missing_variables({**STEP, "SLURM_PROCID": "0"})["MASTER_PORT"] == port
    assert missing_variables({**STEP, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != port
    for known in (OPEN_MPI, MPICH, {**STEP, **OPEN_MPI}, {**BATCH, **MPICH}):
        found = missing_variables(known)
        assert 20_000 <= int(found.pop("MASTER_PORT")) < 30_000
        assert found == {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }


def test_what_is_set_stays() -> None:
    chosen = {"MASTER_ADDR": "a.host", "MASTER_PORT": "5"}
    assert missing_variables({**STEP, **chosen}) == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert missing_variables({**STEP, "RANK": "0"}) == {}


@pytest.mark.parametrize(
    "alone", [{}, BATCH, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}]
)
def test_a_process_that_is_alone_is_left_alone(alone: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_variables(alone) == {}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    gpipe.GPipe([torch.nn.Linear(2, 2)], 1, 1).close()


def test_a_host_that_nobody_names_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="MASTER_ADDR is not set, and scontrol does not list"):
        missing_variables(STEP)
    with pytest.raises(ValueError, match="MASTER_ADDR is not set, and mpirun started"):
        missing_variables({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert missing_variables({**STEP, "SLURM_STEP_NODELIST": "one,two"})["MASTER_ADDR"] == "one"


@pytest.mark.parametrize("known", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("driver", [None, "process"])
def test_a_pipe_of_several_processes_without_a_group_names_the_line_that_is_missing(
    driver: str | None, known: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    launcher = find_launcher_of_several(os.environ)
    assert launcher is not None
    with pytest.raises(ValueError, match=r"\[launcher-without-rank\]") as raised:
        gpipe.GPipe([torch.nn.Linear(2, 2)], 1, 1, driver=driver)
    line = assignment_of(launcher)
    assert line in str(raised.value)
    assert f"{launcher.name} started {known[launcher.size]} processes" in str(raised.value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "to be replaced")  # and what it was before comes back in the end
    exec(line, {"os": os})
    assert os.environ["RANK"] == known[launcher.rank]
    assert os.environ["WORLD_SIZE"] == known[launcher.size]
    gpipe.GPipe([torch.nn.Linear(2, 2)], 1, 1, driver="threads").close()
