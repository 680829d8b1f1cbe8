"""Checks ranks in processes with one simulated device each: identical to one process, and no reports.

    python -m tests.accelerator.processes

Tensors are sent through host memory, as on any device without NCCL. `matrix.py` checks a single process.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import gpipe
from gpipe.schedule.action import SHARDS
from gpipe.schedule.schedules import SCHEDULES
from gpipe.stages.dtensor import is_distributed_over, local_tensor
from tests.accelerator import NAME
from tests.accelerator.mutations import leave_out
from tests.accelerator.placing import CPU, FIRST, SIMULATOR, moved, on_cpu, placed
from tests.support import mixed_tasks, runs_alive
from tests.support.jobs.same_bits import task_of
from tests.support.mixed_tasks import Task, generate_way, whole
from tests.support.outcomes import Outcome
from tests.support.plain_loop import REMATS, weights_of
from tests.support.processes.digests import Digests, digests, own_inputs, wrong
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.same_bits_stories import STORIES, maker

WORLDS = (1, 2, 3, 4)
SEEDS = range(0, 26, 2)
WIDTH = 8
Told: TypeAlias = tuple[list[Digests], list[str]]
"""What a rank has, run by run, and what was reported in it."""


# In a rank.


def do(rank: int, world: int, job: str, without: str, *given: Any) -> Told:
    """A job on this rank's device; gpipe may be without one of its orders."""
    if without:
        leave_out(without)
    SIMULATOR.take_reports()
    found = JOBS[job](rank, world, *given)
    torch.accelerator.synchronize()
    return found, SIMULATOR.take_reports()


def mesh_of(world: int, replicas: int = 1) -> DeviceMesh:
    return DeviceMesh(NAME, torch.arange(world).reshape(replicas, -1), mesh_dim_names=("dp", "pp"))


def stories(rank: int, world: int, names: Sequence[str]) -> list[Digests]:
    found = []
    for name in names:
        remat = [REMATS[(stage + len(name)) % len(REMATS)] for stage in range(world)]
        make, pipes = maker(world, driver="process", remat=remat, mesh=mesh_of(world)), list[gpipe.GPipe]()

        def made(*layers: Any, make: Callable[..., Any] = make, pipes: Any = pipes, **how: Any) -> gpipe.GPipe:
            pipes.append(gives_to_cpu(make(*layers, **how)))
            return pipes[-1]

        found.append(digests(own_inputs(on_cpu(STORIES[name].run(made)), rank)))
        for pipe in pipes:
            assert pipe.devices[rank] == torch.device(NAME, rank)
            pipe.close()
    return found


def gives_to_cpu(pipe: gpipe.GPipe) -> gpipe.GPipe:
    """A pipe of which a story may compare outputs with targets on the CPU."""
    pipe.register_forward_hook(lambda _, inputs, output: output.cpu())
    return pipe


def mixed(rank: int, world: int, schedule: str) -> list[Digests]:
    """Drawn models, in a schedule, that can be cut into so many stages."""
    found: list[Digests] = []
    for task in map(task_of, SEEDS):
        way = generate_way(Random(task.seed), task.model, world * SCHEDULES[schedule].stages_per_rank)
        if way is None or (schedule == "dualpipe_v" and task.micro_batches < 2 * world):
            found.append({})
            continue
        way = replace(way, driver="process", schedule=schedule)
        with mixed_tasks.make(task.model, task, way, mesh=mesh_of(world)) as pipe:
            found.append(
                digests(
                    own_inputs(on_cpu(mixed_tasks.run(placed(task, CPU, CPU), pipe)), 0 if pipe.reads_inputs else 1)
                )
            )
    return found


def replicas(rank: int, world: int, story: runs_alive.Story, deferred: bool) -> list[Digests]:
    """Two replicas in which several runs are alive at once."""
    sides = runs_alive.pipes(
        world // 2,
        driver="process",
        mesh=mesh_of(world, 2),
        batch_norm="deferred" if deferred else "micro",
        schedule="1f1b",
    )
    for side in sides:
        side.device = torch.device(NAME, rank)
    came = runs_alive.tell(story, sides)
    found = digests(on_cpu(runs_alive.state_of(sides) | numbered(came)))
    for side in sides:
        side.pipe.close()
    return [found]


def numbered(came: Sequence[Tensor]) -> Outcome:
    return {f"{at} of the story": tensor for at, tensor in enumerate(came)}


def sharded(rank: int, world: int, schedule: str, remat: str) -> list[Digests]:
    """What two replicas have where they hold all weights, and where each has shards of some."""
    torch.accelerator.set_device_index(rank)  # where `fully_shard` takes shards to be
    mesh, replica, found = mesh_of(world, 2), rank // (world // 2), list[Digests]()
    device, generator = torch.device(NAME, rank), torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, WIDTH, generator=generator).chunk(2)[replica].to(device) for _ in range(2))

    def part_of(tensor: Tensor) -> Tensor:
        return local_tensor(tensor) if is_distributed_over(tensor, "dp") else tensor.chunk(2)[replica]

    for spread in (False, True):
        with weights_of(1):
            layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        state: Outcome = {}
        with gpipe.GPipe(layers, world // 2, 3, seed=0, mesh=mesh, schedule=schedule, remat=remat) as pipe:
            for name, layer in pipe.named_children():
                if spread and name != "0":
                    fully_shard(layer, mesh=mesh["dp"])
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, foreach=False)
            for step in range(2):
                state[f"{step} loss"] = pipe.step(x, y, F.mse_loss)
                output = pipe(x, gather=True)
                F.mse_loss(output, y.to(output.device)).backward()
                for name, parameter in pipe.named_parameters():
                    assert parameter.grad is not None
                    state[f"{step} gradient {name}"] = part_of(parameter.grad).clone()
                optimizer.step()
                optimizer.zero_grad()
            state |= {name: part_of(parameter.detach()) for name, parameter in pipe.named_parameters()}
            assert any(action.kind in SHARDS for action in pipe.program.actions) == spread
        found.append(digests(on_cpu(state)))
    return found


