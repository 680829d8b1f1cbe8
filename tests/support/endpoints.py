"""Endpoints of several ranks in one process, a thread each: what tests of them share."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch

from gpipe.distributed.connection import Connection, TcpConnection
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.failures import Status
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Label

KINDS = (Connection, TcpConnection)
BIG = 2**20  # bytes: more than the stream takes
LIMIT = 1e6  # seconds that nobody waits, however busy the machine: who stands still is ended by `progress.watch`


@contextmanager
def endpoints(
    count: int, kind: type[Connection] = Connection, limit: float = LIMIT, buffer: int = 2**17
) -> Iterator[list[Endpoint]]:
    connections: list[dict[int, Connection]] = [{} for _ in range(count)]
    for one, other in combinations(range(count), 2):
        streams, news = socket.socketpair(), socket.socketpair()
        for stream in streams:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        connections[one][other], connections[other][one] = (kind(*ends) for ends in zip(streams, news, strict=True))
    statuses = [Status() for _ in range(count)]
    shown = dict(enumerate(statuses)) if kind is Connection else {}
    made = [Endpoint(rank, connections[rank], limit, statuses[rank], shown) for rank in range(count)]
    try:
        for endpoint in made:
            endpoint.begin()
        yield made
    finally:
        for endpoint in made:
            endpoint.close()


def together(*works: Callable[[], Any]) -> list[Any]:
    """Does all at once, a thread each; gives what each returned or raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        return [future.exception() or future.result() for future in futures]


def label_of(number: int) -> Label:
    return Label(number, 0, gradient=False)


def send(endpoint: Endpoint, peer: int, number: int, size: int = 8) -> None:
    endpoint.send(peer, label_of(number), BoundaryValue(torch.full([size // 8], number), []))


def receive(endpoint: Endpoint, peer: int, number: int, size: int = 8) -> None:
    message, _ = endpoint.receive(peer, label_of(number))
    assert isinstance(message, BoundaryValue)
    assert torch.equal(message.value, torch.full([size // 8], number))


def exchange(endpoint: Endpoint, told: bytes) -> list[Any]:
    try:
        endpoint.begin()
        return endpoint.exchange(told)
    except BaseException as error:
        endpoint.fail(error)
        raise


def waits(endpoint: Endpoint) -> bool:
    return endpoint.status.waits
