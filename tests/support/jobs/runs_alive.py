"""A job in which several runs of pipes over processes are alive at once."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.processes.digests import Digests, digests
from tests.support.runs_alive import Story, pipes, state_of, tell


def told(
    rank: int, world: int, stories: Sequence[Story], replicas: int, remat: str
) -> list[tuple[list[list[float]], Digests]]:
    """What came of each story of two pipes, and what it left in this process."""
    ranks = world // replicas
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp"))
    found = []
    for story in stories:
        sides = pipes(ranks, driver="process", mesh=mesh, remat=remat)
        came = tell(story, sides)
        found.append(([tensor.double().flatten().tolist() for tensor in came], digests(state_of(sides))))
        for side in sides:
            side.pipe.close()
    torch.distributed.barrier()
    return found
