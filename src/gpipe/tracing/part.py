"""One layer of a model: some of the events of its forward, and the modules and parameters that these use."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import nn

from gpipe.stages.buffers import Slot

Places: TypeAlias = Mapping[str, Sequence[Slot]]
"""Where each parameter of a model stands, by its first name: in several modules if it is tied."""


def places_of(model: nn.Module) -> Places:
    """Where the parameters of a model stand.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    >>> model["head"].weight = model["embed"].weight
    >>> [(name, len(slots)) for name, slots in places_of(model).items()]
    [('embed.weight', 2)]
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[Slot]] = {name: [] for name in names.values()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                found[names[id(parameter)]].append((module, leaf))
    return found


class Segment(nn.Module):
    """A layer of a model that is replayed.

    It holds units and parameters under their own names in the model, and is not called by itself: a stage replays
    all of its layers at once.

    Attributes:
        stands_for: The module that it is, in words.
        model: The whole model; no part of the layer.
        units: The names of the modules that run in it.
        raw: Where the parameters stand that its events are given as they are: in the layer, and in the model.
    """

    def __init__(
        self, model: nn.Module, label: str, units: Sequence[str], raw: Sequence[str], places: Places
    ) -> None:
        super().__init__()
        self.stands_for, self.units = label, tuple(units)
        self.__dict__["model"] = model
        for name in units:
            path, _, leaf = name.rpartition(".")
            _holder(self, path)._modules[leaf] = model.get_submodule(name)
        own = set(self.modules())
        self.raw: dict[str, tuple[Slot, Sequence[Slot]]] = {}
        for name in raw:
            slot = next((slot for slot in places[name] if slot[0] in own), None)
            if slot is None:
                path, _, leaf = name.rpartition(".")
                slot = _holder(self, path), leaf
            self.raw[name] = slot, places[name]
        self.follow()

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return "model" in self.__dict__ and self.__dict__["model"].training

    @training.setter
    def training(self, mode: bool) -> None:
        """Leaves it to the model."""

    def follow(self) -> None:
        """Takes over the parameters that the model has now."""
        for (holder, leaf), places in self.raw.values():
            module, name = places[0]
            holder._parameters[leaf] = module._parameters[name]

    def lead(self) -> None:
        """Has the model have the parameters that the layer has now."""
        for (holder, leaf), places in self.raw.values():
            for module, name in places:
                module._parameters[name] = holder._parameters[leaf]


def modules_run(layer: nn.Module) -> list[nn.Module]:
    """The modules that are called where a layer runs: itself, or the units of a model's layer."""
    return [layer.get_submodule(name) for name in layer.units] if isinstance(layer, Segment) else [layer]


def _holder(root: nn.Module, path: str) -> nn.Module:
    """The module at a path, made if there is none."""
    for part in path.split(".") if path else ():
        if part not in root._modules:
            root._modules[part] = nn.Module()
        found = root._modules[part]
        assert found is not None
        root = found
    return root
