"""Handles parameters that several layers use, and ties parameters that the user names.

During a run, each layer that uses a shared parameter has an *alias* of the parameter: a leaf with the same memory.
The gradients of the aliases are accumulated over micro-batches, and then summed over layers in layer order. The
result is therefore the same for all split points, and for a single stage.

The aliases replace the parameter in the layers' modules only during a run. If one module is used as several layers,
it has the aliases of a layer only during the forward of this layer. The forwards of the other layers wait.
"""

import threading
from collections.abc import Mapping, Sequence
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
from gpipe.stages.stage import NO_ALIASES, Layer, Stage

Tied: TypeAlias = Sequence[Sequence[Slot]]
"""Groups of slots whose parameters are tied, even if they are different tensors, as in different processes."""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several layers use.

    Attributes:
        slots: The slots of the parameter by layer index, in layer order.
    """

    slots: dict[int, list[Slot]]

    @property
    def parameter(self) -> Tensor:
        module, name = next(iter(self.slots.values()))[0]
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter


def find_shared(layers: Sequence[nn.Module], tied: Tied = ()) -> list[SharedParameter]:
    """Returns the parameters that several layers use, because they are the same tensor or because they are tied."""
    groups = {
        id(module._parameters[name]): group for group, tied_slots in enumerate(tied) for module, name in tied_slots
    }
    slots: dict[int, dict[int, list[Slot]]] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    key = groups.get(id(parameter), id(parameter))
                    slots.setdefault(key, {}).setdefault(index, []).append((module, name))
    return [SharedParameter(by_layer) for by_layer in slots.values() if len(by_layer) > 1]


def find_ties(layers: dict[str, nn.Module], ties: Sequence[Sequence[str]]) -> tuple[list[list[Slot]], list[str]]:
    """Finds the parameters that the user wants to tie.

    Args:
        layers: All layers by name.
        ties: Groups of parameter names.

    Returns:
        The slots of the parameters of each group, and messages about invalid groups.
    """
    slots = {
        f"{name}.{path}.{leaf}".replace("..", "."): (module, leaf)
        for name, layer in layers.items()
        for path, module in layer.named_modules(remove_duplicate=False)
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    }
    groups = [[slots[name] for name in group if name in slots] for group in ties]
    errors = [
        f"ties: the layers have no parameter {name!r}. Use names as in the state_dict of the layers. [unknown-tie]"
        for group in ties
        for name in group
        if name not in slots
    ]
    tied: set[int] = set()
    for group, group_slots in zip(ties, groups, strict=True):
        parameters = [module.get_parameter(leaf) for module, leaf in group_slots]
        ids, shapes = set(map(id, parameters)), {tuple(parameter.shape) for parameter in parameters}
        if ids & tied:
            errors.append(
                f"ties: {tuple(group)} and another group contain the same parameter. Combine them into one group. "
                f"[overlapping-ties]"
            )
        if len(set(group)) < max(len(group), 2) or len(shapes) > 1:
            errors.append(
                f"ties: {tuple(group)} is not a group of different parameters of one shape; the shapes are "
                f"{sorted(shapes)}. Name two or more parameters of the same shape, each once. [invalid-tie]"
            )
        tied |= ids
    return groups, errors


def tie(groups: Sequence[Sequence[Slot]]) -> None:
    """Replaces all parameters of each group with the first parameter."""
    for (first, name), *others in groups:
        for module, leaf in others:
            put_parameter(module, leaf, first._parameters[name])


def put_parameter(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Puts a parameter, or an alias of a parameter, into a slot of a module."""
    module._parameters[name] = parameter  # type: ignore[assignment]  # An alias need not be a Parameter.
    refresh_weights_of_rnn(module)


