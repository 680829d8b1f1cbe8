"""Sees which parameters of others a unit uses by a reference, past its arguments."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from gpipe.replay.call import Call
from gpipe.replay.errors import CannotSplitError
from gpipe.replay.structure import take_apart
from gpipe.values.autograd_graph import leaves_of

REACHES = (
    "{unit} uses {parameter} by a reference, a parameter of a module that blocks stand in: no layer has it, and "
    "several would add to its gradient at once. Hand it to {unit} as an argument, or let a module have it in which "
    "no block stands"
)


class Owners:
    """Which units have which parameters.

    Args:
        model: Has the parameters.
        units: The units by name.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._units = {name: frozenset(map(id, unit.parameters())) for name, unit in units.items()}

    def reached(self, call: Call, made: Any, until: Collection[Node]) -> list[str]:
        """The other units whose parameters the call of a unit has used.

        Args:
            call: The call.
            made: What it has returned.
            until: The nodes behind the tensors that it was given, from before it ran.

        Raises:
            CannotSplitError: It has used one of no unit.
        """
        roots = [leaf for leaf in take_apart(made)[0] if isinstance(leaf, Tensor)]
        known = {*self._units[call.name], *map(id, call.tensors)}
        found: dict[str, None] = {}
        for leaf in leaves_of(roots, until):
            if id(leaf) in self._names and id(leaf) not in known:
                home = next((name for name, held in self._units.items() if id(leaf) in held), None)
                if home is None:
                    raise CannotSplitError(REACHES.format(unit=call.name, parameter=self._names[id(leaf)]))
                found[home] = None
        return list(found)
