"""What a message costs between two processes: by stream and shared memory, by TCP as between hosts, and by gloo.

A message goes there and back; half of that is one way. A copy into place at the receiver is part of all three.
"""

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bench.machine import facts
from bench.report import describe, table, write
from gpipe.comm.local import Link
from gpipe.comm.net import Net
from gpipe.comm.tcp import RemoteLink
from gpipe.values.boundary import BoundaryValue
from gpipe.values.messages import Label

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}
WAYS = ("stream and shared memory", "TCP over the loopback", "gloo")
Pass = Callable[[int, Tensor], Tensor]
"""Sends a tensor to the other process, and gives what comes back or came first; the number is the message's."""


def over_net(net: Net, first: bool, number: int, tensor: Tensor) -> Tensor:
    """By this library's messages."""
    label = Label(0, number, gradient=False)
    other = 1 - net.rank
    if first:
        net.send(other, label, BoundaryValue(tensor, []))
    message, _ = net.receive(other, label)
    assert isinstance(message, BoundaryValue)
    if not first:
        net.send(other, label, message)
    return message.tensor


def over_gloo(first: bool, number: int, tensor: Tensor) -> Tensor:
    """By torch.distributed."""
    other = 1 - dist.get_rank()
    found = torch.empty_like(tensor)
    if first:
        dist.send(tensor, other)
    dist.recv(found, other)
    if not first:
        dist.send(found, other)
    return found


def play(
    rank: int, folder: str, pairs: list[list[socket.socket]], answers: "mp.Queue[dict[str, list[float]]]"
) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    path = Path(folder) / "store"
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    nets = [Net(rank, {1 - rank: kind(*pair)}, 60.0) for kind, pair in zip((Link, RemoteLink), pairs, strict=True)]
    for net in nets:
        net.begin()
    ways: list[Pass] = [*(partial(over_net, net, rank == 0) for net in nets), partial(over_gloo, rank == 0)]
    found: dict[str, list[float]] = {}
    number = 0
    for _ in range(7):
        for size, count in SIZES.items():
            for name, way in zip(WAYS, ways, strict=True):
                tensor = torch.ones(count // 4)
                turns = max(4, min(300, 2**24 // count))
                begun = time.perf_counter()
                for _ in range(turns):
                    number += 1
                    way(number, tensor)
                found.setdefault(f"{name}, {size}", []).append((time.perf_counter() - begun) / turns / 2)
    if rank == 0:
        answers.put(found)
    dist.barrier()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.links", description=__doc__).parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = mp.get_context("fork")
    answers = context.Queue()
    ends = [[make() for _ in range(2)] for make in (socket.socketpair, tcp_pair)]
    with tempfile.TemporaryDirectory() as folder:
        players = [
            context.Process(target=play, args=(rank, folder, [[pair[rank] for pair in two] for two in ends], answers))
            for rank in range(2)
        ]
        for player in players:
            player.start()
        found = answers.get(timeout=300)
        for player in players:
            player.join()
    about = facts()
    rows = [[size, *(f"{1e6 * median(found[f'{way}, {size}'][1:]):.4g}" for way in WAYS)] for size in SIZES]
    text = (
        f"# A message between two processes, one way\n\n{describe(about)}\n\nMedians of six rounds, in us.\n\n"
        f"{table(['', *WAYS], rows)}"
    )
    write("links", text, {"facts": about, "seconds": found})


if __name__ == "__main__":
    main()
