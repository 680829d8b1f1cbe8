"""Two agents of torchrun restart `gpipe train` as often as they may: they count apart, and share one store."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes.fork_server import ONE_THREAD, ROOT
from tests.support.processes.launch import LOOPBACK, free_port
from tests.support.progress import wait_until

LIVES = re.compile(r"^life (\d+) rank (\d) of 2$", re.MULTILINE)


@pytest.mark.parametrize("restarts", [1, 10])
def test_every_restart_over_two_agents_joins_all_processes(
    restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    options = f"--nnodes 2 --nproc-per-node 1 --max-restarts {restarts + 1} --monitor-interval 0.1"
    meeting = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --local-addr 127.0.0.1"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), *meeting.split()]
    job = ["-m", "tests.support.jobs.lives", str(restarts)]
    env = {**os.environ, **ONE_THREAD, **LOOPBACK}
    with ExitStack() as stack:
        agents, logs = [], [tmp_path / "first.log", tmp_path / "second.log"]
        for log, host in zip(logs, ("is_host=1", "is_host=0"), strict=True):
            stream = stack.enter_context(log.open("wb"))
            agent = subprocess.Popen(
                [*command, "--rdzv-conf", host, *job], cwd=ROOT, env=env, stdout=stream, stderr=stream
            )
            agents.append(agent)
            stack.callback(agent.wait)
            stack.callback(agent.terminate)  # it ends its workers
        wait_until(lambda: all(agent.poll() is not None for agent in agents), logs[1])
        said = "\n".join(log.read_text(errors="replace") for log in logs)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sorted(LIVES.findall(said)) == sorted((str(life), rank) for life in range(restarts + 1) for rank in "01")
