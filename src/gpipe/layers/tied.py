"""Finds the parameters that several layers use, and makes one of those that the user names as tied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from gpipe.layers.buffers import Slot
from gpipe.torch_private.modules import refresh_weights_of_rnn

Tied: TypeAlias = Sequence[Sequence[Slot]]
"""Groups of slots whose parameters are one, though each process has its own."""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several layers use, and its slots in each of them, in layer order."""

    slots: dict[int, list[Slot]]

    @property
    def parameter(self) -> Tensor:
        """The parameter itself."""
        module, name = next(iter(self.slots.values()))[0]
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter


def find_shared(layers: Sequence[nn.Module], tied: Tied = ()) -> list[SharedParameter]:
    """The parameters that several layers use, found by identity, or because they are said to be one."""
    one = {id(module._parameters[name]): group for group, found in enumerate(tied) for module, name in found}
    slots: dict[int, dict[int, list[Slot]]] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    key = one.get(id(parameter), id(parameter))
                    slots.setdefault(key, {}).setdefault(index, []).append((module, name))
    return [SharedParameter(by_layer) for by_layer in slots.values() if len(by_layer) > 1]


def find_ties(layers: dict[str, nn.Module], ties: Sequence[Sequence[str]]) -> tuple[list[list[Slot]], list[str]]:
    """Where the parameters of each group of names stand, and what is wrong with the names."""
    root = nn.Module()
    root._modules.update(layers)
    mistakes = []
    groups: list[list[Slot]] = []
    for group in ties:
        found: list[Slot] = []
        for name in group:
            path, _, leaf = name.rpartition(".")
            try:
                module = root.get_submodule(path)
            except AttributeError:
                module = nn.Module()
            if module._parameters.get(leaf) is None:
                mistakes.append(f"ties: there is no parameter {name!r}")
            else:
                found.append((module, leaf))
        ids = {id(module._parameters[leaf]) for module, leaf in found}
        if any(ids & {id(module._parameters[leaf]) for module, leaf in other} for other in groups):
            mistakes.append(f"ties: {tuple(group)} has a parameter that another group has too; make them one group")
        shapes = {tuple(module._parameters[leaf].shape) for module, leaf in found}  # type: ignore[union-attr]  # none of those found is None
        if len(group) < 2 or len(shapes) > 1:
            mistakes.append(
                f"ties: {tuple(group)} must name two or more parameters of one shape, not {sorted(shapes)}"
            )
        groups.append(found)
    return groups, mistakes


def tie(groups: Sequence[Sequence[Slot]]) -> None:
    """Makes the parameters of each group one, the first."""
    for (first, name), *others in groups:
        for module, leaf in others:
            put_parameter(module, leaf, first._parameters[name])


def put_parameter(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Puts a parameter, or an alias of one, into a slot of a module."""
    module._parameters[name] = parameter  # type: ignore[assignment]  # an alias is no Parameter, and need not be
    refresh_weights_of_rnn(module)
