"""The parts of a model, one for each layer: the modules and parameters that its operations use."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import nn

from gpipe.stages.buffers import Slot
from gpipe.tracing.shallow_copy import Parts
from gpipe.tracing.trace import Trace

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


class ModelPart(nn.Module):
    """A layer of a model that is interpreted.

    It holds units and parameters under their own names in the model, and is not called by itself: a stage interprets
    all of its layers at once.

    Attributes:
        stands_for: The module that it is, in words.
        model: The whole model; no part of the layer.
        units: The names of the modules that run in it.
        raw: Where the parameters stand that its operations are given as they are: in the layer, and in the model.
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
    return [layer.get_submodule(name) for name in layer.units] if isinstance(layer, ModelPart) else [layer]


def _holder(root: nn.Module, path: str) -> nn.Module:
    """The module at a path, made if there is none."""
    for part in path.split(".") if path else ():
        if part not in root._modules:
            root._modules[part] = nn.Module()
        found = root._modules[part]
        assert found is not None
        root = found
    return root


def units_by_layer(path: Trace) -> tuple[list[list[str]], list[list[str]]]:
    """The units of each layer, and the parameters that are used as they are."""
    units: list[dict[str, None]] = [{} for _ in path.starts]
    raw: list[dict[str, None]] = [{} for _ in path.starts]
    for at, op in enumerate(path.ops):
        layer = path.layer_of(at)
        if op.is_unit:
            units[layer] |= dict.fromkeys((*op.inner, op.name))  # named after the last
        raw[layer] |= dict.fromkeys(op.raw)
    return list(map(list, units)), list(map(list, raw))


def parts_of(parts: Parts, path: Trace) -> dict[str, ModelPart]:
    """The layers by name; what no operation uses goes with the last."""
    places = places_of(parts.model)
    units, raw = units_by_layer(path)
    called = [list(some) for some in units]
    _add_unused(parts, places, units, raw)
    named: dict[str, ModelPart] = {}
    blocks = set(parts.blocks)
    for at, (some, parameters) in enumerate(zip(units, raw, strict=True)):
        runs = called[at]
        main = next((name for name in runs if name in blocks), None) or next(iter(runs[-1:] if at else runs), "")
        label = type(parts.model.get_submodule(main)).__name__ if main else type(parts.model).__name__
        name = main or (parameters[0] if parameters else f"operations_{at}")
        count = sum(other.partition("#")[0] == name for other in named)
        part = ModelPart(parts.model, label, some, parameters, places)
        named[f"{name}#{count + 1}" if count else name] = part
    return named


def _add_unused(parts: Parts, places: Places, units: list[list[str]], raw: list[list[str]]) -> None:
    """Adds what no operation uses: to the first layer that uses the same parameters, if tied, else to the last."""
    known = parts.shallow_copy().units
    unit_of = {module: name for name, unit in known.items() for module in unit.modules()}
    first: dict[str, int] = {}
    for layer in reversed(range(len(units))):
        held = {module for unit in units[layer] for module in known[unit].modules()}
        used = [name for name, slots in places.items() if any(module in held for module, _ in slots)]
        first |= dict.fromkeys([*used, *raw[layer]], layer)
    called = {name for some in units for name in some}
    for name, slots in places.items():
        homes = [unit_of.get(module) for module, _ in slots]
        for unit in dict.fromkeys(home for home in homes if home is not None and home not in called):
            units[first.get(name, -1)].insert(0, unit)
            called.add(unit)
        if homes[0] is None and name not in first:
            raw[-1].append(name)


def _places(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf in (*module._parameters, *module._buffers):
            yield f"{path}.{leaf}" if path else leaf, (module, leaf)


def names_of_all(parts: Parts) -> list[str]:
    """The buffers that every layer reads: those outside of units."""
    inside = {part for unit in parts.shallow_copy().units.values() for part in unit.modules()}
    return [
        name
        for name, (module, leaf) in _places(parts.model)
        if module not in inside and leaf in module._buffers
    ]  # fmt: skip


class Names:
    """The names in each layer.

    Args:
        parts: The model.
        layers: Its layers, by name.
    """

    def __init__(self, parts: Parts, layers: dict[str, ModelPart]) -> None:
        self._parts, self._segments = parts, layers

    def in_layer(self, layer: str) -> list[str]:
        """What a layer has."""
        part = self._segments[layer]
        modules = set(part.modules())
        slots = {slot for _, slots in part.raw.values() for slot in slots}
        return [name for name, slot in _places(self._parts.model) if slot[0] in modules or slot in slots]

    def of_others(self, own: Collection[str]) -> frozenset[str]:
        """What none of these layers has, nor all."""
        mine = {name for layer in own for name in self.in_layer(layer)}
        return frozenset(name for name, _ in _places(self._parts.model)) - mine - {*names_of_all(self._parts)}

    def first_layers(self) -> dict[str, str]:
        """The first layer that has each; what every layer reads counts to the first."""
        found = dict.fromkeys(names_of_all(self._parts), next(iter(self._segments)))
        for layer in reversed(self._segments):
            found |= dict.fromkeys(self.in_layer(layer), layer)
        return found
