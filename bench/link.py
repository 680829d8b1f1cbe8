"""Measures round trips of tensors between two hosts: bare sockets, gloo and gpipe's connection with and without TLS.

    python -m bench.link    # as root: creates network namespaces; otherwise uses the loopback device

A pipe keeps the tensors it receives and does not know their sizes in advance. Bare sockets and gloo know the sizes
and reuse the same memory. In the variants `kept`, they allocate each tensor, and gloo sends its size first, as they
would have to in a pipe.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from bench.machine import facts
from bench.report import describe, spread, table, with_time_left, write
from gpipe.distributed.connection import TcpConnection
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.failures import Status
from gpipe.distributed.tls import CA, CERT, KEY, identity
from gpipe.stages.messages import Label
from two_hosts.hosts import ADDRESSES, missing, two_hosts
from two_hosts.relay import WIRE, enter

HERE = Path(__file__).parents[1]
PORT = 5200  # and the one after, for gloo
COUNTS = {2**12: 200, 2**16: 100, 2**20: 30, 2**24: 4, 2**26: 2}
"""How many times there and back make a turn, by bytes."""
NAMES = {2**12: "4 KiB", 2**16: "64 KiB", 2**20: "1 MiB", 2**24: "16 MiB", 2**26: "64 MiB"}
Way = tuple[Callable[[Tensor], object], Callable[[int], Tensor]]  # sends, and receives so many bytes
Found = dict[str, dict[str, list[tuple[float, float]]]]  # seconds and CPU seconds of each turn, by size and way


class Meeting:
    """Connects the two ends, as often as needed."""

    def __init__(self, rank: int, address: str, opened: ExitStack) -> None:
        self.rank, self.address, self.opened = rank, address, opened
        self._server = None if rank else opened.enter_context(socket.create_server((address, PORT)))

    def join(self) -> socket.socket:
        """Returns one connection between the two ends."""
        end = self._server.accept()[0] if self._server else socket.create_connection((self.address, PORT))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self.opened.enter_context(end)


def bare(meeting: Meeting, *, keeps: bool = False) -> Way:
    end = meeting.join()
    ready = {size: torch.ones(size // 4) for size in COUNTS}

    def receive(size: int) -> Tensor:
        tensor = torch.empty(size // 4) if keeps else ready[size]
        view, done = tensor.numpy().data.cast("B"), 0
        while done < size:
            done += end.recv_into(view[done:])
        return tensor

    return lambda tensor: end.sendall(tensor.numpy().data), receive


def gloo(meeting: Meeting) -> Way:
    rank = meeting.rank
    if not dist.is_initialized():
        dist.init_process_group("gloo", f"tcp://{meeting.address}:{PORT + 1}", rank=rank, world_size=2)
    ready = {size: torch.ones(size // 4) for size in COUNTS}

    def receive(size: int) -> Tensor:
        dist.recv(ready[size], 1 - rank)
        return ready[size]

    return lambda tensor: dist.send(tensor, 1 - rank), receive


def gloo_kept(meeting: Meeting) -> Way:
    gloo(meeting)
    rank = meeting.rank

    def send(tensor: Tensor) -> None:
        dist.send(torch.tensor([tensor.numel(), 0, 0, 0]), 1 - rank)
        dist.send(tensor, 1 - rank)

    def receive(size: int) -> Tensor:
        dist.recv(head := torch.empty(4, dtype=torch.int64), 1 - rank)
        dist.recv(tensor := torch.empty(int(head[0])), 1 - rank)
        return tensor

    return send, receive


def ours(meeting: Meeting, *, tls: bool = False) -> Way:
    rank, ends = meeting.rank, [meeting.join() for _ in range(3 if tls else 2)]
    if tls and (own := identity()) is not None:
        ends = [
            own.client.wrap_socket(end) if rank else own.server.wrap_socket(end, server_side=True) for end in ends
        ]
        ends = ends[::-1] if rank else ends  # one each way
    endpoint = Endpoint(rank, {1 - rank: TcpConnection(*ends)}, 1e6, Status(), {})
    meeting.opened.callback(endpoint.close)
    endpoint.begin()
    label = Label(0, 0, gradient=False)
    return (
        lambda tensor: endpoint.send_value(1 - rank, label, tensor),
        lambda size: endpoint.receive_value(1 - rank, label),
    )


WAYS: dict[str, Callable[[Meeting], Way]] = {
    "bare sockets": bare,
    "bare sockets, kept": partial(bare, keeps=True),
    "gloo": gloo,
    "gloo, kept": gloo_kept,
    "ours": ours,
    "ours, TLS": partial(ours, tls=True),
}
MADE = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -subj /CN=job -keyout ca.key -out ca.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -subj /CN=rank -keyout rank.key -out rank.csr
openssl x509 -req -in rank.csr -CA ca.pem -CAkey ca.key -out rank.pem
"""


