"""Models in slices of their sequences through a pipe over processes."""

from typing import Any

from tests.support.processes.digests import Digests, digests
from tests.support.sliced import batch_of, gradients_of, model_of, piped


def train(rank: int, world: int, name: str, partitions: int, how: dict[str, Any]) -> tuple[float, Digests]:
    """The loss of a step, and the gradients that a rank has."""
    rows = 5 if world == partitions else 4
    batch = batch_of(rows)
    if world > partitions:  # replicas, each of which is given its own rows
        half = rank // partitions
        batch = {key: value.tensor_split(world // partitions)[half] for key, value in batch.items()}
    with piped(model_of(name), partitions, 3, driver="process", **how) as pipe:
        loss = pipe.step(batch)
        return loss.item(), digests(gradients_of(pipe))
