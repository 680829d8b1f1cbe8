"""Splits micro-batches along the sequence into slices, which run one after another and attend to earlier slices.

The keys and values of a slice are detached for later slices, like tensors at a stage boundary. Backward passes run in
reverse order, and accumulate the gradients of these detached tensors in `.grad`. The backward pass of a slice also
starts at the keys and values of the slice, with these gradients. A recomputation uses the same detached tensors as
its forward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.feature import Feature, Work
from gpipe.runtime.run import MicroBatchState, Rank, Run
from gpipe.schedule.action import Kind
from gpipe.schedule.rules import BACKWARDS
from gpipe.stages.boundary import BoundaryInput, Gradients
from gpipe.stages.stage import StageCall

Pair: TypeAlias = tuple[Tensor, ...]  # keys and values


@dataclass(slots=True)
class SliceKeys:
    """The keys and values of one slice at one stage, by the number of the block that computes them.

    Attributes:
        earlier: The earlier slices of the same micro-batch, in order.
        made: The keys and values that the last run has computed, with their graph.
        leaves: The same tensors, detached for later slices.
    """

    earlier: Sequence["SliceKeys"] = ()
    made: dict[int, Pair] = field(default_factory=dict)
    leaves: dict[int, Pair] = field(default_factory=dict)

    def add(self, block: int, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Pair:
        """Adds keys and values of this slice. Returns keys and values of all slices so far, like `Cache.update`."""
        values = values.to(
            torch.promote_types(keys.dtype, values.dtype)
        )  # like the cache of transformers under autocast
        self.made[block] = keys, values
        pairs = [*(slice_keys.leaves[block] for slice_keys in self.earlier), (keys, values)]
        return tuple(torch.cat(parts, dim=-2) for parts in zip(*pairs, strict=True))

    def earlier_leaves(self) -> list[Tensor]:
        """Returns the keys and values of earlier slices."""
        return [leaf for keys in self.earlier for pair in keys.leaves.values() for leaf in pair]

    def keep(self, *, drops_graph: bool = False) -> None:
        """Detaches the keys and values of this slice, for later slices."""
        self.leaves = {
            block: tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in pair)
            for block, pair in self.made.items()
        }
        if drops_graph:
            self.made = {}

    def take_gradients(self) -> tuple[list[Tensor], Gradients]:
        """Removes and returns keys and values that require gradients, and their gradients from later slices."""
        made, leaves = (list(chain.from_iterable(pairs.values())) for pairs in (self.made, self.leaves))
        kept = [(tensor, leaf.grad) for tensor, leaf in zip(made, leaves, strict=True) if tensor.requires_grad]
        self.made, self.leaves = {}, {}
        return [tensor for tensor, _ in kept], [gradient for _, gradient in kept]


class Slices(Feature):
    """Passes keys and values from each slice of a micro-batch to later slices, and their gradients back."""

    alters_layers = True

    def __init__(self) -> None:
        self._keys: dict[tuple[int, int], SliceKeys] = {}  # by stage and slice

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work |= {kind: partial(self._backward, work[kind]) for kind in BACKWARDS if kind in work}

    @contextmanager
    def around_layers(
        self, run: Run, rank: Rank, state: MicroBatchState, attached: Sequence[BoundaryInput], call: StageCall
    ) -> Iterator[None]:
        stage, m = state.stage_run.stage.index, state.micro_batch
        if (stage, m) in self._keys:  # This is a recomputation, which uses the same keys and values.
            call.keys = self._keys[stage, m]
            yield
            return
        first = m - m % run.slices
        call.keys = self._keys[stage, m] = SliceKeys([self._keys[stage, earlier] for earlier in range(first, m)])
        yield
        call.keys.keep(drops_graph=m in state.routes.micro_batches[Kind.RECOMPUTE])
        if not run.trains and m == first + run.slices - 1:
            for earlier in range(first, m + 1):
                del self._keys[stage, earlier]

    def earlier_leaves(self, stage: int, m: int) -> list[Tensor]:
        """Returns the keys and values of earlier slices to which slice `m` attends."""
        return self._keys[stage, m].earlier_leaves()

    def _backward(self, backward: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        """B or I: the backward pass also starts at the keys and values of the slice."""
        key = task.stage, task.micro_batch
        tensors, gradients = self._keys.pop(key).take_gradients()
        rank.states[key].roots += tensors
        rank.inbox.append(gradients)
        backward(run, rank, task)
