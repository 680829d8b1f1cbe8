"""Same bits over processes: K = 1, 2, 3, 4 of them leave the bits of the local run, and of the plain loop.

Losses, gradients of parameters and inputs, parameters after optimizer steps, buffers and outputs are compared as
digests. Every rank has those of its own parameters, and all ranks together those of the whole model.
"""

from collections.abc import Callable, Sequence

import pytest

from gpipe.schedule.schedules import SCHEDULES
from tests.support.jobs import same_bits as jobs
from tests.support.jobs.same_bits import Plain, case_of, locally, plain_case, task_of
from tests.support.mixed_tasks import Task, is_statistic, run_pipe, run_plain, whole
from tests.support.processes.digests import Digests, digests
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.same_bits_stories import STORIES

WORLDS = [1, 2, 3, 4]
MIXED, VARIOUS = list(range(26)), list(range(100, 130))
CAN_BE_CUT = 0.4  # of the generated models at least


def wrong(found: Sequence[Digests], expected: Digests, leave_out: Callable[[str], bool] = lambda name: False) -> str:
    """What differs on which rank, and what no rank has."""
    said = [
        f"{name} on rank {rank} is {digest}, not {expected.get(name)}"
        for rank, own in enumerate(found)
        for name, digest in own.items()
        if not leave_out(name) and expected.get(name) != digest
    ]
    missing = expected.keys() - {name for own in found for name in own}
    return "\n".join([*said, *(f"no rank has {name}" for name in sorted(missing))])


def by_model(outcomes: list[list[Digests | None]]) -> list[list[Digests]]:
    """What all ranks have of each model; nothing of those that cannot be cut."""
    return [[own for own in model if own is not None] for model in zip(*outcomes, strict=True)]


@pytest.fixture(scope="module")
def mixed() -> list[tuple[Task, Digests, Digests]]:
    """Models, and what their local runs and the plain loop leave."""
    found = []
    for seed in MIXED:
        task = task_of(seed)
        local = run_pipe(task, whole(task.model))
        found.append((task, digests(local), digests(run_plain(task))))
    return found


@pytest.fixture(scope="module")
def various() -> list[Digests]:
    return [digests(plain_case(case_of(seed))) for seed in VARIOUS]


@pytest.mark.parametrize("world", WORLDS)
def test_models_that_mix_everything(world: int, mixed: list[tuple[Task, Digests, Digests]], pool: WorkerPool) -> None:
    found = by_model(answers(pool.run(jobs.mixed, MIXED, world=world)))
    assert sum(map(bool, found)) > CAN_BE_CUT * len(found)
    for ranks, (task, local, plain) in zip(found, mixed, strict=True):
        if ranks:
            assert not wrong(ranks, local), f"unlike the local run: {task.model.kinds}"
            assert not wrong(ranks, plain, is_statistic(task)), f"unlike the plain loop: {task.model.kinds}"


@pytest.mark.parametrize(("world", "name", "each"), [(2, "loop", 2), (2, "v", 2), (2, "backwards", 2), (3, "v", 2)])
def test_several_stages_on_each_rank(
    world: int, name: str, each: int, mixed: list[tuple[Task, Digests, Digests]], pool: WorkerPool
) -> None:
    found = by_model(answers(pool.run(jobs.placed_mixed, MIXED, name, each, world=world)))
    assert sum(map(bool, found)) > CAN_BE_CUT / 2 * len(found)
    for ranks, (task, local, plain) in zip(found, mixed, strict=True):
        if ranks:
            assert not wrong(ranks, local), f"unlike the local run: {task.model.kinds}"
            assert not wrong(ranks, plain, is_statistic(task)), f"unlike the plain loop: {task.model.kinds}"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("world", [2, 3])
def test_every_schedule(name: str, world: int, mixed: list[tuple[Task, Digests, Digests]], pool: WorkerPool) -> None:
    some = MIXED[world - 2 :: 2]
    found = by_model(answers(pool.run(jobs.scheduled_mixed, some, name, world=world)))
    assert sum(map(bool, found)) > CAN_BE_CUT / 2 * len(found)
    for ranks, seed in zip(found, some, strict=True):
        task, local, plain = mixed[MIXED.index(seed)]
        if ranks:
            assert not wrong(ranks, local), f"unlike the local run: {task.model.kinds}"
            assert not wrong(ranks, plain, is_statistic(task)), f"unlike the plain loop: {task.model.kinds}"


@pytest.mark.parametrize("world", WORLDS)
def test_models_run_in_any_way(world: int, various: list[Digests], pool: WorkerPool) -> None:
    found = by_model(answers(pool.run(jobs.various, VARIOUS, world=world)))
    assert sum(map(bool, found)) > CAN_BE_CUT * len(found)
    for seed, ranks, plain in zip(VARIOUS, found, various, strict=True):
        assert not ranks or not wrong(ranks, plain), f"seed {seed}"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", STORIES)
def test_one_script_gives_the_same_bits_however_many_processes_run_it(
    name: str, world: int, pool: WorkerPool
) -> None:
    story = STORIES[name]
    found = answers(pool.run(jobs.tell, name, world=world))
    assert not wrong(found, digests(story.run(locally)))
    if story.plain:
        assert not wrong(found, digests(story.run(lambda layers, **how: Plain(layers))))
