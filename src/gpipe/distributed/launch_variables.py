"""Reads the environment variables of srun and mpirun, which do not set the variables of torch.distributed.

torchrun and engines such as Ray Train set the variables of torch.distributed.
"""

import shutil
import subprocess
import zlib
from collections.abc import Mapping
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20_000, 10_000  # below the ports that systems use for outgoing connections
MPI_HOST = (
    "MASTER_ADDR is not set, and mpirun started processes on several hosts. Set it to the name of the first "
    "host, with `mpirun -x MASTER_ADDR=host ...`, or with MPICH `mpirun -genv MASTER_ADDR host ...`. "
    "[first-host-unknown]"
)
SLURM_HOST = (
    "MASTER_ADDR is not set, and scontrol does not list the hosts of this job. Set it to the name of the first "
    "host before srun. [first-host-unknown]"
)


class Launcher(NamedTuple):
    """The environment variables in which a launcher describes each process that it starts.

    Attributes:
        name: The name of the launcher.
        rank: The variable with the global rank of the process.
        size: The variable with the number of processes.
        local_rank: The variable with the rank among the processes on the host.
        local_size: The variable with the number of processes on the host, or empty if the launcher does not set one.
        job: The variables that identify the job.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]


# In the script of sbatch, SLURM_NTASKS and SLURM_PROCID are set, although it is a single process. Only srun sets
# SLURM_STEP_NUM_TASKS. mpirun comes first: within a job of SLURM, it may start its processes by srun.
LAUNCHERS = (
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_FD", "HYDI_CONTROL_FD")),
)


def find_launcher_of_several(environment: Mapping[str, str]) -> Launcher | None:
    """Returns the launcher if it started several processes without setting RANK. Otherwise returns None."""
    if "RANK" in environment:
        return None
    for launcher in LAUNCHERS:
        if launcher.rank in environment and environment.get(launcher.size, "").isdecimal():
            return launcher if int(environment[launcher.size]) > 1 else None
    return None


def missing_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of torch.distributed that are missing if srun or mpirun started several processes.

    Variables that are already set keep their values. The result is empty for a single process, and for launchers that
    set RANK.

    Raises:
        ValueError: If the name of the first host is not known.
    """
    launcher = find_launcher_of_several(environment)
    if launcher is None:
        return {}
    size = environment[launcher.size]
    job = " ".join(environment[name] for name in launcher.job if name in environment)
    found = {
        "RANK": environment[launcher.rank],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get(launcher.local_rank, ""),
        "LOCAL_WORLD_SIZE": environment.get(launcher.local_size, ""),
        "MASTER_PORT": str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS),  # the same in all processes of the job
    }
    if launcher.name == "srun" and environment.get("SLURM_STEP_NUM_NODES") == "1":
        found["LOCAL_WORLD_SIZE"] = size
    if "MASTER_ADDR" not in environment:
        found["MASTER_ADDR"] = LOOPBACK if found["LOCAL_WORLD_SIZE"] == size else _first_host(launcher, environment)
    return {name: value for name, value in found.items() if value and name not in environment}


def _first_host(launcher: Launcher, environment: Mapping[str, str]) -> str:
    if launcher.name != "srun":
        raise ValueError(MPI_HOST)
    hosts = environment.get("SLURM_STEP_NODELIST", "")
    if "[" not in hosts and hosts:
        return hosts.partition(",")[0]
    if hosts and shutil.which("scontrol"):
        listed = subprocess.run(["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=False)
        if names := listed.stdout.split():
            return names[0]
    raise ValueError(SLURM_HOST)


def several_without_group(environment: Mapping[str, str]) -> str | None:
    """Returns an error message if srun or mpirun started several processes without setting RANK. Otherwise None."""
    launcher = find_launcher_of_several(environment)
    if launcher is None:
        return None
    return (
        f"{launcher.name} started {environment[launcher.size]} processes ({launcher.size}), but RANK is not set and "
        f"torch.distributed is not initialized. For one pipe over all ranks, run `{assignment_of(launcher)}`, set "
        f"MASTER_ADDR and MASTER_PORT, call torch.distributed.init_process_group('gloo') and pass driver='process'. "
        f"For a separate pipe in each process, pass driver='threads'. [launcher-without-rank]"
    )


def assignment_of(launcher: Launcher) -> str:
    """Returns a line of Python code that sets the missing variables of a process, for error messages."""
    pairs = {"RANK": launcher.rank, "WORLD_SIZE": launcher.size, "LOCAL_RANK": launcher.local_rank}
    return f"os.environ.update({', '.join(f'{name}=os.environ[{source!r}]' for name, source in pairs.items())})"
