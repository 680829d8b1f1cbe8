"""Compares pipeline with data parallelism over a slow link between two hosts, as in the paper's Table 3.

    python -m bench.slow_link    # as root: creates network namespaces

Two processes train a Transformer with many parameters and small activations at the stage boundary, one on each of two
hosts. The hosts are network namespaces of this machine, joined by a link of 10 Gbit/s, 1 Gbit/s or 100 Mbit/s, with
or without delay. Data parallelism sends a gradient for each parameter and step. Pipeline parallelism sends the
activations and gradients of one stage boundary.
"""

import argparse
import json
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import median

from bench.machine import facts
from bench.report import describe, spread, table, with_time_left, write
from bench.run import choose_cuts
from bench.runtimes import RUNTIMES
from bench.setup import Setup
from bench.teams import Team, Teams
from bench.workloads import WORKLOADS
from two_hosts.hosts import ADDRESSES, Hosts, congestion_control, missing, two_hosts
from two_hosts.relay import WIRE, enter

WORK = WORKLOADS["wide"]
MEGABITS = (10_000, 1_000, 100)
DELAYS = (0.0, 0.002)
COMPARED = ("ddp", "torch-gpipe", "torch-1f1b", "processes")
PORT = 5000
ROWS = len(WORK.data()[0])


@dataclass
class Row:
    """The results of one runtime on one link.

    Attributes:
        seconds: Duration of a step, by turn.
        sent: Bytes that both hosts together sent in a step.
        difference: Largest relative difference of the gradients from the reference loop, over all parameters.
    """

    seconds: list[float]
    sent: float
    difference: float


@dataclass
class Found:
    """The results of one link. `megabits` and `delay` are the settings, `measured_` the measured values."""

    megabits: int
    delay: float
    measured_megabits: float
    measured_round_trip: float
    rows: dict[str, Row] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def measure(megabits: int, delay: float, names: Sequence[str], cuts: tuple[int, ...], rounds: int) -> Found:
    """Trains with all runtimes in turn on one link."""
    with two_hosts(megabits, delay) as hosts:
        found = Found(megabits, delay, *probe(hosts, seconds=0.5))
        plain = Setup(WORK.name, WORK.partitions, WORK.micro_batches, cuts, remat=False)
        apart = Setup(
            WORK.name, WORK.partitions, WORK.micro_batches, cuts, remat=False, networks=hosts.networks,
            interface=WIRE, address=ADDRESSES[0],
        )  # fmt: skip
        with Teams({"plain": plain, **dict.fromkeys(names, apart)}) as teams:
            gradients = teams.gradients()
            teams.run(rounds, until=0)
            found.failures = teams.failures
            if "plain" in teams.failures:  # what all are compared with
                return found
            for name in (name for name in teams.by_name if name not in teams.failures):
                seconds = [median(turn.seconds) for turn in teams.turns[name]]
                difference = max(
                    float((gradient - gradients["plain"][at]).norm() / gradients["plain"][at].norm())
                    for at, gradient in gradients[name].items()
                )
                found.rows[name] = Row(seconds, sent_in_a_step(hosts, teams.by_name[name]), difference)
    return found


def sent_in_a_step(hosts: Hosts, team: Team) -> float:
    """Returns the bytes that both hosts together send in a step, from the counters of their network devices."""
    before = _sent(hosts)
    steps = len(team.turn().seconds)
    return (_sent(hosts) - before) / steps


def _sent(hosts: Hosts) -> int:
    told = [json.loads(hosts.run(host, f"ip -json -statistics link show dev {WIRE}")) for host in (0, 1)]
    return sum(int(link["stats64"]["tx"]["bytes"]) for (link,) in told)


def probe(hosts: Hosts, seconds: float) -> tuple[float, float]:
    """Returns the bandwidth in Mbit/s, and the median round-trip time of 20 single bytes in seconds."""
    with ThreadPoolExecutor(2) as threads:  # which enter the namespaces, and end
        listening = threads.submit(_listen, hosts).result()
        answer = threads.submit(_answer, hosts, listening)
        round_trip = threads.submit(_ask, hosts, seconds).result()
        return answer.result(), round_trip


def _listen(hosts: Hosts) -> socket.socket:
    enter(hosts.networks[0])
    return socket.create_server((ADDRESSES[0], PORT))


