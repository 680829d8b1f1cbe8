"""Finds layers under `fully_shard`, and rejects them in pipes of one process."""

from collections.abc import Iterable

from torch import nn

from gpipe.stages.dtensor import is_sharded

NEEDS_PROCESSES = (
    "fully_shard: it was applied to layers of a pipe that runs in one process, without driver='process'. Start the "
    "script with a launcher (torchrun --nproc-per-node 1 is enough) and pass driver='process'. Or remove it. "
    "[fully-shard-in-one-process]"
)


def any_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether `fully_shard` was applied to any of these modules. It changes their class."""
    return any(map(is_sharded, {type(module): module for module in modules}.values()))


def reject_sharded(modules: Iterable[nn.Module]) -> None:
    """Raises an error if `fully_shard` was applied to any of these modules."""
    if any_sharded(modules):
        raise ValueError(NEEDS_PROCESSES)
