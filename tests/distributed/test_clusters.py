"""The scripts of examples/clusters: under a real SLURM of two hosts, and as two pods by the names they have."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support import progress
from tests.support.jobs.cluster import train
from tests.support.processes.fork_server import ONE_THREAD, ROOT
from two_hosts.hosts import ADDRESSES, Hosts, missing, two_hosts

CLUSTERS = ROOT / "examples" / "clusters"
REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SCHEMA = "1.37"
SLURM = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")
TRAIN = ["-m", "tests.support.jobs.cluster"]
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


def check_weights(folder: Path) -> None:
    """That they are those of the same training in this process."""
    train(str(folder / "alone"), 2)
    alone, out = (
        {name: weight for file in (folder / at).glob("*.safetensors") for name, weight in load_file(file).items()}
        for at in ("alone", "out")
    )
    assert alone.keys() == out.keys()
    assert all(torch.equal(alone[name], out[name]) for name in alone)
    assert alone


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


@pytest.mark.skipif(not all(map(shutil.which, SLURM)), reason="slurmctld and slurmd not found")
def test_a_job_of_slurm_trains_over_two_hosts(tmp_path: Path) -> None:
    with two_hosts() as hosts, slurm(hosts, tmp_path) as env:
        log, told = tmp_path / "job.log", tmp_path / "slurmctld.log"
        batch = ["sbatch", "--nodes=2", f"--output={log}", f"--chdir={ROOT}", str(CLUSTERS / "slurm.sh")]
        start(hosts, 0, "host0", tmp_path, [*batch, *TRAIN, str(tmp_path / "out")], env={**env, "RANKS": "1"})
        progress.wait_until(lambda: bool(statuses(told)), told)  # sbatch --wait would look once a minute
        assert statuses(told) == ["0"], log.read_text()
    check_weights(tmp_path)


def test_the_job_of_kubernetes_follows_its_schema() -> None:
    found = kubernetes()
    assert [one["kind"] for one in found] == ["Service", "Job"]
    for one in found:
        kubernetes_validate.validate(one, SCHEMA, strict=True)


def test_the_pods_of_kubernetes_train_over_two_hosts(tmp_path: Path) -> None:
    """Each host runs the command of a pod, under the name, and with the number, that it has there."""
    service, job = kubernetes()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (number,) = container["env"]
    assert (
        number["valueFrom"]["fieldRef"]["fieldPath"]
        == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    )
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    names = [f"{job['metadata']['name']}-{index}" for index in range(job["spec"]["completions"])]
    (tmp_path / "hosts").write_text(
        "".join(f"{at} {name}.{pod['subdomain']} {name}\n" for at, name in zip(ADDRESSES, names, strict=True))
    )
    command = [word for word in container["command"] if word != "train.py" and "nproc" not in word]
    env, logs = programs(tmp_path), []
    with two_hosts() as hosts:
        pods = []
        for index, name in enumerate(names):
            logs.append(tmp_path / f"{name}.log")
            with logs[-1].open("wb") as log:
                how = {"env": {**env, number["name"]: str(index)}, "cwd": ROOT, "stdout": log, "stderr": log}
                pods.append(start(hosts, index, name, tmp_path, [*command, *TRAIN, str(tmp_path / "out")], **how))
        progress.wait_until(lambda: all(pod.poll() is not None for pod in pods))
        assert [pod.returncode for pod in pods] == [0, 0], "\n".join(log.read_text() for log in logs)
    check_weights(tmp_path)


def statuses(told: Path) -> list[str]:
    """With which the jobs ended that have ended, as slurmctld writes it."""
    return re.findall(r"WEXITSTATUS (\d+)", told.read_text()) if told.exists() else []


def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text()))
