"""Jobs of same bits: random models, and stories, through a pipe over processes; what they leave, as digests."""

from contextlib import nullcontext
from dataclasses import replace
from random import Random

from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.writing import loop
from tests.support import mixed_tasks
from tests.support.mixed_tasks import Task, generate_task, generate_way
from tests.support.placements import placed
from tests.support.plain_loop import REMATS
from tests.support.processes.digests import Digests, digests, own_inputs
from tests.support.same_bits_stories import STORIES, maker


def task_of(seed: int) -> Task:
    return generate_task(Random(seed))


def mixed(
    rank: int,
    world: int,
    seeds: list[int],
    schedule: str = "gpipe",
    placement: str = "",
    each: int = 1,
    remat: str | None = None,
    weights: str = "device",
) -> list[Digests | None]:
    """Models cut into as many stages as there are places, if they can be; None of the others."""
    stages = world * max(each, SCHEDULES[schedule].stages_per_rank)
    found: list[Digests | None] = []
    for task in map(task_of, seeds):
        can = SCHEDULES[schedule].table(loop(world, stages // world), task.micro_batches)
        way = generate_way(Random(f"{task.seed} {world}"), task.model, stages)
        if way is None:
            found.append(None)
            continue
        way = replace(way, driver="process", weights=weights, schedule=schedule if can else "zb_v")
        way = replace(way, remat=(remat,) * stages) if remat else way
        with (
            placed(placement, each) if placement else nullcontext(),
            mixed_tasks.make(task.model, task, way) as pipe,
        ):
            found.append(digests(own_inputs(mixed_tasks.run(task, pipe), 0 if pipe.reads_inputs else rank or 1)))
    return found


def tell(rank: int, world: int, name: str) -> Digests:
    remat = [REMATS[(stage + len(name)) % len(REMATS)] for stage in range(world)]
    make, pipes = maker(world, driver="process", remat=remat), []

    def made(*given: object, **how: object) -> object:
        pipes.append(make(*given, **how))
        return pipes[-1]

    found = STORIES[name].run(made)
    for pipe in pipes:
        pipe.close()
    return digests(own_inputs(found, rank))
