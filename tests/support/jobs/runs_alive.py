"""A job in which several runs of pipes over processes are alive at once."""

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.processes.digests import Digests, digests
from tests.support.runs_alive import TARGET, Story, data, embedding, gradient_of, pipes, state_of, tell


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


def behind_layers(rank: int, world: int) -> list[float]:
    """The gradient that a plain layer before a pipe gets in this process."""
    (side, _), before = pipes(world, driver="process"), embedding()
    (side.call(before(data(0))) - TARGET).square().mean().backward()
    side.pipe.close()
    return [number for parameter in before.parameters() for number in gradient_of(parameter)]


def other_inputs(rank: int, world: int) -> list[float]:
    """A call whose inputs have a graph of another shape on the last rank; then one that is as it should be."""
    side, _ = pipes(world, driver="process")
    rows = data(0)[: 8 if rank < world - 1 else 6].clone().requires_grad_()
    with pytest.raises(ValueError, match="inputs of rank 1 that require a gradient have the shapes"):
        side.call(rows)
    found: list[float] = side.call(data(0)).flatten().tolist()
    side.pipe.close()
    return found
