"""What a rank holds between actions; empty after every step."""

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from gpipe.run.boundary import Parcel
from gpipe.run.buffers import Snapshot
from gpipe.run.stage import Trace


@dataclass(slots=True)
class Cell:
    """What a stage keeps of one micro-batch between its forward and its backward.

    `given` is what came by each wire into the stage; `roots`, for each wire out of it (at the last stage, for the
    loss or the output), the tensors of the graph whose gradients will come back. With rematerialization `roots` is
    empty until the recompute: only what crossed the boundary is kept.
    """

    given: list[Parcel]
    roots: list[list[Tensor]] = field(default_factory=list)
    snapshot: Snapshot | None = None
    trace: Trace = field(default_factory=Trace)
    sums: list[float] = field(default_factory=list)  # of what the forward made: the recompute must make the same


Store: TypeAlias = dict[tuple[int, int], Cell]
"""Cells by (stage, micro-batch)."""
