"""Whatever a layer may hand on comes to another process as it left; what cannot is refused by name on every rank."""

from typing import Any

import pytest

from tests.support.jobs import values as jobs
from tests.support.jobs.values import REFUSED, expected, unrefused
from tests.support.kinds.values import VALUES
from tests.support.processes.digests import wrong
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

WORLD = 3  # so that a value crosses two boundaries


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_comes_as_it_left_with_the_bits_of_the_local_run(kind: str, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.carry, kind, world=WORLD))
    (made, _, _), (_, given, _) = found[0], found[-1]
    assert made
    assert given == made
    assert not wrong([own for _, _, own in found], expected(kind))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_travel_is_named_on_every_rank_and_the_next_step_works(
    kind: str, world: int, pool: WorkerPool
) -> None:
    found: list[Any] = answers(pool.run(jobs.refuse, kind, world=world))
    origin = world - 1 if kind == "metrics" else 0
    for rank, (text, _) in enumerate(found):
        assert text.startswith("TypeError: " if rank == origin else "RemoteError: ")
        assert REFUSED[kind][1] in text
        assert f"rank {origin}" in text or (rank == origin and "metrics" in text)
    assert not wrong([own for _, own in found], unrefused())


@pytest.mark.parametrize("rows", [3, 3000], ids=["in the stream", "in shared memory"])
def test_what_waits_for_a_slow_stage_does_not_grow_with_m(rows: int, pool: WorkerPool) -> None:
    for micro_batches in (8, 64):
        shared, early = zip(*answers(pool.run(jobs.wait, micro_batches, rows, world=2)), strict=True)
        assert max(early) <= 1
        assert max(shared) <= (0 if rows == 3 else 2 * 4 * 2**17)  # both ways, four messages of 72 kB, in 128 KiB
