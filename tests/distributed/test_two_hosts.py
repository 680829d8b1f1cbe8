"""Two hosts, each with its own network: the same losses over the wire, no hang when it is cut (R1, R2, R12)."""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import REASON as REASON_TLS
from tests.support.certificates import authority
from tests.support.jobs.two_hosts import SOUND_STEPS, heard, local_losses
from tests.support.processes.fork_server import ONE_THREAD, ROOT
from tests.support.progress import wait_until
from two_hosts.hosts import ADDRESSES, ADDRESSES6, Hosts, missing, two_hosts
from two_hosts.relay import WIRE, enter

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

SO_RCVBUFFORCE = 33  # Linux: memory for what comes, beyond what others may have
PORT = 29_400
TIMEOUT = 1e6  # of the process group, in seconds: nobody waits for it
Record = dict[str, Any]


@contextmanager
def launched(
    hosts: Hosts,
    folder: Path,
    fault: str,
    workers: int,
    addresses: Sequence[str] = ADDRESSES,
    job: str = "two_hosts",
    **variables: str,
) -> Iterator[None]:
    """The job on both hosts, each under its own torchrun; all are killed with the hosts."""
    logs = []
    for host, address in enumerate(addresses):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={workers}"]
        first = f"[{addresses[0]}]" if ":" in address else addresses[0]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{PORT}", f"--local-addr={address}"]
        module = ["-m", f"tests.support.jobs.{job}", str(folder), fault, str(TIMEOUT)]
        logs.append(folder / f"host_{host}.log")
        with logs[-1].open("wb") as stream:
            hosts.start(
                host,
                [*command, *meeting, f"--rdzv-conf=is_host={1 - host}", f"--node-rank={host}", *module],
                cwd=ROOT,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **ONE_THREAD, "GLOO_SOCKET_IFNAME": WIRE, **variables},
            )
    try:
        yield
    except AssertionError as error:
        for log in (*logs, *sorted(folder.glob("rank_*.json"))):
            error.add_note(f"{log.name}:\n{log.read_text(errors='replace')[-5000:]}")
        raise
    finally:
        (folder / "seen").touch()


@contextmanager
def listened(hosts: Hosts) -> Iterator[bytearray]:
    """All that goes over the wire meanwhile, for who listens in on the first host."""
    seen, ended, ready = bytearray(), threading.Event(), threading.Event()

    def listen() -> None:
        enter(hosts.networks[0])
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:
            wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 2**26)
            wire.bind((WIRE, 0))
            wire.settimeout(0.05)
            ready.set()
            while not ended.is_set():
                with suppress(TimeoutError, OSError):
                    seen.extend(wire.recv(2**17))

    with ThreadPoolExecutor(1) as thread:
        listener = thread.submit(listen)
        while not ready.wait(0.1) and not listener.done():
            pass
        try:
            yield seen
        finally:
            ended.set()
            listener.result()


def overheard(seen: bytearray, record: Record) -> tuple[bool, bool]:
    """Whether the token was on the wire, and any of the tensors."""
    token, *tensors = record["secrets"]
    assert tensors
    return token.encode() in seen, any(bytes.fromhex(one) in seen for one in tensors)


def records(folder: Path, ranks: Sequence[int]) -> list[Record]:
    files = [folder / f"rank_{rank}.json" for rank in ranks]
    wait_until(lambda: all(file.exists() for file in files))
    return [json.loads(file.read_text()) for file in files]


def check_sound_steps(found: Sequence[Record], workers: int, addresses: Sequence[str] = ADDRESSES) -> None:
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
        own = addresses[rank // workers]
        assert own in {one.address for one in heard(record["doors"])}  # what others have connected to
        assert {one.address for one in heard(record["doors"] + record["listening"])} == {own}


def test_a_cut_link_ends_the_step_on_both_hosts(tmp_path: Path) -> None:
    workers, files = 2, {} if REASON_TLS else authority().files  # encrypted, where openssl makes certificates
    with two_hosts() as hosts, listened(hosts) as seen, launched(hosts, tmp_path, "cut", workers, **files):
        wait_until((tmp_path / "middle").exists)
        hosts.cut()
        (tmp_path / "cut").touch()
        found = records(tmp_path, range(4))
        check_sound_steps(found, workers)
        crossing = [record for record in found if len(record["secrets"]) > 1]
        assert crossing
        assert {overheard(seen, record) for record in crossing} == {(not files, not files)}
        for rank, record in enumerate(found):
            assert record["error"] == "RemoteError", record
            others = [peer for peer in range(4) if peer // workers != rank // workers]
            for peer in others:
                assert f"rank {peer}" in record["told"], record
            assert "cannot be reached, because its host has not answered for" in record["told"]
            assert {record["encrypted"][str(peer)] for peer in others} == {bool(files)}


def test_a_rank_that_is_killed_on_the_other_host_is_missed_at_once_and_ipv6_will_do(tmp_path: Path) -> None:
    """Through a firewall that leaves two ports open beside those of torch."""
    with two_hosts(ipv6=True) as hosts, ExitStack() as stack:
        for host, address in enumerate(ADDRESSES):
            hosts.run(host, f"ip address del {address}/24 dev {WIRE}")
        variables = {"GPIPE_PORTS": "5000-5001", "GPIPE_INTERFACE": WIRE}
        seen = stack.enter_context(listened(hosts))
        stack.enter_context(launched(hosts, tmp_path, "1", 1, ADDRESSES6, **variables))
        (first,) = records(tmp_path, [0])
        assert first["error"] == "RemoteError"
        assert first["rank"] == 1
        assert "rank 1 is gone" in first["told"]
        assert overheard(seen, first) == (True, True)  # in the clear
        check_sound_steps([first], 1, ADDRESSES6)
        assert {one.port for one in {*heard(first["doors"])} - {*heard(first["listening"])}} == {5000}  # gloo's stay


STILL = "rank 1: it has not answered for"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stopped", STILL),
        ("held", STILL),
        ("slow", "rank 1: it was last seen in the forward of micro-batch 0, rank 1, stage 1, layer 1"),
        ("busy", "rank 1: it has been outside any step, after 1 run, for"),
    ],
    ids=["stopped", "held", "slow", "busy"],
)
def test_who_stands_still_on_the_other_host_is_named_and_waited_for(tmp_path: Path, fault: str, words: str) -> None:
    files = authority().files if fault == "slow" and not REASON_TLS else {}
    with two_hosts() as hosts, launched(hosts, tmp_path, fault, 1, job="standstill", **files):
        found = records(tmp_path, [0, 1])
        assert found[0].keys() == {"loss"}
        assert found[0] == found[1]  # both have gone on
        assert words in (tmp_path / "told").read_text()


def test_a_wire_that_is_cut_while_much_is_under_way_is_noticed_by_who_sends(tmp_path: Path) -> None:
    """The stream of tensors has waited for who is busy, for longer than a host may be silent. And over IPv6."""
    with two_hosts(ipv6=True) as hosts, ExitStack() as stack:
        for host, address in enumerate(ADDRESSES):
            hosts.run(host, f"ip address del {address}/24 dev {WIRE}")
        stack.enter_context(launched(hosts, tmp_path, "cut", 1, ADDRESSES6, "standstill", GPIPE_INTERFACE=WIRE))
        wait_until((tmp_path / "told").exists)
        hosts.cut()
        (tmp_path / "cut").touch()
        for rank, record in enumerate(records(tmp_path, [0, 1])):
            assert (
                f"rank {1 - rank} is gone: it cannot be reached, because its host has not answered for"
                in record["error"]
            )