class Ends:
    """One end of all ways to send. A control connection tells both ends what to measure."""

    def __init__(self, meeting: Meeting) -> None:
        torch.set_num_threads(1)
        self.command = meeting.join().makefile("rw")
        self.ways = {name: make(meeting) for name, make in WAYS.items()}

    def serve(self) -> None:
        """Sends tensors back until the other end stops."""
        for line in self.command:
            name, size, count = json.loads(line)
            send, receive = self.ways[name]
            start = time.process_time()
            for _ in range(count):
                send(receive(size))
            self._say(time.process_time() - start)

    def turn(self, name: str, size: int, count: int) -> tuple[float, float]:
        """Returns the median seconds of a round trip, and the CPU seconds of both ends."""
        send, receive = self.ways[name]
        tensor = torch.arange(size // 4, dtype=torch.float32)
        seconds = []
        self._say([name, size, count])
        cpu = time.process_time()
        for _ in range(count):
            start = time.perf_counter()
            send(tensor)
            back = receive(size)
            seconds.append(time.perf_counter() - start)
        cpu = time.process_time() - cpu + json.loads(self.command.readline())
        assert torch.equal(back, tensor)
        return median(seconds), cpu / count

    def _say(self, said: object) -> None:
        self.command.write(json.dumps(said) + "\n")
        self.command.flush()


@contextmanager
def hosts() -> Iterator[tuple[str, Sequence[str], str]]:
    """Returns the network of the other end, the command that starts it, and a description of the link."""
    if missing():
        yield "", (), "the loopback device"
        return
    with two_hosts() as made:
        prefix = ("nsenter", f"--net={made.networks[1]}", "--")
        yield made.networks[0], prefix, "two network namespaces, joined by a veth pair"


@contextmanager
def two_ends(network: str, prefix: Sequence[str]) -> Iterator[Ends]:
    """Yields the two ends. One of them is this thread, in a network namespace if one is given."""
    if network:
        enter(network)
    address = ADDRESSES[0] if network else "127.0.0.1"
    os.environ["GLOO_SOCKET_IFNAME"] = WIRE if network else "lo"
    with ExitStack() as opened:
        meeting = Meeting(0, address, opened)
        other = subprocess.Popen([*prefix, sys.executable, "-m", "bench.link", "--serve", address], cwd=HERE)
        opened.callback(other.wait)
        opened.callback(other.kill)
        yield Ends(meeting)


def measure(network: str, prefix: Sequence[str], rounds: int, sizes: Sequence[int]) -> Found:
    """Measures all sizes and ways in turn, once per round."""
    found: Found = {NAMES[size]: {name: [] for name in WAYS} for size in sizes}
    with two_ends(network, prefix) as ends:
        for size, name in product(sizes, WAYS):  # all are warm
            ends.turn(name, size, 2)
        for at in with_time_left(range(rounds), "link"):
            for size in sizes:
                names = list(WAYS)
                for name in names[at % len(names) :] + names[: at % len(names)]:
                    found[NAMES[size]][name].append(ends.turn(name, size, COUNTS[size]))
    return found


def markdown(found: Found) -> str:
    """Returns a table by size: milliseconds, ratio to bare sockets per round, and CPU milliseconds."""
    rows = []
    for size, ways in found.items():
        for name, turns in ways.items():
            seconds, cpu = zip(*turns, strict=True)
            over = [
                f"{median(own / bare for own, (bare, _) in zip(seconds, ways[other], strict=True)):.3g}"
                for other in ("bare sockets, kept", "bare sockets")
            ]
            rows.append([f"{size}, {name}", spread(seconds), *over, f"{median(cpu) * 1e3:.3g}"])
    header = [
        "there and back",
        "ms (least-greatest turn)",
        "x bare sockets, kept",
        "x bare sockets",
        "CPU ms of both",
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.link", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(COUNTS), choices=list(COUNTS))
    parser.add_argument("--keep", default="link", help="write the result under another name")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        with ExitStack() as opened:
            Ends(Meeting(1, options.serve, opened)).serve()
        return
    about = facts()
    with TemporaryDirectory() as files, hosts() as (network, prefix, between), ThreadPoolExecutor(1) as thread:
        subprocess.run(["sh", "-e", "-c", MADE], cwd=files, check=True, capture_output=True)
        names = {CERT: "rank.pem", KEY: "rank.key", CA: "ca.pem"}
        os.environ.update({name: f"{files}/{file}" for name, file in names.items()})
        found = thread.submit(measure, network, prefix, options.rounds, options.sizes).result()
    text = (
        f"# Tensors there and back between two hosts\n\n{describe(about)}\n\nTwo processes of one thread each, over "
        f"{between}; {options.rounds} rounds in turns, in each the median of "
        f"{', '.join(f'{COUNTS[size]} of {NAMES[size]}' for size in options.sizes)}. Load average at the end: "
        f"{os.getloadavg()[0]:.1f}.\n\n{markdown(found)}"
    )
    write(options.keep, text, {"facts": about, "found": found})


if __name__ == "__main__":
    main()