def _answer(hosts: Hosts, listening: socket.socket) -> float:
    with listening, listening.accept()[0] as connection:
        for _ in range(20):
            connection.sendall(connection.recv(1))
        size, start = len(connection.recv(1)), time.perf_counter()
        while got := connection.recv(2**20):
            size += len(got)
        return size * 8e-6 / (time.perf_counter() - start)


def _ask(hosts: Hosts, seconds: float) -> float:
    enter(hosts.networks[1])
    trips = []
    with socket.create_connection((ADDRESSES[0], PORT)) as connection:
        for _ in range(20):
            start = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - start)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(bytes(2**18))
    return median(trips)


def markdown(found: Sequence[Found], names: Sequence[str]) -> str:
    """Returns the rows per second on each link, and the bytes sent."""
    header = ["wire", "measured", *(RUNTIMES[name].title for name in ("plain", *names))]
    lines = [[_wire(one), _measured(one), *(_speed(one, name) for name in ("plain", *names))] for one in found]
    sent = [
        [
            RUNTIMES[name].title,
            f"{median(row.sent for row in rows) / 1e6:.1f}",
            f"{max(row.difference for row in rows):.0e}",
        ]
        for name in names
        if (rows := [one.rows[name] for one in found if name in one.rows])
    ]
    failed = {
        f"{RUNTIMES[n].title} failed: {why.splitlines()[-1]}" for one in found for n, why in one.failures.items()
    }
    sent_header = ["", "MB sent in a step, by both", "gradients: largest difference from the plain loop's"]
    return "\n\n".join([table(header, lines), table(sent_header, sent), *sorted(failed)])


def _wire(found: Found) -> str:
    rate = f"{found.megabits // 1000} Gbit/s" if found.megabits >= 1000 else f"{found.megabits} Mbit/s"
    return rate + (f", {found.delay * 1e3:g} ms" if found.delay else "")


def _measured(found: Found) -> str:
    return f"{found.measured_megabits:.0f} Mbit/s, {found.measured_round_trip * 1e3:.2g} ms there and back"


def _speed(found: Found, name: str) -> str:
    if name not in found.rows:
        return "failed"
    own, plain = found.rows[name].seconds, found.rows["plain"].seconds
    return f"{spread([ROWS / seconds for seconds in own], scale=1, digits=3)}, {median(plain) / median(own):.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.slow_link", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabits", type=int, nargs="+", default=MEGABITS)
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS, help="seconds, each way")
    parser.add_argument(
        "--runtimes", default=",".join(COMPARED), help=f"separated by commas, of {', '.join(COMPARED)}"
    )
    parser.add_argument("--keep", default="slow_link", help="write the result under another name")
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(why)
    names = options.runtimes.split(",")
    cuts, about, found = choose_cuts(WORK, WORK.partitions), facts(), list[Found]()
    wires = [(megabits, delay) for delay in options.delays for megabits in options.megabits]
    for megabits, delay in with_time_left(wires, "slow_link"):
        found.append(measure(megabits, delay, names, cuts, options.rounds))
        report(options, found, names, cuts, about, aloud=len(found) == len(wires))


def report(
    options: argparse.Namespace,
    found: Sequence[Found],
    names: Sequence[str],
    cuts: tuple[int, ...],
    about: dict[str, str],
    *,
    aloud: bool,
) -> None:
    """Writes the results so far."""
    text = (
        f"# Two hosts and a slow wire\n\n{describe(about)}\n\n{WORK.title}, {_megabytes()} MB of parameters; K=2, "
        f"M={WORK.micro_batches}, layers {'+'.join(map(str, cuts))}, no remat. One process on each of two network "
        f"namespaces of this machine, one thread each, forward and backward only. Rows a second: median (least to "
        f"greatest of {options.rounds} turns), and the speed over one process on one host. TCP with "
        f"{congestion_control()}. A delay is each way, made by a process between the ends, which takes CPU time "
        f"too.\n\n{markdown(found, names)}"
    )
    data = {"facts": about, "rows": ROWS, "found": [asdict(one) for one in found]}
    write(options.keep, text, data, aloud=aloud)


def _megabytes() -> str:
    return f"{sum(p.numel() * p.element_size() for layer in WORK.layers() for p in layer.parameters()) / 1e6:.0f}"


if __name__ == "__main__":
    main()
