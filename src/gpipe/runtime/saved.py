"""What a rank holds between actions; empty after every step."""

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from gpipe.layers.buffers import SavedBuffers
from gpipe.layers.recompute_check import Fingerprint
from gpipe.layers.stage import LayerProgress
from gpipe.values.boundary import BoundaryValue, Gradients


@dataclass(slots=True)
class Saved:
    """What a stage keeps of one micro-batch between its forward and its backward.

    `given` is what came by each wire into the stage, `gradients` where those of its leaves will be; `roots`, for each
    wire out of the stage (at the last one, for the loss or the output), the tensors of the graph whose gradients will
    come back. With rematerialization the last two are of the recompute: only what crossed the boundary is kept.
    """

    given: list[BoundaryValue]
    gradients: list[Gradients] = field(default_factory=list)
    roots: list[list[Tensor]] = field(default_factory=list)
    snapshot: SavedBuffers | None = None
    progress: LayerProgress = field(default_factory=LayerProgress)
    fingerprint: Fingerprint | None = None  # of the forward: the recompute must have the same


Store: TypeAlias = dict[tuple[int, int], Saved]
"""What is saved by (stage, micro-batch)."""
