"""Same bits over processes: K = 1, 2, 3, 4 of them leave the bits of the local run, and of the plain loop.

Losses, gradients of parameters and inputs, parameters after optimizer steps, buffers and outputs are compared as
digests. Every rank has those of its own parameters, and all ranks together those of the whole model.
"""

from typing import Any

import pytest

from gpipe.schedule.schedules import SCHEDULES
from tests.support.jobs import same_bits as jobs
from tests.support.jobs.same_bits import task_of
from tests.support.mixed_tasks import Task, is_statistic, run_pipe, run_plain, whole
from tests.support.placements import PLACEMENTS
from tests.support.processes.digests import Digests, digests, wrong
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.same_bits_stories import STORIES, maker, plain

WORLDS = [1, 2, 3, 4]
SEEDS = list(range(26))
ON_HOST = {"schedule": "breadth_first", "weights": "host"}
WAYS = [
    *((world, {}, 0.4) for world in WORLDS),
    *((2, {"placement": name, "each": 2}, 0.2) for name in PLACEMENTS),
    (3, {"placement": "v", "each": 2}, 0.2),
    *((world, {"schedule": name}, 0.2) for world in (2, 3) for name in SCHEDULES),
    *((world, {**ON_HOST, "remat": remat}, 0.2) for world, remat in ((2, "always"), (3, "offload_inputs"))),
    *((2, {"schedule": name, "remat": "offload"}, 0.2) for name in ("gpipe", "interleaved")),
]
"""How many processes do what, and of how many models at least: not every model can be cut so."""


@pytest.fixture(scope="module")
def tasks() -> list[tuple[Task, Digests, Digests]]:
    """Models, and what their local runs and the plain loop leave."""
    made = map(task_of, SEEDS)
    return [(task, digests(run_pipe(task, whole(task.model))), digests(run_plain(task))) for task in made]


@pytest.mark.parametrize(("world", "how", "least"), WAYS, ids=str)
def test_models_that_mix_everything(
    world: int, how: dict[str, Any], least: float, tasks: list[tuple[Task, Digests, Digests]], pool: WorkerPool
) -> None:
    some = SEEDS[world % 2 :: 2] if how else SEEDS
    given = [
        some,
        how.get("schedule", "gpipe"),
        how.get("placement", ""),
        how.get("each", 1),
        how.get("remat"),
        how.get("weights", "device"),
    ]
    outcomes = answers(pool.run(jobs.mixed, *given, world=world))
    found = [[own for own in model if own is not None] for model in zip(*outcomes, strict=True)]
    assert sum(map(bool, found)) > least * len(found)
    for ranks, seed in zip(found, some, strict=True):
        task, local, plain = tasks[SEEDS.index(seed)]
        if ranks:
            assert not wrong(ranks, local), f"unlike the local run: {task.model.kinds}"
            assert not wrong(ranks, plain, is_statistic(task)), f"unlike the plain loop: {task.model.kinds}"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", STORIES)
def test_a_script_gives_the_same_bits_however_many_processes_run_it(name: str, world: int, pool: WorkerPool) -> None:
    story = STORIES[name]
    found = answers(pool.run(jobs.tell, name, world=world))
    assert not wrong(found, digests(story.run(maker(1, driver="lockstep", remat="never"))))
    if story.plain:
        assert not wrong(found, digests(story.run(plain)))