JOBS: dict[str, Callable[..., list[Digests]]] = {
    "stories": stories,
    "mixed": mixed,
    "replicas": replicas,
    "sharded": sharded,
}

# In the process that asks them.

STORY: runs_alive.Story = [("step", 0), ("call", 0), ("call", 1), ("step", 1), ("backward", 0), ("backward", 0)]
EVALUATED: runs_alive.Story = [*STORY, ("evaluate", 0), ("chain", 0), ("score", 1), ("backward", 0)]


def plain_replica(replica: int, replicas: int) -> list[runs_alive.Plain]:
    sides = runs_alive.plain(replica, replicas)
    for side in sides:
        moved([side.module], FIRST)
        side.device = FIRST
    return sides


def never(name: str) -> bool:
    return False


def is_statistic(name: str) -> bool:
    return "running_" in name or "num_batches" in name


class Ranks:
    """Asks processes, and notes what they have that they should not have."""

    def __init__(self, pool: WorkerPool, worlds: Sequence[int], without: str) -> None:
        self.pool, self.worlds, self.without = pool, worlds, without
        self.found = Counter[str]()

    def ask(self, world: int, job: str, *given: Any) -> list[list[Digests]]:
        """What each rank has, run by run."""
        told: list[Told] = answers(self.pool.run(f"{__spec__.name}:do", job, self.without, *given, world=world))
        for rank, (_, reports) in enumerate(told):
            if reports:
                self.found["reported"] += 1
                first, *lines = reports[0].splitlines()
                print(f"reported: {first}: rank {rank} of {world}, {job} {given}", *lines, sep="\n")
        return [found for found, _ in told]

    def compare(
        self, what: str, ranks: Sequence[Digests], expected: Digests, leave_out: Callable[[str], bool] = never
    ) -> None:
        said = wrong(ranks, expected, leave_out)
        self.found["differs" if said else "equal"] += 1
        if said:
            print(f"differs: {what}: {said}")


def try_stories(ranks: Ranks) -> None:
    make = maker(1, driver="lockstep", remat="never", devices=FIRST)

    def one(*layers: Any, **how: Any) -> gpipe.GPipe:
        return gives_to_cpu(make(*layers, **how))

    expected = {name: digests(on_cpu(story.run(one))) for name, story in STORIES.items()}
    for world in ranks.worlds:
        for name, *found in zip(STORIES, *ranks.ask(world, "stories", [*STORIES]), strict=True):
            ranks.compare(f"{name} in {world} processes", found, expected[name])


def try_schedules(ranks: Ranks) -> None:
    one = {seed: digests(on_cpu(run_alone(task_of(seed)))) for seed in SEEDS}
    asked = {1: ["gpipe"], 2: [*SCHEDULES], 3: ["1f1b"], 4: ["zb_h1"]}
    for world, schedule in ((count, name) for count in ranks.worlds for name in asked[count]):
        for seed, *found in zip(SEEDS, *ranks.ask(world, "mixed", schedule), strict=True):
            if any(found):
                ranks.compare(f"{seed} by {schedule} in {world} processes", found, one[seed])


def run_alone(task: Task) -> Outcome:
    with mixed_tasks.make(mixed_tasks.twin(task.model), task, whole(task.model), devices=[FIRST]) as pipe:
        return mixed_tasks.run(placed(task, CPU, CPU), pipe)


def try_replicas(ranks: Ranks) -> None:
    for world, deferred in product([world for world in ranks.worlds if world % 2 == 0], (True, False)):
        story = STORY if deferred else EVALUATED
        found = [own for (own,) in ranks.ask(world, "replicas", story, deferred)]
        own = [found[: world // 2], found[world // 2 :]]
        for replica, (came, state) in enumerate(runs_alive.tell_replicas(story, 2, plain_replica)):
            expected = digests(on_cpu(state | numbered(came)))
            what = f"replica {replica} of two, in {world} processes, {deferred=}"
            ranks.compare(what, own[replica], expected, is_statistic if deferred else never)
        if deferred:  # the plain loop has no such statistics, which are the same in both replicas
            ranks.compare(
                "statistics of the other replica",
                own[1],
                dict(kv for one in own[0] for kv in one.items()),
                lambda name: not is_statistic(name),
            )


def try_sharded(ranks: Ranks) -> None:
    for world, (schedule, remat) in product(
        [world for world in ranks.worlds if world % 2 == 0],
        [("gpipe", "always"), ("1f1b", "never"), ("zb_h1", "offload")],
    ):
        for rank, (plain, own) in enumerate(ranks.ask(world, "sharded", schedule, remat)):
            ranks.compare(f"sharded rank {rank} of {world}, {schedule}, remat {remat}", [own], plain)


PARTS = {"replicas": try_replicas, "sharded": try_sharded, "stories": try_stories, "schedules": try_schedules}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="all, if none is named")
    parser.add_argument("--world", type=int, choices=WORLDS, action="append", help="how many processes; likewise")
    parser.add_argument("--without", default="", help="PATH:LINE:COLUMN of an order of gpipe's that ranks leave out")
    asked = parser.parse_args()
    with WorkerPool(max(asked.world or WORLDS)) as pool:
        ranks = Ranks(pool, asked.world or WORLDS, asked.without)
        for name in asked.part or PARTS:
            PARTS[name](ranks)
    print(dict(ranks.found))
    raise SystemExit(set(ranks.found) != {"equal"})


if __name__ == "__main__":
    main()
