"""Over processes: what is recomputed follows from the memory of all, and a plan is trained as one process does."""

from typing import Any

import torch

from gpipe.config.assemble import memory_by_row
from gpipe.distributed.mesh import Position
from tests.support.jobs import automatic as jobs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers


def assert_same(found: Any, alone: Any) -> None:
    """What a process has is what one process had."""
    assert (found["remat"], found["loss"]) == (alone["remat"], alone["loss"])
    assert found["gradients"]
    assert all(alone["gradients"][name] == gradient for name, gradient in found["gradients"].items())


def test_remat_auto_gives_the_bits_of_one_process_and_recomputes_by_the_memory_of_each(pool: WorkerPool) -> None:
    alone = jobs.by_memory(jobs.TIGHT, driver="lockstep")
    assert "never" not in alone["remat"]
    for found in answers(pool.run(jobs.auto, jobs.TIGHT, world=2)):
        assert_same(found, alone)
    for found in answers(pool.run(jobs.auto, jobs.TIGHT, world=4)):
        assert found["remat"] == alone["remat"]
    for found in answers(pool.run(jobs.auto, None, world=2)):
        assert found["remat"] == ["never", "never"]


def test_a_plan_gives_the_bits_of_the_same_plan_in_one_process(pool: WorkerPool) -> None:
    alone = jobs.by_plan(driver="lockstep")
    for found in answers(pool.run(jobs.planned, world=2)):
        assert_same(found, alone)


def test_processes_of_a_host_share_its_memory_and_the_least_replica_counts() -> None:
    def position(device: str) -> Position:
        return Position(0, 0, 2, 2, (0, 1, 2, 3), torch.device(device), 60.0)

    hosts, memory = ["a", "a", "a", "b"], [12.0, 12.0, 12.0, 8.0]
    assert memory_by_row(position("cpu"), hosts, memory) == [4.0, 4.0]
    assert memory_by_row(position("cuda:0"), hosts, [12.0, 12.0, 10.0, 8.0]) == [10.0, 8.0]
