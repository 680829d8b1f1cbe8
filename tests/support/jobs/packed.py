"""Packed sequences through a pipe over processes."""

from tests.support.packed import trained
from tests.support.processes.digests import Digests, digests


def train(rank: int, world: int, schedule: str) -> tuple[list[float], Digests]:
    """The losses, and the gradients that a rank has."""
    losses, gradients = trained(world, 2, driver="process", schedule=schedule)
    return [loss.item() for loss in losses], digests(gradients)
