"""How the table of a schedule becomes the program of a pipe, by its settings and the passes of `lower.py`."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gpipe.schedule import lower
from gpipe.schedule.action import Route
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Placement, Schedule, forward_only_table, table_in_training

if TYPE_CHECKING:
    from gpipe.stages.skips import Pop


class ProgramKey(NamedTuple):
    """What a program depends on besides the settings of the pipe.

    Attributes:
        micro_batches: Their number. Slices of micro-batches count as such.
        halved: Whether the loss is computed outside, between forwards and backwards.
        path: The path that a traced model takes.
        slices: The slices of each micro-batch.
    """

    micro_batches: int
    trains: bool
    halved: bool = False
    loss_pops: "tuple[Pop, ...]" = ()
    path: int = 0
    slices: int = 1


@dataclass(frozen=True)
class Lowering:
    """The settings by which a pipe makes its programs.

    Attributes:
        unsplit: The stages whose backward is not split.
        deferred_batch_norm: Whether statistics of BatchNorm are committed once a mini-batch.
    """

    placement: Placement
    schedule: Schedule
    remat: Sequence[lower.Remat]
    unsplit: Collection[int]
    deferred_batch_norm: bool

    def program(self, key: ProgramKey, skips: Iterable[Route]) -> Program:
        """Returns the program of a mini-batch within one replica."""
        count, slices = key.micro_batches, key.slices
        if key.trains:
            rows = table_in_training(self.schedule, self.placement, count, slices)
        else:
            rows = forward_only_table(self.placement, count, slices)
        program = Program.of(rows, count, rank_of=self.placement, skips=skips, slices=slices)
        program = lower.join_backwards(program, self.unsplit)
        program = lower.place_transfers(lower.place_remat(program, self.remat, halved=key.halved))
        return lower.place_commits(program, range(len(self.placement))) if self.deferred_batch_norm else program
