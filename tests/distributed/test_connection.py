"""Links: whatever is sent arrives whole and in order, within a host and between hosts, and nothing is left behind."""

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpipe.distributed.codec import PeerClosed, encode
from gpipe.distributed.connection import CHUNK_BYTES, INLINE_BYTES, SLOTS, Connection, Frame, TcpConnection
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Label
from tests.support.endpoints import KINDS, joined
from tests.support.progress import wait_until

SIZES = (0, 4, 1000, INLINE_BYTES - 4, INLINE_BYTES, INLINE_BYTES + 4, 2**17, 2**17 + 4, 2**20)
RUN = 7


def ends(kind: type[Connection]) -> tuple[socket.socket, socket.socket]:
    """The two ends of a stream."""
    if kind is Connection:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@contextmanager
def linked(kind: type[Connection], buffer: int | None = None) -> Iterator[tuple[Connection, Connection]]:
    """Two ends of a connection, whose stream takes so many bytes at a time."""
    one, other = joined(kind, partial(ends, kind), buffer)
    try:
        yield one, other
    finally:
        one.close()
        other.close()


def tensor_of(size: int, number: int) -> Tensor:
    """So many bytes, other ones for each number."""
    return torch.arange(number, number + size // 4, dtype=torch.int32)


def put(connection: Connection, number: int, size: int) -> None:
    connection.put(RUN, Label(number, 0, gradient=False), encode(BoundaryValue(tensor_of(size, number), [])), 1.5)


def take(connection: Connection, sender: Connection | None = None) -> tuple[Frame, Tensor]:
    """Waits for the next message, while its sender sends on."""

    def is_here() -> bool:
        if sender is not None:
            sender.flush()
        return connection.head() is not None

    wait_until(is_here)
    head = connection.head()
    assert head is not None
    found = connection.message(head)
    assert isinstance(found, BoundaryValue)
    connection.done(head)
    return head, found.value


class Flow:
    """Messages from one end to the other, and the law that they keep."""

    def __init__(self, one: Connection, other: Connection) -> None:
        self.one, self.other = one, other
        self.under_way: deque[tuple[int, int]] = deque()
        self.sent = 0

    def send(self, size: int) -> None:
        """Puts a message on its way; what has no room has others taken first."""
        needed = encode(BoundaryValue(tensor_of(size, 0), [])).size
        wait_until(lambda: self._has_room(needed))
        put(self.one, self.sent, size)
        self.under_way.append((self.sent, size))
        self.sent += 1
        if not isinstance(self.one, TcpConnection):
            assert len(self.one._slots) <= SLOTS
            assert sum(slot.taken for slot in self.one._slots) == sum(
                size > INLINE_BYTES for _, size in self.under_way
            )

    def _has_room(self, size: int) -> bool:
        if self.one.flush() and self.one.has_room(size):
            return True
        if self.other.head() is not None:
            self.take()
        return False

    def take(self) -> None:
        """Takes a message, which must be the next one."""
        number, size = self.under_way.popleft()
        head, tensor = take(self.other, self.one)
        assert (head.label.route, head.run) == (number, RUN)
        assert torch.equal(tensor, tensor_of(size, number))


# Laws.


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=30)
@given(
    moves=st.lists(st.one_of(st.sampled_from(SIZES), st.none()), max_size=40),
    buffer=st.sampled_from([None, 1, 2**14]),
)
def test_messages_arrive_whole_and_in_order(
    kind: type[Connection], moves: Sequence[int | None], buffer: int | None
) -> None:
    with linked(kind, buffer) as (one, other):
        flows = Flow(one, other), Flow(other, one)
        for flow, size in product(flows, moves):
            if size is not None:
                flow.send(size)
            elif flow.under_way:
                flow.take()
        for flow in flows:
            while flow.under_way:
                flow.take()
        wait_until(lambda: one.flush() and other.flush())
        assert one.head() is other.head() is None


# Examples.


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_may_be_longer_than_the_memory_that_it_comes_through(kind: type[Connection]) -> None:
    with linked(kind, 2**14) as (one, other):
        for length in (1, CHUNK_BYTES, 1, 3 * CHUNK_BYTES, CHUNK_BYTES // 2, 1):
            text = "ab" * length
            one.put(RUN, Label(0, 0, gradient=False), encode(BoundaryValue((text, torch.ones(3)), [])), 1.5)
            wait_until(lambda: one.flush() & (other.head() is not None))
            head = other.head()
            assert head is not None
            found = other.message(head)
            assert isinstance(found, BoundaryValue)
            assert found.value[0] == text
            other.done(head)
        assert other.head() is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sent_arrives_also_if_the_sender_is_gone(kind: type[Connection]) -> None:
    with linked(kind) as (one, other):
        for number, size in enumerate((4, 2**20, INLINE_BYTES)):
            put(one, number, size)
        wait_until(one.flush)
        one.close()
        assert [take(other)[0].label.route for _ in range(3)] == [0, 1, 2]
        with pytest.raises(PeerClosed):
            wait_until(lambda: other.head() is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_who_sends_to_one_that_is_gone_is_told(kind: type[Connection]) -> None:
    def sends(one: Connection) -> None:
        for number in range(1000):
            wait_until(lambda: one.flush() and one.has_room(2**16))
            put(one, number, 2**16)

    with linked(kind) as (one, other):
        other.close()
        with pytest.raises(PeerClosed):
            sends(one)


# Bug stories.


def test_a_message_whose_reader_was_interrupted_is_still_there() -> None:
    with linked(Connection) as (one, other):
        put(one, 0, 2**20)
        wait_until(lambda: other.head() is not None)
        head = other.head()
        assert head is not None
        other.message(head)  # and Ctrl-C comes before `done`
        head, tensor = take(other)
        assert torch.equal(tensor, tensor_of(2**20, 0))


def test_a_slot_whose_writer_was_interrupted_is_told_with_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with linked(Connection) as (one, other):
        with monkeypatch.context() as patch:
            patch.setattr("gpipe.distributed.codec.Encoded.write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                put(one, 0, 2**20)
        for size in (2**20, 2**21):
            put(one, 1, size)
            assert torch.equal(take(other)[1], tensor_of(size, 1))
