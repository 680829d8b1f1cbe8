"""A SLURM cluster of two nodes, each in a network namespace with a name of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes.fork_server import ONE_THREAD
from two_hosts.hosts import ADDRESSES, Hosts, missing

SLURM = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")
CONF = """ClusterName=hosts
SlurmctldHost=host0({first})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=host0 NodeAddr={first} CPUs=2 State=UNKNOWN
NodeName=host1 NodeAddr={second} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def without_slurm() -> str:
    """Returns why this machine cannot run such a cluster; empty if it can."""
    absent = [program for program in SLURM if not shutil.which(program)]
    return f"the programs {', '.join(absent)} are not installed" if absent else missing()


def programs(folder: Path) -> dict[str, str]:
    """The environment in which `torchrun` and `python` are those of this process."""
    (folder / "bin").mkdir()
    for name, module in {"python": [], "torchrun": ["-m", "torch.distributed.run"]}.items():
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {" ".join([sys.executable, *module])} "$@"\n')
        script.chmod(0o755)
    return {**os.environ, **ONE_THREAD, "PATH": f"{folder}/bin:{os.environ['PATH']}"}


def start(
    hosts: Hosts, host: int, name: str, folder: Path, command: list[str], **options: Any
) -> subprocess.Popen[Any]:
    """Starts a command on a host that has a name, and knows those in the folder's file of hosts."""
    named = f'mount --bind {folder}/hosts /etc/hosts && hostname {name} && exec "$@"'
    return hosts.start(host, ["unshare", "--mount", "--uts", "sh", "-c", named, "sh", *command], **options)


@contextmanager
def slurm(hosts: Hosts, folder: Path) -> Iterator[dict[str, str]]:
    """A controller and two nodes; gives the environment in which its commands find it."""
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, first=ADDRESSES[0], second=ADDRESSES[1]))
    (folder / "hosts").write_text("".join(f"{address} host{host}\n" for host, address in enumerate(ADDRESSES)))
    env = {**programs(folder), "SLURM_CONF": f"{folder}/slurm.conf"}
    with (folder / "daemons.log").open("wb") as log:
        (folder / "state").mkdir()
        start(hosts, 0, "host0", folder, ["slurmctld", "-D"], env=env, stdout=log, stderr=log)
        for host in range(2):
            (folder / f"host{host}").mkdir()
            start(
                hosts,
                host,
                f"host{host}",
                folder,
                ["slurmd", "-D", "-N", f"host{host}"],
                env=env,
                stdout=log,
                stderr=log,
            )
        yield env
