"""The keys and values of a sequence that is run in slices, one after another through the same stage.

A slice attends to what the slices before it have made. Their keys and values are leaves to it, cut from the graphs
that made them, as what crosses a boundary between stages is; autograd adds to `.grad` of these in the backwards of
later slices, the last first, and the backward of a slice begins also at the keys and values that it made itself, with
the sums. A recompute attends to the same leaves as the forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpipe.stages.boundary import Gradients

Pair: TypeAlias = tuple[Tensor, ...]  # keys and values


@dataclass(slots=True)
class SliceKeys:
    """The keys and values of one slice at one stage, by the number of the block that makes them."""

    earlier: Sequence["SliceKeys"] = ()  # of the slices before, in order
    made: dict[int, Pair] = field(default_factory=dict)  # by the last run, with its graph
    leaves: dict[int, Pair] = field(default_factory=dict)  # the same, for the slices behind

    def add(self, block: int, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Pair:
        """Takes those of this slice; gives those of all up to it, as `update` of a layer of a cache does."""
        values = values.to(torch.promote_types(keys.dtype, values.dtype))  # as in transformers' cache, under autocast
        self.made[block] = keys, values
        each = [*(one.leaves[block] for one in self.earlier), (keys, values)]
        return tuple(torch.cat(parts, dim=-2) for parts in zip(*each, strict=True))

    def earlier_leaves(self) -> list[Tensor]:
        """What the slices before have made, as this one attends to it."""
        return [leaf for one in self.earlier for pair in one.leaves.values() for leaf in pair]

    def keep(self, *, again: bool = False) -> None:
        """Cuts what was made off its graph, for the slices behind; lets go of the graph if it will be made again."""
        self.leaves = {
            block: tuple(one.detach().requires_grad_(one.requires_grad) for one in pair)
            for block, pair in self.made.items()
        }
        if again:
            self.made = {}

    def take_gradients(self) -> tuple[list[Tensor], Gradients]:
        """What was made that wants a gradient, and what came back to each from the slices behind."""
        made, leaves = (list(chain.from_iterable(some.values())) for some in (self.made, self.leaves))
        pairs = [(one, leaf.grad) for one, leaf in zip(made, leaves, strict=True) if one.requires_grad]
        self.made, self.leaves = {}, {}
        return [one for one, _ in pairs], [gradient for _, gradient in pairs]
