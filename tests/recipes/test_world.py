import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # It is public.

from gpipe.recipes.options.training import ImagesOptions, TrainOptions
from gpipe.recipes.prepare import Epoch, Progress, from_extra, to_extra
from gpipe.recipes.world import World, agree_on_life, find_world

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a.host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_what_torchrun_says_is_read_and_whoever_is_not_launched_is_alone() -> None:
    assert find_world(TORCHRUN) == World(3, 4, launched=True, restarts=2)
    assert not find_world(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}).one_host
    for missing in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert find_world({name: value for name, value in TORCHRUN.items() if name != missing}) == World()


def test_srun_and_mpirun_launch_too() -> None:
    known = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert find_world(known) == World(1, 2, launched=True)
    assert find_world({**known, "OMPI_COMM_WORLD_SIZE": "1"}) == World()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_processes_of_a_life_agree_whatever_earlier_ones_left_in_the_store(size: int) -> None:
    """Rank 0 or others come first, and agents count restarts apart; a life may end before it has agreed."""
    store, prefixes = HashStore(), set[str]()
    drawn = random.Random(size)
    for life in range(8):
        counts = [drawn.choice([0, life]) for _ in range(size)]
        delays = [drawn.choice([0.0, 0.01, 0.1]) for _ in range(size)]

        def join(rank: int, delays: list[float] = delays, counts: list[int] = counts) -> tuple[str, int]:
            time.sleep(delays[rank])
            return agree_on_life(store, World(rank, size, launched=True, restarts=counts[rank]))

        with ThreadPoolExecutor(size) as ranks:
            ((prefix, restarts),) = {*ranks.map(join, range(size))}
        assert restarts == life
        assert prefix not in prefixes
        prefixes.add(prefix)
        store.set(
            f"gpipe/process/{drawn.randrange(size)}", f"a process that ended early {life}".replace(" ", "-") + " 0"
        )


def test_the_largest_count_is_that_of_all_if_every_life_has_its_own_store() -> None:
    world = replace(World(), size=2, launched=True)
    store = HashStore()
    with ThreadPoolExecutor(2) as ranks:
        found = ranks.map(lambda rank: agree_on_life(store, replace(world, rank=rank, restarts=3 * rank)), range(2))
        assert [restarts for _, restarts in found] == [3, 3]


def test_partitions_are_processes_by_default_and_processes_are_whole_replicas() -> None:
    for chosen, processes, partitions in ((None, None, 2), (None, 4, 4), (2, 4, 2), (3, None, 3)):
        assert TrainOptions(partitions=chosen).resolved(processes).partitions == partitions
    with pytest.raises(ValueError, match="--partitions: 6 processes are not divisible by 4 partitions"):
        TrainOptions(partitions=4).resolved(6)
    with pytest.raises(ValueError, match="--micro-batches: 8 micro-batches are not divisible by 3 replicas"):
        TrainOptions(partitions=2, micro_batches=8).resolved(6)
    with pytest.raises(ValueError, match="--partitions: 0 is out of range"):
        TrainOptions(partitions=0).resolved(6)


def test_progress_is_kept_whole_and_that_of_another_training_is_refused() -> None:
    progress = Progress([Epoch(1, 0.1 + 0.2, {"accuracy": 0.5}, 3.0)], [1 / 3], 2.0)
    assert from_extra(to_extra(progress, TrainOptions()), TrainOptions(partitions=5)) == progress
    extra = to_extra(progress, ImagesOptions(workers=0))
    with pytest.raises(ValueError, match="--filters: 16 differs from 32 in the checkpoint") as refusal:
        from_extra(extra, ImagesOptions(filters=16, epochs=3, classes=(), workers=2, out=Path("elsewhere")))
    assert len(str(refusal.value).splitlines()) == 2
