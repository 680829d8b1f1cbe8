"""What a pipe is made of, once the arguments are checked, the defaults filled in and the layers cut."""

from dataclasses import dataclass

import torch
from torch import nn

from gpipe.config.arguments import Arguments, Driver
from gpipe.config.check import check
from gpipe.config.weigh import weigh
from gpipe.distributed.mesh import Position
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Schedule
from gpipe.schedule.simulate import Prediction, predict
from gpipe.stages.outline import Outline
from gpipe.stages.shared_weights import Tied, tie
from gpipe.tracing.model import TracedModel


@dataclass(frozen=True)
class Settings:
    """What a pipe is made of, after all has been checked."""

    layers: dict[str, nn.Module]
    partition: Partition
    placement: tuple[int, ...]  # the rank of each stage
    stage_costs: tuple[StageCost, ...] | None  # measured, or as the plan has them; None: told by the partition alone
    in_seconds: bool  # they were measured
    stage_bytes: tuple[StageCost, ...] | None  # what stages hold, where that was counted
    unsplit: frozenset[int]  # the stages whose backwards are not split
    micro_batches: int
    remat: tuple[Remat, ...]
    devices: tuple[torch.device, ...]
    schedule: Schedule
    driver: Driver | None
    seed: int
    intra_op_threads: int
    deferred_batch_norm: bool
    sync_batch_norm: bool
    replayed: TracedModel | None = None  # if the layers are parts of a model
    tied: Tied = ()  # over processes: where identity cannot show it

    @property
    def layers_per_partition(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return self.partition.layers

    @property
    def costs(self) -> tuple[float, ...]:
        """What each layer costs."""
        return self.partition.chain.costs

    def foretell(self, program: Program) -> Prediction:
        """What a step by this table will be."""
        return predict(self.partition, program, self.stage_costs, in_seconds=self.in_seconds, held=self.stage_bytes)


def settle(
    asked: Arguments,
    position: Position | None = None,
    outline: Outline | None = None,
    replayed: TracedModel | None = None,
) -> Settings:
    """Checks all arguments, fills in the defaults and cuts the layers.

    With the outline of one of several processes, layers that are given as callables stay on the meta device.

    Args:
        asked: What the user gave.
        position: Where this process stands among several.
        outline: All layers, if there are several processes.
        replayed: The model, if it is one.

    Raises:
        ValueError: Lists every mistake, each with what to do.
    """
    checked = check(asked, position, outline, replayed)
    if position is None:
        tie(checked.tied)
    weighed, asked = weigh(checked, replayed), checked.asked
    return Settings(
        layers=checked.layers,
        partition=weighed.partition,
        placement=checked.placement,
        stage_costs=weighed.seconds,
        in_seconds=weighed.in_seconds,
        stage_bytes=weighed.bytes,
        unsplit=weighed.unsplit,
        micro_batches=asked.micro_batches,
        remat=weighed.remat,
        devices=checked.devices,
        schedule=checked.schedule,
        driver=asked.driver,  # type: ignore[arg-type]  # checked above
        seed=checked.seed,
        intra_op_threads=asked.intra_op_threads,
        deferred_batch_norm=asked.deferred_batch_norm,
        sync_batch_norm=asked.sync_batch_norm,
        replayed=replayed,
    )
