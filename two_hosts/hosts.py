"""Simulates two hosts on one machine: two network namespaces, connected by a wire that can be shaped and cut.

    with two_hosts(megabits=100, delay=0.002) as hosts:
        server = hosts.start(0, [sys.executable, "-m", "http.server"])
        client = hosts.start(1, ["curl", f"http://{ADDRESSES[0]}:8000"])
        hosts.cut()

The hosts share files, memory and process numbers, but not the network. A namespace lives as long as the process that
holds it, and this process ends with the current one. Nothing is left behind, even after a crash.
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
COMMAND_SECONDS = 3600  # timeout of configuration commands; generous, because the machine may be busy
BURST_SECONDS = 0.0006  # the burst of the rate limit, as a time at this rate: one TCP packet at 1 Gbit/s
QUEUE_SECONDS = 0.05  # the queue of the rate limit, as a time at this rate; packets beyond it are dropped


def missing() -> str:
    """Returns why this machine cannot simulate two hosts, or "" if it can."""
    if not Path("/proc/self/ns/net").exists():
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found. Install iproute2 and util-linux."
    trial = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"network namespaces are not available: {trial.stderr.strip()}" if trial.returncode else ""


@dataclass(frozen=True)
class Hosts:
    """Two hosts, 0 and 1, with the addresses `ADDRESSES`. On both, the wire is the interface `WIRE`.

    Attributes:
        keepers: The processes that hold the namespaces.
        started: The processes that `start` started.
    """

    keepers: tuple[subprocess.Popen[str], ...]
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def networks(self) -> tuple[str, ...]:
        """The path of the namespace of each host."""
        return tuple(f"/proc/{keeper.pid}/ns/net" for keeper in self.keepers)

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host, in a new session. `options` are passed to `subprocess.Popen`.

        The end of `two_hosts` kills the command and all processes that it started.
        """
        process = subprocess.Popen(self._on(host, command), start_new_session=True, **options)
        self.started.append(process)
        return process

    def run(self, host: int, command: str) -> str:
        """Runs a short command on a host and returns its output. The command is split at spaces.

        Raises:
            RuntimeError: If the command fails.
        """
        return _run(self._on(host, command.split()))

    def cut(self, host: int = 1) -> None:
        """Cuts the wire of a host: packets are lost, and connections are not notified."""
        self.run(host, f"ip link set {WIRE} down")

    def mend(self, host: int = 1) -> None:
        """Repairs the wire of a host."""
        self.run(host, f"ip link set {WIRE} up")

    def processes(self) -> list[int]:
        """Returns the processes on the hosts, except the keepers."""
        own = {keeper.pid for keeper in self.keepers}
        return [pid for network in self.networks for pid in processes_in(os.stat(network).st_ino) if pid not in own]

    def close(self) -> None:
        """Kills the processes of `start`. The keepers kill the processes that these started."""
        for process in self.started:
            process.kill()
            process.wait()

    def _on(self, host: int, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={self.networks[host]}", "--", *command]


@contextmanager
def two_hosts(
    megabits: float | None = None, delay: float = 0.0, loss: float = 0.0, *, ipv6: bool = False
) -> Iterator[Hosts]:
    """Creates two hosts with a wire between them. At the end, kills all processes on them and removes them.

    Args:
        megabits: The bandwidth of the wire in each direction, in Mbit/s. Default: unlimited.
        delay: The delay of a packet in each direction, in seconds.
        loss: The share of packets that are lost in each direction.
        ipv6: Whether the hosts also have the addresses `ADDRESSES6`.

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: If the machine cannot simulate hosts: see `missing`.
    """
    if (megabits is not None and megabits <= 0) or delay < 0 or not 0 <= loss < 1:
        raise ValueError(f"{megabits=}, {delay=}, {loss=}: Pass megabits > 0, delay >= 0 and 0 <= loss < 1.")
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
            if ipv6:  # after the wire is up, which removes earlier addresses
                hosts.run(host, f"ip address add {ADDRESSES6[host]}/64 dev {WIRE} nodad")
        yield hosts


def _program(name: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]


@contextmanager
def _held(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs a program that prints a line when it is ready, and ends when its standard input or this process ends."""
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
            process.wait(COMMAND_SECONDS)


def _configure(hosts: Hosts, host: int, megabits: float | None) -> None:
    hosts.run(host, "ip link set lo up")
    hosts.run(host, f"ip link set {WIRE} addrgenmode none")  # no automatic IPv6 address
    hosts.run(host, f"ip address add {ADDRESSES[host]}/24 dev {WIRE}")
    hosts.run(host, f"ip link set {WIRE} up")
    hosts.run(host, f"ip route change 10.77.0.0/24 dev {WIRE} src {ADDRESSES[host]} congctl {congestion_control()}")
    if megabits is not None:
        size = megabits * 1e6 / 8
        burst, limit = max(4000, round(size * BURST_SECONDS)), max(200_000, round(size * QUEUE_SECONDS))
        hosts.run(host, f"tc qdisc add dev {WIRE} root tbf rate {megabits}mbit burst {burst} limit {limit}")


def congestion_control() -> str:
    """Returns the TCP congestion control: cubic, the default of most hosts, if this kernel has it."""
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return "cubic" if "cubic" in known else known[0]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
