"""Endpoints: what happens to one rank is told to all, who cannot be told finds out, and nothing stays open."""

import gc
import os
import select
import socket
import threading
from collections.abc import Collection
from functools import partial

import pytest
import torch

from gpipe.distributed import endpoint as endpoint_module
from gpipe.distributed.connection import SLOTS, Connection, TcpConnection
from gpipe.distributed.endpoint import Endpoint
from gpipe.errors import RemoteError
from tests.support.endpoints import (
    BIG,
    KINDS,
    LIMIT,
    endpoints,
    exchange,
    label_of,
    outgoing,
    receive,
    send,
    together,
    waits,
)
from tests.support.progress import wait_until

# Reports.


def test_a_report_of_this_run_wakes_who_waits_and_later_ones_wait() -> None:
    with endpoints(3) as (first, second, third):

        def waiter() -> None:
            with pytest.raises(RemoteError, match="rank 1 failed: ValueError: now\nin the forward") as raised:
                first.receive(2, label_of(0))
            assert (raised.value.rank, raised.value.type_name) == (1, "ValueError")
            assert "ValueError: now" in raised.value.traceback

        def fails() -> None:
            wait_until(lambda: waits(first))
            error = ValueError("now")
            error.add_note("in the forward")
            second.fail(error)

        assert together(waiter, fails) == [None, None]
        send(third, 0, 1)
        third.begin()
        third.fail(ValueError("later"))  # which is nothing to this run
        receive(first, 2, 1)
        for one in (first, second):
            with pytest.raises(RemoteError, match="later"):
                one.begin()
        assert together(*(partial(exchange, one, b"x") for one in (first, second, third))) == [[b"x"] * 3] * 3


