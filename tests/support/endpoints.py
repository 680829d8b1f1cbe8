"""Endpoints of several ranks in one process, a thread each: what tests of them share."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
import torch

from gpipe.distributed.connection import Connection, TcpConnection
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.failures import Status
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Label
from tests.support.certificates import REASON, encrypted


class TlsConnection(TcpConnection):
    """The one between hosts, encrypted."""


KINDS = [
    Connection,
    TcpConnection,
    pytest.param(TlsConnection, marks=pytest.mark.skipif(bool(REASON), reason=REASON)),
]
BIG = 2**20  # bytes: more than the stream takes
LIMIT = 1e6  # seconds that nobody waits, however busy the machine: who stands still is ended by `progress.watch`


def joined(
    kind: type[Connection], pair: Callable[[], tuple[socket.socket, socket.socket]], buffer: int | None = None
) -> tuple[Connection, Connection]:
    """Two ends of a connection over such pairs, whose streams take so many bytes at a time."""
    pairs = [pair() for _ in range(3 if kind is TlsConnection else 2)]
    for end in (*pairs[0], *pairs[-1]):
        if buffer is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    if kind is not TlsConnection:
        one, other = (kind(*ends) for ends in zip(*pairs, strict=True))
        return one, other
    streams, news, answers = (encrypted(*ends) for ends in pairs)
    return (
        TlsConnection(streams[0], news[0], answers[0]),
        TlsConnection(answers[1], news[1], streams[1]),
    )


def outgoing(connection: Connection) -> socket.socket:
    """By which its messages leave."""
    return connection._outgoing if isinstance(connection, TcpConnection) else connection._stream


@contextmanager
def endpoints(
    count: int, kind: type[Connection] = Connection, limit: float = LIMIT, buffer: int = 2**17
) -> Iterator[list[Endpoint]]:
    connections: list[dict[int, Connection]] = [{} for _ in range(count)]
    for one, other in combinations(range(count), 2):
        connections[one][other], connections[other][one] = joined(kind, socket.socketpair, buffer)
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
        return endpoint.finish_run(told)
    except BaseException as error:
        endpoint.fail(error)
        raise


def waits(endpoint: Endpoint) -> bool:
    return endpoint.status.waits
