"""The scripts of examples/clusters: under a real SLURM of two hosts, and as two pods by the names they have."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support import progress
from tests.support.jobs.cluster import train
from tests.support.processes.fork_server import ROOT
from tests.support.processes.slurm import programs, slurm, start, without_slurm
from two_hosts.hosts import ADDRESSES, missing, two_hosts

CLUSTERS = ROOT / "examples" / "clusters"
REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SCHEMA = "1.37"
TRAIN = ["-m", "tests.support.jobs.cluster"]


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


@pytest.mark.skipif(bool(without_slurm()), reason=without_slurm())
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
