"""Endpoints: every program runs, however little may be under way, and what is not wanted does no harm."""

import random
import select
import threading
import time
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.distributed import endpoint as endpoint_module
from gpipe.distributed.codec import Encoded, encode
from gpipe.distributed.connection import INLINE_BYTES, SLOTS, Connection
from gpipe.distributed.endpoint import Endpoint
from gpipe.errors import RemoteError
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.lower import place_recompute, place_transfers
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import fill_drain
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Label, Message
from tests.support.endpoints import BIG, KINDS, endpoints, label_of, receive, send, together, waits
from tests.support.progress import wait_until

# Note "Room": every program that is one can be run, however little is under way at a time.


def walk(endpoint: Endpoint, program: Program, size: int, pauses: random.Random) -> None:
    """A rank's row: its transfers, and pauses for the rest."""
    numbers = {route: number for number, route in enumerate(program.routes)}

    def label(action: Action) -> Label:
        assert action.route is not None
        assert action.micro_batch is not None
        return Label(numbers[action.route], action.micro_batch, action.carries_gradient)

    row = program.table[endpoint.rank]
    due = {label(action): at for at, action in enumerate(row) if action.kind is Kind.RECEIVE}
    sources = {program.rank_of[action.peer.stage] for action in row if action.kind is Kind.RECEIVE}
    endpoint.expect(due, sources, lambda peer, seen: f"at {seen.at}")
    for at, action in enumerate(row):
        endpoint.reach(at)
        held = set(endpoint._early)
        assert all(due[early] <= at for _, early in held)  # and what waits does not grow with M
        if action.kind is Kind.SEND:
            value = torch.full([size // 8], hash(label(action)))
            endpoint.send(program.rank_of[action.peer.stage], label(action), BoundaryValue(value, []))
        elif action.kind is Kind.RECEIVE:
            message, _ = endpoint.receive(program.rank_of[action.peer.stage], label(action))
            assert isinstance(message, BoundaryValue)
            assert torch.equal(message.value, torch.full([size // 8], hash(label(action))))
        elif pauses.random() < 0.1:
            time.sleep(2e-3)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=10)
@given(
    ranks=st.integers(2, 4),
    micro_batches=st.integers(1, 12),
    size=st.sampled_from([8, INLINE_BYTES, BIG]),
    seed=st.integers(0, 99),
)
def test_every_program_runs_however_large_its_messages(
    kind: type[Connection], ranks: int, micro_batches: int, size: int, seed: int
) -> None:
    program = Program.of(fill_drain(ranks, micro_batches), micro_batches)
    program = place_transfers(place_recompute(program, ["always"] * ranks))
    with endpoints(ranks, kind, buffer=2**14) as every:
        works = [partial(walk, one, program, size, random.Random(seed + one.rank)) for one in every]
        assert together(*works) == [None] * ranks


@pytest.mark.parametrize("size", [INLINE_BYTES, BIG])
@pytest.mark.parametrize("kind", KINDS)
def test_two_that_send_more_than_fits_take_meanwhile_what_their_rows_have(kind: type[Connection], size: int) -> None:
    count = 10 * SLOTS

    def exchange(endpoint: Endpoint, peer: int) -> None:
        endpoint.expect({label_of(number): 0 for number in range(count)}, {peer}, lambda peer, seen: "")
        for number in range(count):
            send(endpoint, peer, number, size)
        for number in range(count):
            receive(endpoint, peer, number, size)

    with endpoints(2, kind, buffer=2**14) as (first, second):
        assert together(lambda: exchange(first, 1), lambda: exchange(second, 0)) == [None, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_source", [False, True])
def test_a_message_that_comes_just_before_the_wait_is_seen(
    as_source: bool, kind: type[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung: `_wait` took what was wanted from the stream, and then waited for the stream."""
    with endpoints(2, kind) as (first, second):
        if as_source:
            second.expect({label_of(0): 0}, {0}, lambda peer, seen: "")
        wait = second._wait

        def late(*given: Any, **how: Any) -> None:
            monkeypatch.undo()
            send(first, 1, 0)
            wait(*given, **how)

        monkeypatch.setattr(second, "_wait", late)
        receive(second, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_room_that_comes_just_before_the_wait_is_seen(
    kind: type[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung: `_wait` heard that messages had left while it looked for others, and then waited to hear it."""
    with endpoints(2, kind) as (first, second):
        sent: list[int] = []
        wait, ended = first._wait, threading.Event()

        def late(*given: Any, **how: Any) -> None:
            monkeypatch.undo()
            for number in sent:
                receive(second, 0, number, BIG)
            connection = first.connections[1]
            handles = [connection.fileno(), connection.control.socket.fileno()]
            select.select(handles, [], [])  # it can be heard that all left
            wait(*given, **how)
            ended.set()

        monkeypatch.setattr(first, "_wait", late)
        while not ended.is_set():
            send(first, 1, len(sent), BIG)
            sent.append(len(sent))


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_does_not_spin(kind: type[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream was still watched for writing, or for reading, when nobody wrote or read it any more."""
    with endpoints(3, kind, buffer=1) as (first, second, third):
        polls: list[float] = []
        sleep = second._poll.sleep

        def counted(seconds: float) -> bool | None:
            polls.append(seconds)
            return sleep(seconds)

        monkeypatch.setattr(second._poll, "sleep", counted)

        def middle() -> None:
            send(second, 2, 0, INLINE_BYTES)
            receive(second, 2, 0)
            del polls[:]
            receive(second, 0, 0)

        def others() -> None:
            receive(third, 1, 0, INLINE_BYTES)
            send(third, 1, 0)
            send(third, 1, 1)  # which is not wanted
            wait_until(lambda: waits(second))
            time.sleep(0.1)
            send(first, 1, 0)

        assert together(middle, others) == [None, None]
        assert len(polls) < 100  # who spins polls thousands of times


# Runs.


@pytest.mark.parametrize("size", [8, INLINE_BYTES, BIG])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_failed_run_left_is_thrown_away_by_the_next(kind: type[Connection], size: int) -> None:
    with endpoints(2, kind, buffer=1) as (first, second):

        def send_without_end() -> None:
            for number in count():
                send(first, 1, number, size)

        def sends() -> None:
            with pytest.raises(RemoteError, match="ValueError: enough"):
                send_without_end()
            first.begin()
            for number in range(3):
                send(first, 1, number, size)

        def takes() -> None:
            wait_until(lambda: waits(first))  # which is in the middle of a frame, if that is large
            second.fail(ValueError("enough"))
            second.begin()
            for number in range(3):
                receive(second, 0, number, size)

        assert together(sends, takes) == [None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_the_next_run_waits_for_it(kind: type[Connection]) -> None:
    with endpoints(2, kind) as (first, second):
        send(second, 0, 0)
        second.begin()
        send(second, 0, 1)
        receive(first, 1, 0)
        wait_until(lambda: first.connections[1].head() is not None)
        assert first._take(1, label_of(1)) is False
        first.begin()
        receive(first, 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broadcast_is_encoded_once(kind: type[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 ends each step by a broadcast of N values. Encoded for each peer, these took 2.5 s with N = 256."""
    calls: list[Message] = []

    def counted(message: Message) -> Encoded:
        calls.append(message)
        return encode(message)

    monkeypatch.setattr(endpoint_module, "encode", counted)
    numbers, label = torch.arange(3.0), label_of(0)
    with endpoints(4, kind) as every:
        received = together(*(partial(one.broadcast, 1, range(4), label, (numbers, "text")) for one in every))
    assert all(torch.equal(first, numbers) and text == "text" for first, text in received)
    assert len(calls) == 1
