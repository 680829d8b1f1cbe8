"""Jobs of same bits: random models, and stories, through a pipe over processes; what they leave, as digests."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.writing import loop
from tests.support import mixed_tasks
from tests.support.addresses import twins
from tests.support.mixed_tasks import Task, generate_task, generate_way
from tests.support.outcomes import Outcome, train_twice
from tests.support.placements import placed
from tests.support.plain_loop import REMATS, Tree, plain_loop, plain_outputs
from tests.support.processes.digests import Digests, digests, own_inputs
from tests.support.random_cases import Case, random_case, run, run_plain
from tests.support.same_bits_stories import MICRO_BATCHES, SEED, STORIES

# Random models.


def task_of(seed: int) -> Task:
    return generate_task(Random(seed))


def mixed(rank: int, world: int, seeds: list[int]) -> list[Digests | None]:
    """Models of `tests.support.mixed_tasks` cut into as many partitions as there are ranks, if they can be."""
    return [run_task(task_of(seed), Random(f"{seed} {world}"), rank, world) for seed in seeds]


def scheduled_mixed(rank: int, world: int, seeds: list[int], name: str) -> list[Digests | None]:
    """Likewise, by a schedule of that name."""
    stages = world * SCHEDULES[name].stages_per_rank
    found = []
    for task in map(task_of, seeds):
        name = name if SCHEDULES[name].rows(loop(world, stages // world), task.micro_batches) else "zb_v"
        found.append(run_task(task, Random(f"{task.seed} {world}"), rank, stages, schedule=name))
    return found


def run_task(task: Task, draw: Random, rank: int, stages: int, schedule: str = "gpipe") -> Digests | None:
    way = generate_way(draw, task.model, stages)
    if way is None:
        return None
    with mixed_tasks.make(task.model, task, replace(way, driver="process", schedule=schedule)) as pipe:
        return digests(own_inputs(mixed_tasks.run(task, pipe), 0 if pipe.reads_inputs else rank or 1))


def placed_mixed(rank: int, world: int, seeds: list[int], name: str, each: int) -> list[Digests | None]:
    """Likewise, with several stages on each rank."""
    with placed(name, each):
        return [run_task(task_of(seed), Random(f"{seed} {world}"), rank, world * each) for seed in seeds]


def case_of(seed: int) -> Case:
    return random_case(Random(seed))


def various(rank: int, world: int, seeds: list[int]) -> list[Digests | None]:
    """Models of `tests.support.random_cases`, likewise."""
    return [run_case(case_of(seed), Random(f"{seed} {world}"), rank, world) for seed in seeds]


def run_case(case: Case, draw: Random, rank: int, world: int) -> Digests | None:
    if len(case.layers) < world:
        return None
    remat = tuple(draw.choice(REMATS) for _ in range(world))
    with replace(case, partitions=world, remat=remat, driver="process").pipe() as pipe:

        def train(inputs: Tree, step: int) -> Tensor:
            return run(case, pipe, inputs, step)

        found = train_twice(pipe, case.inputs, train, lambda x: pipe(x, gather=True), adds=case.adds)
    return digests(own_inputs(found, rank))


def plain_case(case: Case) -> Outcome:
    """What the plain loop leaves."""
    layers = twins(case.layers)

    def train(inputs: Tree, step: int) -> Tensor:
        return run_plain(case, layers, inputs, step)

    def evaluate(inputs: Tree) -> Tree:
        return plain_outputs(layers, inputs, micro_batches=case.micro_batches, seed=case.seed, step=2)

    return train_twice(nn.Sequential(*layers), case.inputs, train, evaluate, adds=case.adds)


# Stories.


def tell(rank: int, world: int, name: str) -> Digests:
    """A story, through a pipe over all ranks."""
    remat = [REMATS[(stage + len(name)) % len(REMATS)] for stage in range(world)]
    pipes = []

    def make(layers: Any, **how: Any) -> gpipe.GPipe:
        pipes.append(gpipe.GPipe(layers, world, MICRO_BATCHES, seed=SEED, remat=remat, driver="process", **how))
        return pipes[-1]

    found = STORIES[name].run(make)
    for pipe in pipes:
        pipe.close()
    return digests(own_inputs(found, rank))


def locally(layers: Any, **how: Any) -> gpipe.GPipe:
    """A pipe of one partition in this process."""
    return gpipe.GPipe(layers, 1, MICRO_BATCHES, seed=SEED, remat="never", driver="lockstep", **how)


class Plain(nn.Sequential):
    """The plain loop as a pipe, as far as it goes."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(*layers)
        self.step_number = 0

    def step(self, inputs: Tree, targets: Tree, loss_fn: Callable[..., Tensor], **how: Any) -> Tensor:
        return self._counted(plain_loop(list(self), inputs, targets, loss_fn, **self._keys(), **how))

    def forward(self, inputs: Tree, *, gather: bool) -> Any:  # type: ignore[override]  # it is no Sequential to others
        assert not torch.is_grad_enabled()
        return self._counted(plain_outputs(list(self), inputs, **self._keys()))

    def _keys(self) -> dict[str, Any]:
        return {"micro_batches": MICRO_BATCHES, "seed": SEED, "step": self.step_number}

    def _counted(self, made: Any) -> Any:
        self.step_number += self.training
        return made