@pytest.mark.parametrize("text", ["x" * 10**6, "語" * 10**6, "\udcff"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_report_arrives_however_long_and_odd_its_text(kind: type[Connection], text: str) -> None:
    with endpoints(2, kind) as (first, second):
        second.fail(ValueError(text))
        with pytest.raises(RemoteError) as raised:
            first.receive(1, label_of(0))
        assert str(raised.value).startswith(f"rank 1 failed: ValueError: {text[:1000]}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_between_runs_is_raised_in_the_next(kind: type[Connection]) -> None:
    with endpoints(2, kind) as (first, second):
        first.begin()
        second.begin()
        second.fail_next_run(ValueError("now"))
        second.close("rank 1 closed its pipe.")
        first._check(())  # which is nothing to this run
        with pytest.raises(
            RemoteError, match="rank 1 failed outside any step, after 2 runs: ValueError: now"
        ) as raised:
            first.begin()
        assert (raised.value.rank, raised.value.type_name) == (1, "ValueError")
        with pytest.raises(RemoteError, match=r"rank 1 closed its pipe\."):
            first.begin()


class Owner:
    """Of an endpoint."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("detaches", [False, True])
def test_connections_end_with_their_owner(kind: type[Connection], detaches: bool) -> None:
    with endpoints(2, kind) as (first, second):
        owner = Owner()
        end = second.end_with(owner)
        if detaches:
            end.detach()
        del owner
        gc.collect()
        if detaches:
            second.send_value(0, label_of(0), 3)
            assert first.receive_value(1, label_of(0)) == 3
        else:
            with pytest.raises(RemoteError, match=r"rank 1 dropped its pipe without closing it, after 1 run \("):
                first.receive(1, label_of(0))


@pytest.mark.parametrize("kind", KINDS)
def test_who_fails_again_and_again_is_heard_in_the_end(kind: type[Connection]) -> None:
    with endpoints(2, kind) as (first, second):
        for number in range(60):
            second.fail(ValueError(f"{number} " + "x" * 10_000))
            second.begin()
        with pytest.raises(RemoteError, match="ValueError: 0 x"):
            first.receive(1, label_of(0))
        for number in range(1, 60):
            second.connections[0].control.read()  # as whatever it does next will
            with pytest.raises(RemoteError, match=f"ValueError: {number} x"):
                first.begin()


# Ends.


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_ends_is_missed(kind: type[Connection]) -> None:
    with endpoints(3, kind) as (first, second, _):

        def ends() -> None:
            wait_until(lambda: waits(first))
            second.close()

        raised, _ = together(lambda: receive(first, 2, 0), ends)
        assert isinstance(raised, RemoteError)
        assert (raised.rank, raised.type_name) == (1, "")
        assert str(raised).startswith("rank 1 is gone: it ")
        with pytest.raises(RemoteError, match="rank 1 is gone"):
            first.begin()


def test_a_rank_that_ended_is_told_as_it_ended() -> None:
    with endpoints(2) as (first, second):
        for endpoint in (first, second):
            endpoint.reach(-1)
        second.close()
        with pytest.raises(RemoteError, match=r"^rank 1 is gone: it ended outside any step, after 1 run\.$"):
            first.begin()
    for kind in (Connection, TcpConnection):
        with endpoints(2, kind) as (first, second):
            second.fail(ValueError("why"))
            second.close()
            with pytest.raises(RemoteError, match="rank 1 failed: ValueError: why"):
                first.receive(1, label_of(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_may_end_before_the_news_say_why(kind: type[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts each takes its own way: the report comes when the receiver has looked for it in vain."""
    with endpoints(2, kind) as (first, second):
        looked, check = threading.Event(), first.detector.check

        def look(needed: Collection[int]) -> list[int]:
            gone = check(needed)
            looked.set()
            return gone

        def ends() -> None:
            wait_until(lambda: waits(first))
            outgoing(second.connections[0]).shutdown(socket.SHUT_RDWR)
            looked.wait()
            second.fail(ValueError("why"))

        monkeypatch.setattr(first.detector, "check", look)
        monkeypatch.setattr("gpipe.distributed.failures.REPORT_SECONDS", LIMIT)
        raised, _ = together(lambda: receive(first, 1, 0), ends)
        assert isinstance(raised, RemoteError)
        assert raised.type_name == "ValueError"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_all_agree_and_then_may_leave_at_once(kind: type[Connection], size: int) -> None:
    for length in (3, 2**21):
        with endpoints(size, kind, buffer=2**14) as every:

            def agree(endpoint: Endpoint, length: int = length) -> list[int]:
                told = endpoint.finish_run((endpoint.rank, torch.zeros(length)))
                endpoint.close()
                assert all(tensor.numel() == length for _, tensor in told)
                return [rank for rank, _ in told]

            assert together(*(partial(agree, one) for one in every)) == [list(range(size))] * size


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_ends_before_it_agreed_is_missed_by_all(kind: type[Connection], who: int) -> None:
    with endpoints(3, kind) as every:
        found = together(*(one.close if one.rank == who else partial(exchange, one, b"") for one in every))
        assert all(isinstance(one, RemoteError) and one.rank == who for one in found if one is not None)
        assert found.count(None) == 1


# Timeouts.


def test_a_timeout_names_who_keeps_all_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoints(3) as (first, second, third):
        third.expect({}, (), lambda peer, seen: "")
        third.reach(4)
        all_wait = threading.Barrier(2)

        def wait_for(endpoint: Endpoint, peer: int) -> None:
            def sleep_together(seconds: float) -> bool | None:
                all_wait.wait()
                return sleep(seconds)

            endpoint.detector.limit, sleep = 0.3, endpoint._poll.sleep
            monkeypatch.setattr(endpoint._poll, "sleep", sleep_together)
            endpoint.expect({}, (), lambda peer, seen: f"in action {seen.at} of rank {peer}")
            endpoint.receive(peer, label_of(0))

        found = together(lambda: wait_for(first, 1), lambda: wait_for(second, 2))
        for raised in found:
            assert isinstance(raised, RemoteError)
            assert "no message for 0.3 s, the timeout of the process group" in str(raised)
            assert "rank 2: it was last seen in action 4 of rank 2" in str(raised)
            assert raised.rank == 2


def test_between_hosts_a_timeout_names_who_was_waited_for() -> None:
    told = "rank 1: it is on a different host"
    with endpoints(2, TcpConnection) as (first, _):
        first.detector.limit = 0.1
        with pytest.raises(RemoteError, match=told):
            first.receive(1, label_of(0))
        first.connections[1].host = "host elsewhere"  # as `connect` says it
        with pytest.raises(RemoteError, match="rank 1: it is on host elsewhere"):
            first.receive(1, label_of(0))


# What is left.


def handles() -> set[str]:
    gc.collect()  # of tests before
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_open(kind: type[Connection]) -> None:
    before, threads = handles(), set(threading.enumerate())  # of other tests some may be about to end
    with endpoints(2, kind) as every:
        first, second = every
        for number in range(SLOTS):
            send(first, 1, number, BIG)
        receive(second, 0, 0, BIG)
        assert handles() - before
    del every, first, second
    assert handles() <= before
    wait_until(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_links_open() -> None:
    with endpoints(2) as (first, second):
        until, release = os.pipe()
        child = os.fork()
        if not child:
            os.close(release)
            os.read(until, 1)
            os._exit(0)
        try:
            second.close()
            select.select([first.connections[1].control.socket], [], [])
            with pytest.raises(RemoteError, match="rank 1 is gone"):
                first.begin()
        finally:
            os.close(release)
            os.close(until)
            os.waitpid(child, 0)


# Long waits.


def test_a_long_wait_is_told_once_and_names_who_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint_module, "LONG_WAIT_SECONDS", 0.1)
    with endpoints(3, limit=1e8) as (first, second, third):  # longer than poll() can wait at once
        for endpoint in (first, third):
            endpoint.begin()

        def comes_late() -> None:
            wait_until(lambda: len(caplog.messages) == 2)
            second.begin()
            for peer in (0, 2):
                send(second, peer, 0)

        assert together(lambda: receive(first, 1, 0), lambda: receive(third, 1, 0), comes_late) == [None] * 3
    waited, other = sorted(caplog.messages)
    assert waited.startswith("rank 0 has waited 0.1 s for rank 1.\nrank 1: it has been outside any step, after 1")
    assert "check that every rank calls the pipe, in the same order" in waited
    assert waited.endswith("[long-wait]")
    assert other.startswith("rank 2 has waited 0.1 s for rank 1.\n")
