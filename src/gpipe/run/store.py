"""What a rank holds between actions; empty after every step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gpipe.run.boundary import Parcel
from gpipe.run.buffers import Snapshot
from gpipe.run.stage import Trace
from gpipe.run.transport import Label, Message


@dataclass(slots=True)
class Cell:
    """What a stage keeps of one micro-batch between its forward and its backward.

    With rematerialization `roots` is empty until the recompute: only what crossed the boundary is kept.
    """

    given: Parcel
    skips: Mapping[int, Parcel]  # by route number
    roots: dict[int | None, list[Tensor]] = field(default_factory=dict)  # by route number; None: loss or output
    snapshot: Snapshot | None = None
    trace: Trace = field(default_factory=Trace)


@dataclass
class Store:
    """Cells by (stage, micro-batch), and messages that arrived."""

    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)
    arrived: dict[Label, Message] = field(default_factory=dict)

    def clear(self) -> None:
        """Lets go of everything."""
        self.cells.clear()
        self.arrived.clear()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held, as it must be after a step."""
        return not (self.cells or self.arrived)
