"""Shared weights: one Parameter that several layers use.

Each layer that uses it works on an alias, a leaf of its own, so that gradients are added up by layer, micro-batch
after micro-batch, and then over the layers in their order: the same sum for every cut, also for none. Aliases stand
in the modules only while a run is under way. A module that itself belongs to several layers may run in several
threads at once, so each of its layers but the first runs a copy of it that shares all but the aliased parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gpipe.run.boundary import run_backward
from gpipe.run.layout import moved
from gpipe.run.skips import version
from gpipe.run.stage import Layer, Stage

Place: TypeAlias = tuple[nn.Module, str]
"""Where a parameter or a buffer stands."""
Tied: TypeAlias = Sequence[Sequence[Place]]
"""Groups of places whose parameters are one, though each process has its own."""


@dataclass(frozen=True)
class Shared:
    """One shared parameter: where it stands in each layer that uses it, in layer order."""

    places: dict[int, list[tuple[nn.Module, str]]]

    @property
    def parameter(self) -> Tensor:
        """The parameter itself."""
        module, name = next(iter(self.places.values()))[0]
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter


def find_shared(layers: Sequence[nn.Module], tied: Tied = ()) -> list[Shared]:
    """The parameters that several layers use, found by identity, or because they are said to be one."""
    one = {id(module._parameters[name]): group for group, found in enumerate(tied) for module, name in found}
    places: dict[int, dict[int, list[tuple[nn.Module, str]]]] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    key = one.get(id(parameter), id(parameter))
                    places.setdefault(key, {}).setdefault(index, []).append((module, name))
    return [Shared(by_layer) for by_layer in places.values() if len(by_layer) > 1]


def find_ties(layers: dict[str, nn.Module], ties: Sequence[Sequence[str]]) -> tuple[list[list[Place]], list[str]]:
    """Where the parameters of each group of names stand, and what is wrong with the names."""
    root = nn.Module()
    root._modules.update(layers)
    mistakes = []
    groups: list[list[Place]] = []
    for group in ties:
        found: list[Place] = []
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
        shapes = {tuple(module._parameters[leaf].shape) for module, leaf in found}  # type: ignore[union-attr]
        if len(group) < 2 or len(shapes) > 1:
            mistakes.append(
                f"ties: {tuple(group)} must name two or more parameters of one shape, not {sorted(shapes)}"
            )
        groups.append(found)
    return groups, mistakes


def tie(groups: Sequence[Sequence[Place]]) -> None:
    """Makes the parameters of each group one, the first."""
    for (first, name), *others in groups:
        for module, leaf in others:
            _put(module, leaf, first._parameters[name])


def find_race(stages: Sequence[Stage]) -> str | None:
    """Why the modules shared between stages cannot be run, if so."""
    home: dict[nn.Module, int] = {}
    for stage in stages:
        for layer in stage.layers:
            for module in layer.module.modules():
                first = home.setdefault(module, stage.index)
                if first != stage.index and isinstance(module, _NormBase) and module.track_running_stats:
                    return (
                        f"{layer} uses a {type(module).__name__} that partition {first} uses too, and its running "
                        f"statistics would depend on which comes first; use one module for each, or put the layers "
                        f"into one partition"
                    )
    return None


def find_exposed(stages: Sequence[Stage]) -> dict[Place, str]:
    """The buffers of modules that several partitions use, each with the last layer that does."""
    home: dict[nn.Module, int] = {}
    found: dict[Place, str] = {}
    for stage in stages:
        for layer in stage.layers:
            for module in layer.module.modules():
                if home.setdefault(module, stage.index) != stage.index:
                    found |= {(module, name): f"{layer} and partition {home[module]}" for name in module._buffers}
    return found


class BufferGuard:
    """Watches the buffers that several partitions see: a change would depend on which of them comes first."""

    def __init__(self, exposed: Mapping[Place, str]) -> None:
        self._exposed = exposed
        tensors = [module._buffers.get(name) for module, name in exposed]
        self._before = [(tensor, 0 if tensor is None else version(tensor)) for tensor in tensors]

    def check(self) -> None:
        """Checks that none was changed.

        Raises:
            RuntimeError: Some were.
        """
        states = zip(self._exposed.items(), self._before, strict=True)
        changed = [
            f"{place[1]} ({users})"
            for (place, users), (tensor, before) in states
            if place[0]._buffers.get(place[1]) is not tensor or (tensor is not None and version(tensor) != before)
        ]
        if changed:
            raise RuntimeError(
                f"a forward changed a buffer that layers of several partitions use, so that the result depends on "
                f"which comes first: {', '.join(changed)}; use one module for each, or put the layers into one "
                f"partition"
            )


class Aliases:
    """The aliases of one run, those of the layers that run in this process."""

    def __init__(self, shared: Sequence[Shared], stages: Sequence[Stage]) -> None:
        layers = {layer.index: (layer, stage) for stage in stages for layer in stage.layers}
        self.users = {at: tuple(item.places) for at, item in enumerate(shared)}  # in all processes
        here = ({i: p for i, p in item.places.items() if i in layers} for item in shared)
        self.shared = {at: Shared(places) for at, places in enumerate(here) if places}
        owners: dict[nn.Module, set[int]] = {}
        for item in self.shared.values():
            for index, places in item.places.items():
                for module, _ in places:
                    owners.setdefault(module, set()).add(index)
        self._copied = {max_index for indices in owners.values() for max_index in sorted(indices)[1:]}
        self._layers: dict[int, Layer] = {
            index: layers[index][0] for item in self.shared.values() for index in item.places
        }
        self.leaves = {
            at: {index: _alias(item.parameter, layers[index][1].device) for index in item.places}
            for at, item in self.shared.items()
        }
        self.sources = {at: item.parameter for at, item in self.shared.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Has the layers see their aliases."""
        by_layer: dict[int, dict[tuple[nn.Module, str], Tensor]] = {}
        for at, item in self.shared.items():
            for index, places in item.places.items():
                by_layer.setdefault(index, {}).update(dict.fromkeys(places, self.leaves[at][index]))
        swapped = []
        try:
            for index, aliases in by_layer.items():
                if index in self._copied:
                    self._layers[index].stand_in = _copy_with(self._layers[index].module, aliases, {})
                else:
                    for (module, name), leaf in aliases.items():
                        swapped.append((module, name, module._parameters[name]))
                        _put(module, name, leaf)
            yield
        finally:
            for module, name, parameter in swapped:
                _put(module, name, parameter)
            for index in self._copied:
                self._layers[index].stand_in = None

    def gradients(self, at: int) -> dict[int, Tensor | None]:
        """What the layers here add to the gradient of a shared parameter, by layer."""
        return {index: leaf.grad for index, leaf in sorted(self.leaves[at].items())}

    def add_up(self, found: Mapping[int, Mapping[int, Tensor | None]] | None = None) -> None:
        """Adds the gradients of all aliases to the parameters', in layer order.

        `found` are those of all processes, by shared parameter and layer, if there are others.
        """
        for at, parameter in self.sources.items():
            gradients = self.gradients(at) if found is None else found[at]
            total: Tensor | None = None
            for _, gradient in sorted(gradients.items()):
                if gradient is not None:
                    gradient = moved(gradient, parameter.device)
                    total = gradient if total is None else total + gradient
            if total is not None:
                run_backward([parameter], [total])  # as autograd would, hooks and all
            for leaf in self.leaves[at].values():
                leaf.grad = None


