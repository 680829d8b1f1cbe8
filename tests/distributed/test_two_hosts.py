"""Two hosts, each with its own network: the same losses over the wire, no hang when it is cut (R1, R2, R12)."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.two_hosts import SOUND_STEPS, heard, local_losses
from tests.support.processes.fork_server import ONE_THREAD, ROOT
from tests.support.progress import wait_until
from two_hosts.hosts import ADDRESSES, Hosts, missing, two_hosts
from two_hosts.relay import WIRE

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

PORT = 29_400
TIMEOUT = 1e6  # of the process group, in seconds: nobody waits for it
Record = dict[str, Any]


@contextmanager
def launched(hosts: Hosts, folder: Path, fault: str, workers: int) -> Iterator[None]:
    """The job on both hosts, each under its own torchrun; all are killed with the hosts."""
    logs = []
    for host, address in enumerate(ADDRESSES):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={workers}"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", f"--local-addr={address}"]
        job = ["-m", "tests.support.jobs.two_hosts", str(folder), fault, str(TIMEOUT)]
        logs.append(folder / f"host_{host}.log")
        with logs[-1].open("wb") as stream:
            hosts.start(
                host,
                [*command, *meeting, f"--rdzv-conf=is_host={1 - host}", f"--node-rank={host}", *job],
                cwd=ROOT,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **ONE_THREAD, "GLOO_SOCKET_IFNAME": WIRE},
            )
    try:
        yield
    except AssertionError as error:
        for log in (*logs, *sorted(folder.glob("rank_*.json"))):
            error.add_note(f"{log.name}:\n{log.read_text(errors='replace')[-5000:]}")
        raise
    finally:
        (folder / "seen").touch()


def records(folder: Path, ranks: Sequence[int]) -> list[Record]:
    files = [folder / f"rank_{rank}.json" for rank in ranks]
    wait_until(lambda: all(file.exists() for file in files))
    return [json.loads(file.read_text()) for file in files]


def check_sound_steps(found: Sequence[Record], workers: int) -> None:
    """The losses are the local ones, over links of both kinds, and only the wire is listened on."""
    world = 2 * workers
    for rank, record in enumerate(found):
        assert record["losses"] == local_losses(world)
        assert len(record["losses"]) == SOUND_STEPS
        kinds = {int(peer): kind for peer, kind in record["connections"].items()}
        assert kinds == {
            peer: "Connection" if peer // workers == rank // workers else "TcpConnection"
            for peer in range(world)
            if peer != rank
        }
        own = ADDRESSES[rank // workers]
        assert own in {one.address for one in heard(record["doors"])}  # what others have connected to
        assert {one.address for one in heard(record["doors"] + record["listening"])} == {own}


def test_a_cut_link_ends_the_step_on_both_hosts(tmp_path: Path) -> None:
    workers = 2
    with two_hosts() as hosts, launched(hosts, tmp_path, "cut", workers):
        wait_until((tmp_path / "middle").exists)
        hosts.cut()
        (tmp_path / "cut").touch()
        found = records(tmp_path, range(4))
        check_sound_steps(found, workers)
        for rank, record in enumerate(found):
            assert record["error"] == "RemoteError", record
            others = [peer for peer in range(4) if peer // workers != rank // workers]
            for peer in others:
                assert f"rank {peer}" in record["told"], record
            assert "cannot be reached: its host has not answered for" in record["told"]


def test_a_rank_that_is_killed_on_the_other_host_is_missed_at_once(tmp_path: Path) -> None:
    with two_hosts() as hosts, launched(hosts, tmp_path, "1", 1):
        (first,) = records(tmp_path, [0])
        assert first["error"] == "RemoteError"
        assert first["rank"] == 1
        assert "rank 1 is gone" in first["told"]
        check_sound_steps([first], 1)
