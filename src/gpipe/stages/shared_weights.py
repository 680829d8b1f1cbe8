"""Finds the parameters that several layers use, and makes one of those that the user names as tied.

Gives each layer that uses a shared parameter a leaf of its own, and adds up the leaves' gradients in layer order.

The gradients are added up by layer, micro-batch after micro-batch, and then over the layers in their order: the same
sum for every cut, also for none. The leaves, or aliases, stand in the modules only while a run is under way; in a
module that itself belongs to several layers, only while one of them runs its forward, and the others wait for it:
whatever the module refers to is then the layer's own.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gpipe._torch.modes import is_compiled
from gpipe._torch.modules import refresh_weights_of_rnn
from gpipe.stages.boundary import run_backward
from gpipe.stages.buffers import Slot
from gpipe.stages.memory_layout import moved
from gpipe.stages.stage import Layer, Stage

Tied: TypeAlias = Sequence[Sequence[Slot]]
"""Groups of slots whose parameters are one, though each process has its own."""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several layers use, and its slots in each of them, in layer order."""

    slots: dict[int, list[Slot]]

    @property
    def parameter(self) -> Tensor:
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
    slots = {
        f"{name}.{path}.{leaf}".replace("..", "."): (module, leaf)
        for name, layer in layers.items()
        for path, module in layer.named_modules(remove_duplicate=False)
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    }
    groups = [[slots[name] for name in group if name in slots] for group in ties]
    mistakes = [f"ties: there is no parameter {name!r}" for group in ties for name in group if name not in slots]
    seen: set[int] = set()
    for group, found in zip(ties, groups, strict=True):
        parameters = [module.get_parameter(leaf) for module, leaf in found]
        ids, shapes = set(map(id, parameters)), {tuple(parameter.shape) for parameter in parameters}
        if ids & seen:
            mistakes.append(f"ties: {tuple(group)} has a parameter that another group has too; make them one group")
        if len(set(group)) < max(len(group), 2) or len(shapes) > 1:
            mistakes.append(
                f"ties: {tuple(group)} must name two or more parameters once each, of one shape, not {sorted(shapes)}"
            )
        seen |= ids
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


_OWN = nullcontext()


class WeightAliases:
    """The aliases of shared parameters in one run, for the layers that run in this process."""

    def __init__(self, shared: Sequence[SharedParameter], stages: Sequence[Stage]) -> None:
        layers = {layer.index: (layer, stage.device) for stage in stages for layer in stage.layers}
        self.users = {at: tuple(item.slots) for at, item in enumerate(shared)}  # in all processes
        here = ({i: slots for i, slots in item.slots.items() if i in layers} for item in shared)
        self.shared = {at: SharedParameter(slots) for at, slots in enumerate(here) if slots}
        self.sources = {at: item.parameter for at, item in self.shared.items()}
        self._adds = False
        self._own: list[tuple[nn.Module, str, Tensor | None]] = []  # what stands in the slots, while aliases do
        self._hooks: list[RemovableHandle] = []
        self.leaves: dict[int, dict[int, Tensor]] = {}
        self._by_layer: dict[Layer, dict[Slot, Tensor]] = {}
        owners: dict[nn.Module, set[int]] = {}
        for at, item in self.shared.items():
            source, leaves = self.sources[at], self.leaves.setdefault(at, {})
            for index, slots in item.slots.items():
                layer, device = layers[index]
                leaf = leaves[index] = moved(source.detach(), device).requires_grad_(source.requires_grad)
                self._by_layer.setdefault(layer, {}).update(dict.fromkeys(slots, leaf))
                for module, _ in slots:
                    owners.setdefault(module, set()).add(index)
        in_turn = {index for indices in owners.values() if len(indices) > 1 for index in indices}
        self._in_turn = [layers[index][0] for index in in_turn]
        for module in (part for layer in self._in_turn for part in layer.module.modules()):
            if is_compiled(module):  # its code would use the parameters of the first layer
                raise ValueError(
                    f"a compiled {type(module).__name__} is several layers, which would need its code once for each; "
                    f"give each layer a module of its own, and share their parameters, perhaps by ties=..."
                )

    def put_in_place(self) -> None:
        """Has layers see their aliases in place of shared parameters."""
        turn, slots = threading.RLock(), [*chain(*self._by_layer.values())]
        self._own = [(module, name, module._parameters[name]) for module, name in slots]
        for parameter in self.sources.values():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._refuse))
        for layer, aliases in self._by_layer.items():
            if layer in self._in_turn:
                layer.aliased = _Aliased(aliases, turn)
            else:
                for (module, name), leaf in aliases.items():
                    put_parameter(module, name, leaf)

    def put_back(self) -> None:
        """Has them see the parameters again; twice does no harm, where an interrupt has come amid the first time."""
        for module, name, parameter in self._own:
            put_parameter(module, name, parameter)
        for layer in self._in_turn:
            layer.aliased = _OWN
        for hook in self._hooks:
            hook.remove()
        self._own, self._hooks = [], []

    @property
    def replaced(self) -> list[Tensor]:
        """The parameters in whose places aliases are now."""
        return [parameter for _, _, parameter in self._own if parameter is not None]

    def _refuse(self, gradient: Tensor) -> None:
        """Refuses a gradient that comes to a shared parameter itself, not to an alias."""
        if self._own and not self._adds:
            raise RuntimeError(
                f"a gradient came to a weight of shape {tuple(gradient.shape)}, which several layers share, past "
                f"those layers: it is used elsewhere (in loss_fn, or by a reference that is no parameter), or by a "
                f"module that is several layers itself and runs again in the backward (torch.utils.checkpoint: give "
                f"it use_reentrant=False). Make it their parameter"
            )

    def gradients(self, at: int) -> dict[int, Tensor | None]:
        """What the layers here add to the gradient of a shared parameter, by layer."""
        return {index: leaf.grad for index, leaf in sorted(self.leaves[at].items())}

    def add_up(self, found: Mapping[int, Mapping[int, Tensor | None]] | None = None) -> None:
        """Adds the gradients of all aliases, or those `found` in all processes, to the parameters', by layer."""
        for at, parameter in self.sources.items():
            gradients = self.gradients(at) if found is None else found[at]
            total: Tensor | None = None
            for _, gradient in sorted(gradients.items()):
                if gradient is not None:
                    gradient = moved(gradient, parameter.device)
                    total = gradient if total is None else _plus(total, gradient)
            if total is not None:
                self._adds = True
                run_backward([parameter], [total])  # as autograd would, hooks and all
                self._adds = False
            for leaf in self.leaves[at].values():
                leaf.grad = None


def _plus(one: Tensor, other: Tensor) -> Tensor:
    return other + one if one.is_sparse and not other.is_sparse else one + other


class _Aliased:
    """While entered, modules have aliases in the slots of parameters; it waits for its turn."""

    def __init__(self, aliases: Mapping[Slot, Tensor], turn: threading.RLock) -> None:
        self._aliases, self._turn = aliases, turn
        self._own: list[tuple[Slot, Tensor | None]] = []

    def __enter__(self) -> None:
        self._turn.acquire()
        for (module, name), leaf in self._aliases.items():
            self._own.append(((module, name), module._parameters[name]))
            put_parameter(module, name, leaf)

    def __exit__(self, *_: object) -> None:
        while self._own:
            (module, name), parameter = self._own.pop()
            put_parameter(module, name, parameter)
        self._turn.release()
