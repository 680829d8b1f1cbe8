"""Builds the program of a pipe from its schedule, with the passes in `lower.py`."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gpipe.schedule import lower
from gpipe.schedule.action import Route
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Placement, Schedule, table_in_evaluation, table_in_training

if TYPE_CHECKING:
    from gpipe.stages.skips import Pop


class ProgramKey(NamedTuple):
    """The properties of a mini-batch that determine its program.

    Attributes:
        micro_batches: The number of micro-batches. With slices, the total number of slices.
        trains: Whether the program has backward passes.
        halved: Whether the loss is computed outside the pipe, between the forward and the backward passes.
        loss_pops: The skip connections that the loss pops.
        path: The control-flow path of a traced model.
        slices: The number of slices of each micro-batch.
    """

    micro_batches: int
    trains: bool
    halved: bool = False
    loss_pops: "tuple[Pop, ...]" = ()
    path: int = 0
    slices: int = 1


@dataclass(frozen=True)
class Lowering:
    """The settings from which a pipe builds its programs.

    Attributes:
        placement: The rank of each stage.
        schedule: The schedule.
        remat: The recomputation mode of each stage.
        unsplit: The stages whose backward is not split.
        deferred_batch_norm: Whether BatchNorm statistics are updated once per mini-batch.
    """

    placement: Placement
    schedule: Schedule
    remat: Sequence[lower.Remat]
    unsplit: Collection[int]
    deferred_batch_norm: bool

    def program(self, key: ProgramKey, skips: Iterable[Route]) -> Program:
        """Returns the program of a mini-batch in one replica."""
        count, slices = key.micro_batches, key.slices
        make_table = table_in_training if key.trains else table_in_evaluation
        rows = make_table(self.schedule, self.placement, count, slices)
        program = Program.of(rows, count, rank_of=self.placement, skips=skips, slices=slices)
        program = lower.join_backwards(program, self.unsplit)
        program = lower.place_transfers(lower.place_remat(program, self.remat, halved=key.halved))
        return lower.place_commits(program, range(len(self.placement))) if self.deferred_batch_norm else program
