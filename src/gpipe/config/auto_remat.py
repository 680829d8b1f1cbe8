"""`remat="auto"`: recomputes only where, and for as many micro-batches as, memory demands."""

from collections.abc import Sequence

import torch
from torch import nn

from gpipe.config.arguments import Arguments, Mistakes
from gpipe.distributed.mesh import Position
from gpipe.planner.measure import memory_of
from gpipe.planner.profile import profile_layers
from gpipe.planner.search.fitting import fitting_remat
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program
from gpipe.stages.tree import Tree

AUTO = "auto"
NEEDS_SAMPLE = "remat='auto' needs sample=, an example mini-batch, to count what layers keep"
FOR_AUTO = "memory= is for remat='auto'; leave it out, or give remat='auto'"
NO_FIT = "remat='auto': {why}; take more partitions, more micro-batches, other cuts, or more memory="


def check_auto(asked: Arguments, ranks: int, mistakes: Mistakes) -> None:
    """Notes what `remat="auto"` lacks, and memory that is none or for nothing."""
    is_auto = asked.remat == AUTO
    mistakes.check(not is_auto or asked.sample is not None, NEEDS_SAMPLE)
    if asked.memory is None:
        return
    mistakes.check(is_auto, FOR_AUTO)
    each = list(asked.memory) if isinstance(asked.memory, Sequence) else [asked.memory]
    good = all(isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0 for one in each)
    mistakes.check(
        good and (not isinstance(asked.memory, Sequence) or not ranks or len(each) == ranks),
        f"memory={asked.memory!r}; give bytes, more than 0, one number or one for each of {ranks} partitions",
    )


def count_stages(layers: Sequence[nn.Module], sample: Tree, cuts: Partition) -> tuple[StageCost, ...]:
    """What the stages of layers that run one by one hold of such a micro-batch as the sample, in bytes."""
    as_it_is = 1  # micro-batch, whatever its rows
    profile = profile_layers(layers, {as_it_is: sample}, [""] * len(layers)).of_micro_batch(as_it_is)
    return tuple(profile.cost(first, end, speed=1.0) for first, end in cuts.bounds)


def find_remat(
    asked: Arguments, costs: Sequence[StageCost], program: Program, devices: Sequence[torch.device]
) -> tuple[Remat, ...]:
    """What each stage recomputes.

    Args:
        asked: What the user gave.
        costs: What the stages hold.
        program: The table of forwards and backwards.
        devices: Of the partitions.

    Raises:
        ValueError: They do not fit though everything is recomputed.
    """
    try:
        return fitting_remat(program, costs, _limits(asked, devices))
    except ValueError as error:
        raise ValueError(NO_FIT.format(why=error)) from None


def memory_by_row(position: Position, hosts: Sequence[str], memory: Sequence[float]) -> list[float]:
    """The bytes that a rank of each row may hold: the least of its replicas; processes of a host share its CPU's.

    Args:
        position: Of this process.
        hosts: Of each process of the world.
        memory: Of the device of each.
    """
    shared = position.device.type == "cpu"
    each = [own / (hosts.count(host) if shared else 1) for own, host in zip(memory, hosts, strict=True)]
    replicas = range(position.replicas)
    return [
        min(each[position.members[position.rank_of(row, replica)]] for replica in replicas)
        for row in range(position.rows)
    ]


def _limits(asked: Arguments, devices: Sequence[torch.device]) -> list[float]:
    if isinstance(asked.memory, Sequence):
        return list(asked.memory)
    if isinstance(asked.memory, (int, float)):
        return [asked.memory] * len(devices)
    return [memory_of(device) / list(devices).count(device) for device in devices]
