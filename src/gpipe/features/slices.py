"""Slices of a sequence, which run one after another through the same stage and attend to earlier slices.

The keys and values of earlier slices are leaves, detached from their graphs like tensors at a stage boundary. The
backwards of later slices run first, the last slice first, and add to `.grad` of these leaves. The backward of a slice
begins also at its own keys and values, with those sums. A recomputation attends to the same leaves as its forward.
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
    """The keys and values of one slice at one stage, by the number of the block that makes them."""

    earlier: Sequence["SliceKeys"] = ()  # of the slices before, in order
    made: dict[int, Pair] = field(default_factory=dict)  # by the last run, with its graph
    leaves: dict[int, Pair] = field(default_factory=dict)  # the same, for the slices behind

    def add(self, block: int, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Pair:
        """Adds keys and values of this slice; returns those of all slices up to it, like `update` of a cache."""
        values = values.to(torch.promote_types(keys.dtype, values.dtype))  # as in transformers' cache, under autocast
        self.made[block] = keys, values
        each = [*(one.leaves[block] for one in self.earlier), (keys, values)]
        return tuple(torch.cat(parts, dim=-2) for parts in zip(*each, strict=True))

    def earlier_leaves(self) -> list[Tensor]:
        """The keys and values of earlier slices."""
        return [leaf for one in self.earlier for pair in one.leaves.values() for leaf in pair]

    def keep(self, *, drops_graph: bool = False) -> None:
        """Detaches the keys and values of this slice, for later slices."""
        self.leaves = {
            block: tuple(one.detach().requires_grad_(one.requires_grad) for one in pair)
            for block, pair in self.made.items()
        }
        if drops_graph:
            self.made = {}

    def take_gradients(self) -> tuple[list[Tensor], Gradients]:
        """Returns the keys and values that require a gradient, and their gradients from later slices."""
        made, leaves = (list(chain.from_iterable(some.values())) for some in (self.made, self.leaves))
        pairs = [(one, leaf.grad) for one, leaf in zip(made, leaves, strict=True) if one.requires_grad]
        self.made, self.leaves = {}, {}
        return [one for one, _ in pairs], [gradient for _, gradient in pairs]


class Slices(Feature):
    """Passes keys and values from slice to slice of a micro-batch, and their gradients back."""

    alters_layers = True

    def __init__(self) -> None:
        self._keys: dict[tuple[int, int], SliceKeys] = {}  # by stage and slice

    def perform_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work |= {kind: partial(self._backward, work[kind]) for kind in BACKWARDS if kind in work}

    @contextmanager
    def around_layers(
        self, run: Run, rank: Rank, state: MicroBatchState, entered: Sequence[BoundaryInput], call: StageCall
    ) -> Iterator[None]:
        stage, m = state.stage_run.stage.index, state.micro_batch
        if (stage, m) in self._keys:  # The layers run again, on the same keys and values.
            call.keys = self._keys[stage, m]
            yield
            return
        first = m - m % run.slices
        call.keys = self._keys[stage, m] = SliceKeys([self._keys[stage, earlier] for earlier in range(first, m)])
        yield
        call.keys.keep(drops_graph=m in state.routes.micro_batches[Kind.RECOMPUTE])
        if not run.trains and m == first + run.slices - 1:
            for each in range(first, m + 1):
                del self._keys[stage, each]

    def earlier_leaves(self, stage: int, m: int) -> list[Tensor]:
        """The keys and values of earlier slices to which a slice attends."""
        return self._keys[stage, m].earlier_leaves()

    def _backward(self, backward: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        """B or I: begins also at the keys and values of the slice."""
        self._add_roots(rank, task)
        backward(run, rank, task)

    def _add_roots(self, rank: Rank, task: CompiledAction) -> None:
        made, gradients = self._keys.pop((task.stage, task.micro_batch)).take_gradients()
        rank.states[task.stage, task.micro_batch].roots += made
        rank.inbox.append(gradients)
