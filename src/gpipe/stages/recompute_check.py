"""Compares a recompute with its forward: the bits that a stage made, and the leaves that its backward would reach."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gpipe.stages.boundary import BoundaryValue, leaves_of
from gpipe.stages.digest import Digest, differ, digest
from gpipe.stages.stage import Stage, StageOutput
from gpipe.stages.tree import tensors_in

OTHERWISE = (
    "a recompute gave other values than its forward, and the gradients would be wrong: {layer} depends on what no "
    "key reaches (numpy's or Python's random, a count of its own, the time, what another layer has left somewhere); "
    "draw by torch's functions, keep what changes in buffers, stash and pop what layers leave for each other, or use "
    "remat='never' for this partition"
)
LEFT = (
    "perhaps it reads a tensor that was left on a module ({left}), which is by now that of another micro-batch: have "
    "the layer that makes it stash it, and pop it where it is used"
)


class RecomputeError(RuntimeError):
    """A recompute gave other values than its forward."""


class Fingerprint(NamedTuple):
    """What a run of a stage made, and what a backward would reach of its weights and of what it was given."""

    digest: Digest
    reached: frozenset[int]

    @classmethod
    def of(cls, made: StageOutput, stage: Stage, given: Sequence[BoundaryValue]) -> "Fingerprint":
        """The fingerprint of what a stage made of what it was given."""
        roots = [tensor for value in made.values for tensor in tensors_in(value)]
        own = stage.parameter_ids() | {id(leaf) for crossing in given for leaf in crossing.leaves}
        reached = own.intersection(map(id, leaves_of(roots)))
        return cls(digest([*made.values, *made.for_loss.values()]), frozenset(reached))

    def differs(self, other: "Fingerprint") -> "bool | Tensor":
        """Whether another run has another fingerprint; of values on a GPU, a tensor there that will say it."""
        return self.reached != other.reached or differ(self.digest, other.digest)


def recompute_error(layer: str, left: str = "") -> RecomputeError:
    """The error of a recompute that did otherwise; `left` are tensors that layers left on modules."""
    error = RecomputeError(OTHERWISE.format(layer=layer))
    if left:
        error.add_note(LEFT.format(left=left))
    return error