def _alias(parameter: Tensor, device: torch.device) -> Tensor:
    return moved(parameter.detach(), device).requires_grad_(parameter.requires_grad)


def _put(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    module._parameters[name] = parameter  # type: ignore[assignment]  # an alias is no Parameter, and need not be
    if isinstance(module, nn.RNNBase):  # keeps a list of its weights beside its parameters
        module._flat_weights = [getattr(module, weight) for weight in module._flat_weights_names]


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is `torch.compile`'s."""
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


def _copy_with(
    module: nn.Module, aliases: dict[tuple[nn.Module, str], Tensor], known: dict[nn.Module, nn.Module]
) -> nn.Module:
    """A copy of a module that shares everything with it but the aliased parameters.

    Raises:
        ValueError: It is compiled, and its code would go on with the parameters of the original.
    """
    if module in known:
        return known[module]
    if is_compiled(module):
        raise ValueError(
            f"a compiled {type(module).__name__} is several layers, which would need its code once for each; give "
            f"each layer a module of its own, and share their parameters, perhaps by ties=..."
        )
    copied = known[module] = module.__new__(type(module))
    copied.__dict__ = dict(module.__dict__)
    copied.__dict__["_parameters"] = dict(module._parameters)
    copied.__dict__["_modules"] = {
        name: None if child is None else _copy_with(child, aliases, known) for name, child in module._modules.items()
    }
    for (owner, name), leaf in aliases.items():
        if owner is module:
            _put(copied, name, leaf)
    return copied
