"""Sharded stages: weights under `fully_shard` are gathered from the replicas before use, and freed after it."""

from collections.abc import Iterable

from torch import nn

from gpipe.stages.dtensor import is_sharded

NEEDS_PROCESSES = (
    'layers under fully_shard are gathered and freed by processes: make the pipe with driver="process" '
    "in each that a launcher starts (one will do: torchrun --nproc-per-node 1), or leave fully_shard out"
)


def any_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether `fully_shard` was applied to some of these modules; it gives them classes of its own."""
    return any(map(is_sharded, {type(module): module for module in modules}.values()))


def reject_sharded(modules: Iterable[nn.Module]) -> None:
    """Rejects modules under `fully_shard`, which the ranks of one process do not gather or free."""
    if any_sharded(modules):
        raise ValueError(NEEDS_PROCESSES)
