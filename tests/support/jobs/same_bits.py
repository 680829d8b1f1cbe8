"""Jobs of same bits: random models, and stories, through a pipe over processes; what they leave, as digests."""

from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.writing import loop
from tests.support import mixed_tasks
from tests.support.mixed_tasks import Task, generate_task, generate_way
from tests.support.placements import placed
from tests.support.plain_loop import REMATS, weights_of
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


def replicated(
    rank: int, world: int, partitions: int, weights: str, remat: str, batch_norm: str, steps: int = 4
) -> Digests:
    """Replicas of a pipe with a tied weight and BatchNorm train, each on its rows, with two steps per update."""
    with weights_of(7):
        layers: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(6)]
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).chunk(world // partitions)
    schedule, own = gpipe.BreadthFirst(8 // partitions), inputs[rank // partitions]
    options: dict[str, Any] = {"weights": weights, "remat": remat, "batch_norm": batch_norm, "driver": "process"}
    found: dict[str, Tensor | None] = {}
    with gpipe.GPipe([*layers, first, second], partitions, 4, schedule=schedule, seed=3, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for step in range(steps):
            found[f"{step} loss"] = pipe.step(own, own, mse_loss)
            if step % 2:
                found |= {f"{step} gradient {name}": p.grad for name, p in pipe.named_parameters()}
                optimizer.step()
                optimizer.zero_grad()
        found |= {name: tensor for name, tensor in pipe.state_dict().items() if not tensor.is_meta}
        return digests(found)


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
