"""Two hosts on one machine: network namespaces joined by a wire that can be shaped and cut.

    with two_hosts(megabits=100, delay=0.002) as hosts:
        server = hosts.start(0, [sys.executable, "-m", "http.server"])
        client = hosts.start(1, ["curl", f"http://{ADDRESSES[0]}:8000"])
        hosts.cut()

The hosts share files, memory and process numbers, and nothing of the network. A namespace lives as long as a process
that holds it, and that ends with this one: whatever happens here, nothing stays behind.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from two_hosts.keeper import processes_in
from two_hosts.relay import WIRE

ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES6 = ("fd77::1", "fd77::2")
TOOLS = ("ip", "tc", "nsenter", "unshare")
PATIENCE_SECONDS = 3600  # with a command that sets something: no machine is as busy
BURST_SECONDS = 0.0006  # of the rate may pass at once: at 1 Gbit/s one packet as TCP makes it
QUEUE_SECONDS = 0.05  # of the rate may wait, as in a switch; more is dropped


def missing() -> str:
    """Why there can be no two hosts here, or nothing: a reason to skip a test."""
    if not Path("/proc/self/ns/net").exists():
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found: install iproute2 and util-linux"
    refused = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"no network namespaces here: {refused.stderr.strip()}" if refused.returncode else ""


@dataclass(frozen=True)
class Hosts:
    """Two hosts, 0 and 1, at `ADDRESSES`; on both the wire is the interface `WIRE`.

    Attributes:
        keepers: The processes that hold the namespaces.
        started: What `start` started.
    """

    keepers: tuple[subprocess.Popen[str], ...]
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def networks(self) -> tuple[str, ...]:
        """The namespace of each host, as a path."""
        return tuple(f"/proc/{keeper.pid}/ns/net" for keeper in self.keepers)

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host, in a session of its own; `options` are those of `subprocess.Popen`.

        It is killed at the end of `two_hosts` if it still runs, and so is all that it started.
        """
        process = subprocess.Popen(self._on(host, command), start_new_session=True, **options)
        self.started.append(process)
        return process

    def run(self, host: int, command: str) -> str:
        """Runs a short command, words between blanks, on a host, and gives what it printed.

        Raises:
            RuntimeError: It failed.
        """
        return _run(self._on(host, command.split()))

    def cut(self, host: int = 1) -> None:
        """Takes the wire from a host: no connection is told, nothing arrives any more."""
        self.run(host, f"ip link set {WIRE} down")

    def mend(self, host: int = 1) -> None:
        """Gives it back."""
        self.run(host, f"ip link set {WIRE} up")

    def processes(self) -> list[int]:
        """The processes on the hosts, whoever started them."""
        own = {keeper.pid for keeper in self.keepers}
        return [pid for network in self.networks for pid in processes_in(os.stat(network).st_ino) if pid not in own]

    def close(self) -> None:
        """Kills what was started here; what that has started, the keepers do."""
        for process in self.started:
            process.kill()
            process.wait()

    def _on(self, host: int, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={self.networks[host]}", "--", *command]


@contextmanager
def two_hosts(
    megabits: float | None = None, delay: float = 0.0, loss: float = 0.0, *, ipv6: bool = False
) -> Iterator[Hosts]:
    """Makes two hosts, joined by a wire; in the end kills all that runs on them, and they are gone.

    Args:
        megabits: What the wire carries each way, in Mbit/s; None is as fast as the machine.
        delay: Seconds that a packet takes, each way.
        loss: The share of packets that get lost, each way.
        ipv6: Whether the hosts have `ADDRESSES6` too.

    Raises:
        ValueError: Something above cannot be.
        RuntimeError: The machine cannot, see `missing`.
    """
    if (megabits is not None and megabits <= 0) or delay < 0 or not 0 <= loss < 1:
        raise ValueError(f"a wire of {megabits} Mbit/s, {delay} s, losing {loss}: give > 0, >= 0, and 0 <= loss < 1")
    if why := missing():
        raise RuntimeError(why)
    with ExitStack() as stack:
        keep = ["unshare", "--net", *_program("keeper")]
        hosts = Hosts(tuple(stack.enter_context(_held(keep)) for _ in ADDRESSES))
        stack.callback(hosts.close)
        if delay or loss:
            stack.enter_context(_held([*_program("relay"), *hosts.networks, f"{delay}", f"{loss}"]))
        else:
            first, second = (keeper.pid for keeper in hosts.keepers)
            _run(f"ip link add {WIRE} netns {first} type veth peer name {WIRE} netns {second}".split())
        for host in range(len(ADDRESSES)):
            _configure(hosts, host, megabits)
            if ipv6:  # once it is up: else the address would go with what was before
                hosts.run(host, f"ip address add {ADDRESSES6[host]}/64 dev {WIRE} nodad")
        yield hosts


def _program(name: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]


@contextmanager
def _held(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that says a line when it is ready, and ends with its standard input, so that it cannot outlive us."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise RuntimeError(f"{' '.join(command)}: {process.stderr.read().strip()}")
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(PATIENCE_SECONDS)


def _configure(hosts: Hosts, host: int, megabits: float | None) -> None:
    hosts.run(host, "ip link set lo up")
    hosts.run(host, f"ip link set {WIRE} addrgenmode none")  # no address of its own making: one way for all
    hosts.run(host, f"ip address add {ADDRESSES[host]}/24 dev {WIRE}")
    hosts.run(host, f"ip link set {WIRE} up")
    hosts.run(host, f"ip route change 10.77.0.0/24 dev {WIRE} src {ADDRESSES[host]} congctl {congestion_control()}")
    if megabits is not None:
        size = megabits * 1e6 / 8
        burst, limit = max(4000, round(size * BURST_SECONDS)), max(200_000, round(size * QUEUE_SECONDS))
        hosts.run(host, f"tc qdisc add dev {WIRE} root tbf rate {megabits}mbit burst {burst} limit {limit}")


def congestion_control() -> str:
    """How TCP paces itself on the wire: as on most hosts, if this one can."""
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return "cubic" if "cubic" in known else known[0]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