class WeightAliases:
    """The aliases of shared parameters in one run, for the layers of this process.

    Attributes:
        users: For each shared parameter, the layers that use it, in all processes.
        shared: The shared parameters that layers of this process use, with their slots in these layers.
        sources: The shared parameters, which the aliases replace.
        leaves: The aliases of each shared parameter, by layer.
    """

    def __init__(self, shared: Sequence[SharedParameter], stages: Sequence[Stage]) -> None:
        layers = {layer.index: (layer, stage.home) for stage in stages for layer in stage.layers}
        self.users = {key: tuple(item.slots) for key, item in enumerate(shared)}
        local = ({i: slots for i, slots in item.slots.items() if i in layers} for item in shared)
        self.shared = {key: SharedParameter(slots) for key, slots in enumerate(local) if slots}
        self.sources = {key: item.parameter for key, item in self.shared.items()}
        self._adds = False
        self._replaced: list[tuple[nn.Module, str, Tensor | None]] = []
        self._hooks: list[RemovableHandle] = []
        self.leaves: dict[int, dict[int, Tensor]] = {}
        self._by_layer: dict[Layer, dict[Slot, Tensor]] = {}
        users: dict[nn.Module, set[int]] = {}
        for key, item in self.shared.items():
            source, leaves = self.sources[key], self.leaves.setdefault(key, {})
            for index, slots in item.slots.items():
                layer, device = layers[index]
                leaf = leaves[index] = moved(source.detach(), device).requires_grad_(source.requires_grad)
                self._by_layer.setdefault(layer, {}).update(dict.fromkeys(slots, leaf))
                for module, _ in slots:
                    users.setdefault(module, set()).add(index)
        in_turn = {index for indices in users.values() if len(indices) > 1 for index in indices}
        self._in_turn = [layers[index][0] for index in in_turn]  # Layers that share a module.
        for module in (part for layer in self._in_turn for part in layer.module.modules()):
            if is_compiled(module):  # Its code would use the parameters of the first layer.
                raise ValueError(
                    f"A compiled {type(module).__name__} is used as several layers. Pass a separate module for each "
                    f"layer, and share the parameters, for example with ties=. [compiled-module-in-several-layers]"
                )

    def weights_of(self, stage: Stage) -> list[Tensor]:
        """Returns the tensors that the layers of a stage use as weights: parameters, and aliases of shared ones."""
        weights = dict[int, Tensor]()
        for layer in stage.layers:
            aliases = self._by_layer.get(layer, {})
            for module in layer.module.modules():
                for name, parameter in module._parameters.items():
                    weight = aliases.get((module, name), parameter)
                    if weight is not None:
                        weights[id(weight)] = weight
        return [*weights.values()]

    def put_in_place(self) -> None:
        """Puts the aliases into the layers' modules."""
        turn, slots = threading.RLock(), [*chain(*self._by_layer.values())]
        self._replaced = [(module, name, module._parameters[name]) for module, name in slots]
        for parameter in self.sources.values():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._reject_gradient))
        for layer, aliases in self._by_layer.items():
            if layer in self._in_turn:
                layer.aliased = _Aliased(aliases, turn)
            else:
                for (module, name), leaf in aliases.items():
                    put_parameter(module, name, leaf)

    def put_back(self) -> None:
        """Puts the parameters back. A second call is safe, in case an interrupt ended the first call."""
        for module, name, parameter in self._replaced:
            put_parameter(module, name, parameter)
        for layer in self._in_turn:
            layer.aliased = NO_ALIASES
        for hook in self._hooks:
            hook.remove()
        self._replaced, self._hooks = [], []

    @property
    def replaced(self) -> list[Tensor]:
        """The parameters that are currently replaced by aliases."""
        return [parameter for _, _, parameter in self._replaced if parameter is not None]

    def _reject_gradient(self, gradient: Tensor) -> None:
        """Raises a RuntimeError if a gradient reaches a shared parameter itself instead of an alias."""
        if self._replaced and not self._adds:
            raise RuntimeError(
                f"A weight of shape {tuple(gradient.shape)} is shared by several layers, but received a gradient "
                f"from elsewhere. Use it only in layers, and pass use_reentrant=False to torch.utils.checkpoint. "
                f"[shared-weight-gradient]"
            )

    def gradients(self, key: int) -> dict[int, Tensor | None]:
        """Returns the gradients of the aliases of a shared parameter, by layer."""
        return {index: leaf.grad for index, leaf in sorted(self.leaves[key].items())}

    def add_up(self, gathered: Mapping[int, Mapping[int, Tensor | None]] | None = None) -> None:
        """Sums the gradients of all aliases in layer order, and adds them to the gradients of the parameters.

        Args:
            gathered: The gradients from all processes, by parameter and layer. Default: the gradients of this
                process.
        """
        for key, parameter in self.sources.items():
            gradients = self.gradients(key) if gathered is None else gathered[key]
            total: Tensor | None = None
            for _, gradient in sorted(gradients.items()):
                if gradient is not None:
                    gradient = moved(gradient, parameter.device)
                    total = gradient if total is None else _sum(total, gradient)
            if total is not None:
                self._adds = True
                run_backward([parameter], [total])  # Runs the hooks of the parameter too.
                self._adds = False
            for leaf in self.leaves[key].values():
                leaf.grad = None


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Adds two gradients. If only one is sparse, torch requires that the first operand is the dense one."""
    return second + first if first.is_sparse and not second.is_sparse else first + second


class _Aliased:
    """A context in which modules have the aliases of one layer. Waits until no other layer uses the modules."""

    def __init__(self, aliases: Mapping[Slot, Tensor], turn: threading.RLock) -> None:
        self._aliases, self._turn = aliases, turn
        self._replaced: list[tuple[Slot, Tensor | None]] = []

    def __enter__(self) -> None:
        self._turn.acquire()
        for (module, name), leaf in self._aliases.items():
            self._replaced.append(((module, name), module._parameters[name]))
            put_parameter(module, name, leaf)

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            (module, name), parameter = self._replaced.pop()
            put_parameter(module, name, parameter)
        self._turn.release()
