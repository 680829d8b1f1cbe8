"""What a process has open for each other process of its pipe, and which threads it starts."""

import pytest

from tests.support.jobs import descriptors as jobs
from tests.support.processes.launch import run_ranks
from tests.support.processes.outcome import answers


@pytest.mark.parametrize("world", [2, 8])
def test_a_process_has_two_descriptors_for_each_peer_on_its_host_and_no_thread(world: int) -> None:
    """The status of each peer, which is mapped, had a third."""
    expected = (2 * (world - 1), 0, 0)
    assert [tuple(found) for found in answers(run_ranks(world, jobs.opened))] == [expected] * world


@pytest.mark.parametrize("world", [2, 8])
def test_between_hosts_it_has_five_and_two_threads_and_one_thread_answers_all(world: int) -> None:
    expected = (5 * (world - 1) + 1, 2 * (world - 1) + 1, 0)
    assert [tuple(found) for found in answers(run_ranks(world, jobs.opened_apart))] == [expected] * world
