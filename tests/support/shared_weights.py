"""Shared weights in plain PyTorch: each layer's sums first, then the layers in their order."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gpipe
from tests.support.plain_loop import Tree

Place: TypeAlias = tuple[nn.Module, str]


@contextmanager
def lent(layers: Sequence[nn.Module]) -> Iterator[list["Lent"]]:
    """The layers, each on leaves of its own of what it shares; at the end their gradients are those of the layers."""
    leaves = own_leaves(layers)
    yield [Lent(layer, of_layer) for layer, of_layer in zip(layers, leaves, strict=True)]
    add_up(leaves)


def own_leaves(layers: Sequence[nn.Module]) -> list[dict[Place, Tensor]]:
    users: dict[nn.Parameter, dict[int, list[Place]]] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    users.setdefault(parameter, {}).setdefault(index, []).append((module, name))
    leaves: list[dict[Place, Tensor]] = [{} for _ in layers]
    for shared, by_layer in users.items():
        if len(by_layer) > 1:
            for index, places in by_layer.items():
                leaf = shared.detach().requires_grad_(shared.requires_grad)
                leaves[index] |= dict.fromkeys(places, leaf)
    return leaves


def add_up(leaves: Sequence[Mapping[Place, Tensor]]) -> None:
    totals: dict[nn.Parameter, Tensor] = {}
    for of_layer in leaves:
        for (module, name), leaf in of_layer.items():
            parameter = module._parameters[name]
            if leaf.grad is not None and parameter is not None:
                totals[parameter] = totals[parameter] + leaf.grad if parameter in totals else leaf.grad
            leaf.grad = None
    for shared, total in totals.items():
        shared.grad = total if shared.grad is None else shared.grad + total


class Lent(nn.Module):
    """A layer that works on leaves of its own; it takes `Whole` as a micro-batch does."""

    def __init__(self, layer: nn.Module, leaves: Mapping[Place, Tensor]) -> None:
        super().__init__()
        self.layer = [layer]
        self.leaves = leaves
        self.stash = getattr(layer, "stash", ())
        self.pop = () if isinstance(layer, nn.Sequential) else getattr(layer, "pop", ())

    def forward(self, value: Tree, **popped: Tensor) -> Tree:
        value = pytree.tree_map_only(gpipe.Whole, lambda whole: whole.tensor, value)
        with self._in_place():
            return self.layer[0](value, **popped)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        own = {(module, name): module._parameters[name] for module, name in self.leaves}
        try:
            _put(self.leaves)
            yield
        finally:
            _put(own)


def _put(parameters: Mapping[Place, Tensor | None]) -> None:
    for (module, name), parameter in parameters.items():
        module._parameters[name] = parameter  # type: ignore[assignment]  # any tensor will do
    for module in {module for module, _ in parameters}:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, weight) for weight in module._flat_weights_names]
