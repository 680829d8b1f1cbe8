"""Runs layers one after another on a sample, for their costs; nothing of it remains.

Gradients, buffers and other attributes of the layers and the devices
they are on are as before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from gpipe.stages.boundary import Gradients, detach_boundary, run_backward
from gpipe.stages.buffers import untouched
from gpipe.stages.layout import copy_of
from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import skip_names, unpack_stashes
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

T = TypeVar("T")

LayerInput: TypeAlias = tuple[Tree, dict[str, Tensor | None]]
"""What a layer takes of the main line, and what it pops."""
LayerOutput: TypeAlias = tuple[Tree, Mapping[str, Tensor | None]]
"""What a layer returns, and what it stashes."""


def measure_each(
    layers: Sequence[nn.Module], sample: Tree, measure: Callable[["LayerRun"], T], where: str = ""
) -> list[T]:
    """Measures each layer on what the layers before it make of the sample."""
    numbers: list[T] = []
    value: Tree = sample
    held: dict[str, Tensor | None] = {}
    for index, layer in enumerate(layers):
        run = LayerRun(index, layer, value, {name: held[name] for name in skip_names(layer, "pop")})
        try:
            with untouched(layer):
                numbers.append(measure(run))
                value, stashed = run.output()
        except Exception as error:
            error.add_note(run.what + where)
            raise
        held |= stashed
    return numbers


@contextmanager
def warmed_up(layers: Sequence[nn.Module], sample: Tree) -> Iterator[list["LayerRun"]]:
    """All layers, each run once, to be run again on what the layers before it made of the sample."""
    runs = measure_each(layers, sample, lambda run: run)
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(untouched(run.layer))
        yield runs


@dataclass(eq=False)
class LayerRun:
    """Runs of one layer on what it takes of the main line and pops."""

    index: int
    layer: nn.Module
    value: Tree
    popped: Mapping[str, Tensor | None]
    _output: LayerOutput | None = None

    def __post_init__(self) -> None:
        self.call: Callable[..., object] = self.layer

    @property
    def what(self) -> str:
        """What is done with it, for an exception."""
        return f"while layer {self.index} ({type(self.layer).__name__}) was run on the sample, for its cost"

    def given(self) -> LayerInput:
        """What the layer takes, for it to keep: it may work in place."""
        return self.given_with_leaves()[1]

    def given_with_leaves(self) -> tuple[list[Tensor], LayerInput]:
        """The same, behind the leaves to which its gradients come."""
        leaves: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            """A tensor that wants a gradient if the other does; no leaf, so that it may be changed in place."""
            leaves.append(tensor.detach().requires_grad_(tensor.requires_grad))
            return copy_of(leaves[-1])

        popped = {name: None if tensor is None else copy(tensor) for name, tensor in self.popped.items()}
        value = replace_tensors(self.value, copy)
        return [leaf for leaf in leaves if leaf.requires_grad], (value, popped)

    def rng_scope(self) -> rng_scope:
        """The randomness of the layer, the same in every run."""
        return rng_scope(0, 0, self.index, 0)

    def forward(self, given: LayerInput) -> LayerOutput:
        """Runs the layer on what it is given; gives what it returns, and what it stashes."""
        result = self.call(given[0], **given[1])
        stash = skip_names(self.layer, "stash")
        return unpack_stashes(result, stash) if stash else (result, {})

    def warm_up(self) -> None:
        """Runs the layer for the first time."""
        with self.rng_scope():
            output = self.forward(self.given())
        stashed = {name: detach_boundary(tensor)[0].stashed for name, tensor in output[1].items()}
        self._output = detach_boundary(output[0])[0].value, stashed
        backward_of(output)()

    def output(self) -> LayerOutput:
        """What later layers take, cut from its graph."""
        if self._output is None:
            self.warm_up()
        assert self._output is not None
        return self._output


def backward_of(output: LayerOutput) -> Callable[[], None]:
    """The backward of what a layer returned and stashed, to be called."""
    return partial(run_backward, *roots_of(output))


def roots_of(output: LayerOutput) -> tuple[list[Tensor], Gradients]:
    """What of the output of a layer a backward starts at, and a gradient for each."""
    roots = [t for t in (*tensors_in(output[0]), *output[1].values()) if t is not None and t.requires_grad]
    return roots, [torch.ones_like(root) for root in roots]
