"""Sharded stages: weights under `fully_shard` are gathered from the replicas before use, and freed after it."""

from collections.abc import Iterable

from gpipe.stages.stage import Stage
from gpipe.stages.tree import is_sharded

NEEDS_PROCESSES = (
    'layers under fully_shard are gathered and freed by processes: make the pipe with driver="process" '
    "in each that a launcher starts (one will do: torchrun --nproc-per-node 1), or leave fully_shard out"
)


def any_sharded(stages: Iterable[Stage]) -> bool:
    """Whether `fully_shard` was applied to layers of these stages; it gives modules classes of its own."""
    return any(map(is_sharded, {type(module): module for stage in stages for module in stage.modules}.values()))


def reject_sharded(stages: Iterable[Stage]) -> None:
    """Rejects layers under `fully_shard`, which the ranks of one process do not gather or free."""
    if any_sharded(stages):
        raise ValueError(NEEDS_PROCESSES)
