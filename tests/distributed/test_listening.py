"""On one host nothing listens where other hosts could connect (R12); and the look itself is right."""

import os
import socket
from collections.abc import Sequence

import pytest

from tests.support.jobs import listening as jobs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.listening import Listening, family, listening_sockets
from tests.support.processes.outcome import Outcome, answers


def open_to_others(outcomes: Sequence[Outcome]) -> list[Listening]:
    """What of the ranks' answers other hosts could connect to."""
    found = [Listening(*one) for answer in answers(outcomes) for one in answer]
    return [one for one in found if not one.is_loopback]


def test_ranks_that_meet_at_a_file_listen_on_loopback_only(pool: WorkerPool) -> None:
    assert open_to_others(pool.run(jobs.meet)) == []


def test_a_pipe_over_processes_listens_on_loopback_only(pool: WorkerPool) -> None:
    assert open_to_others(pool.run(jobs.train)) == []


def test_torchs_own_meeting_place_is_open_to_all_and_the_look_sees_it(pool: WorkerPool) -> None:
    (found,) = {one.address for one in open_to_others(pool.run(jobs.meet_at_a_port, world=2, join=False))}
    assert found in {"::", "0.0.0.0"}


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:7f00:1"])
def test_a_listening_socket_is_found_until_it_is_closed(address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        try:
            server.bind((address, 0))
        except OSError as error:
            pytest.skip(f"this machine has no such address: {error}")
        server.listen()
        one = Listening(os.getpid(), address, server.getsockname()[1])
        assert one in listening_sockets([os.getpid()])
        assert one.is_loopback == (address not in {"0.0.0.0", "::"})
    assert one not in listening_sockets([os.getpid()])


def test_a_process_that_is_gone_listens_nowhere() -> None:
    assert listening_sockets([2**22 + 1]) == []
    assert family(os.getpid())[0] == os.getpid()
