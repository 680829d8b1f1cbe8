"""The names of a model's parameters and buffers: which layer has which. One tensor may have several."""

from collections.abc import Collection, Iterator

from torch import nn

from gpipe.layers.buffers import Slot
from gpipe.replay.segment import Segment
from gpipe.replay.skeleton import Parts


def _places(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf in (*module._parameters, *module._buffers):
            yield f"{path}.{leaf}" if path else leaf, (module, leaf)


def names_of_all(parts: Parts) -> list[str]:
    """The buffers that every layer reads: those outside of units."""
    inside = {part for unit in parts.skeleton().units.values() for part in unit.modules()}
    return [
        name
        for name, (module, leaf) in _places(parts.model)
        if module not in inside and leaf in module._buffers
    ]  # fmt: skip


class Names:
    """The names in each layer.

    Args:
        parts: The model.
        segments: Its layers, by name.
    """

    def __init__(self, parts: Parts, segments: dict[str, Segment]) -> None:
        self._parts, self._segments = parts, segments

    def in_layer(self, layer: str) -> list[str]:
        """What a layer has."""
        segment = self._segments[layer]
        modules = set(segment.modules())
        slots = {slot for _, slots in segment.raw.values() for slot in slots}
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
