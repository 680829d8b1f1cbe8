"""What is held while a mini-batch is under way: by all ranks of a process, and by each between its steps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from gpipe.runtime.split_backward import Deferred
from gpipe.stages.boundary import BoundaryValue, Gradients, detached
from gpipe.stages.buffers import SavedBuffers
from gpipe.stages.recompute_check import Fingerprint
from gpipe.stages.skips import Pop
from gpipe.stages.stage import LayerProgress
from gpipe.stages.tree import Tree, tensors_in


@dataclass(frozen=True, slots=True)
class Output:
    """What the last stage made of a micro-batch, cut from its graph; `wants_gradient` says it of each tensor."""

    value: Tree
    wants_gradient: tuple[bool, ...]

    @classmethod
    def of(cls, value: Tree) -> "Output":
        """Cuts a value from its graph."""
        wants = tuple(tensor.requires_grad for tensor in tensors_in(value))
        return cls(detached(value), wants)


@dataclass
class MiniBatch:
    """One mini-batch, as all ranks of a process share it.

    `inputs` are taken by the first stage. The last stage fills `outputs`, or, with a loss function, `losses` and
    `metrics`. `seeds[m]` is the gradient of micro-batch m's loss, None if it has no say; `output_gradients[m]` is
    what comes back to the tensors of `outputs[m]` that want one, when the loss is computed outside; then the first
    stage fills `input_gradients`. `first` counts the micro-batches of earlier replicas, so that each draws its own.
    """

    inputs: Sequence[BoundaryValue]
    seed: int
    step: int
    trains: bool
    first: int = 0
    path: int = 0  # of a model that is replayed
    deferred_batch_norm: bool = False
    around_layers: Callable[[], AbstractContextManager[object]] | None = None
    loss_fn: Callable[[Tree, Tree], object] | None = None
    loss_index: int = 0  # the loss is keyed as the layer behind the last
    loss_pops: Sequence[Pop] = ()
    targets: Sequence[Tree] = ()
    seeds: Sequence[float | None] = ()
    outputs: dict[int, Output] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, object] = field(default_factory=dict)
    output_gradients: Sequence[Gradients] = ()
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    examines: bool = False
    findings: list[str] = field(default_factory=list)  # what is to be told, where it `examines`
    tell: Callable[[Sequence[str]], object] = len  # tells it: the backward of a call comes when it comes


@dataclass(slots=True)
class Saved:
    """What a stage keeps of one micro-batch between its forward and its backward.

    `given` is what came by each connection into the stage, `gradients` where those of its leaves will be; `roots`,
    for each connection out of the stage (at the last one, for the loss or the output), the tensors of the graph
    whose gradients will come back. With rematerialization both are of the recompute: until then only `given` is
    kept. Between the parts of a backward in two only `owed` is kept, what the second needs.
    """

    given: list[BoundaryValue]
    gradients: list[Gradients] = field(default_factory=list)
    roots: list[list[Tensor]] = field(default_factory=list)
    owed: Deferred | None = None
    snapshot: SavedBuffers | None = None
    progress: LayerProgress = field(default_factory=LayerProgress)
    fingerprint: Fingerprint | None = None  # of the forward: the recompute must have the same
