"""Shared weights: one Parameter that several layers use.

Each layer that uses it works on an alias, a leaf of its own, so that gradients are added up by layer, micro-batch
after micro-batch, and then over the layers in their order: the same sum for every cut, also for none. Aliases stand
in the modules only while a run is under way; in a module that itself belongs to several layers, only while one of
them runs its forward, and the others wait for it: whatever the module refers to is then the layer's own.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gpipe.layers.stage import Layer, Stage
from gpipe.values.boundary import run_backward
from gpipe.values.layout import moved, storage_address
from gpipe.values.tree import version

Slot: TypeAlias = tuple[nn.Module, str]
"""Where a parameter or a buffer stands."""
Tied: TypeAlias = Sequence[Sequence[Slot]]
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
        shapes = {tuple(module._parameters[leaf].shape) for module, leaf in found}  # type: ignore[union-attr]
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


def find_exposed(stages: Sequence[Stage]) -> dict[Slot, str]:
    """The buffers that several partitions see, each with a layer of another: of one module, or in one memory."""
    home: dict[object, Layer] = {}
    stage_of = {layer.index: stage.index for stage in stages for layer in stage.layers}
    found: dict[Slot, str] = {}
    for layer in (layer for stage in stages for layer in stage.layers):
        for module in layer.module.modules():
            for name, buffer in module._buffers.items():
                for seen in (
                    module,
                    *([storage_address(buffer)] if buffer is not None and storage_address(buffer) else []),
                ):
                    first = home.setdefault(seen, layer)
                    if stage_of[first.index] != stage_of[layer.index]:
                        found[module, name] = f"{first} and {layer}"
    return found


PAST_ITS_LAYERS = (
    "a gradient came to a weight of shape {shape}, which several layers share, past those layers: it is used "
    "elsewhere (in loss_fn, or by a reference that is no parameter), or by a module that is several layers itself "
    "and runs again in the backward (torch.utils.checkpoint: give it use_reentrant=False). Let whoever uses it have "
    "it as a parameter"
)
_OWN = nullcontext()


class BufferGuard:
    """Watches the buffers that several partitions see: a change would depend on which of them comes first."""

    def __init__(self, exposed: Mapping[Slot, str]) -> None:
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
        self._in_turn = {index for indices in owners.values() if len(indices) > 1 for index in indices}
        self._turn = threading.RLock()
        self._adds = False
        self._layers: dict[int, Layer] = {
            index: layers[index][0] for item in self.shared.values() for index in item.places
        }
        _refuse_compiled(part for index in self._in_turn for part in self._layers[index].module.modules())
        self.leaves = {
            at: {index: _alias(item.parameter, layers[index][1].device) for index in item.places}
            for at, item in self.shared.items()
        }
        self.sources = {at: item.parameter for at, item in self.shared.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Has the layers see their aliases."""
        by_layer: dict[int, dict[Slot, Tensor]] = {}
        for at, item in self.shared.items():
            for index, places in item.places.items():
                by_layer.setdefault(index, {}).update(dict.fromkeys(places, self.leaves[at][index]))
        with ExitStack() as stack:
            for parameter in self.sources.values():
                if parameter.requires_grad:
                    stack.callback(parameter.register_hook(self._refuse).remove)
            for index, aliases in by_layer.items():
                if index in self._in_turn:
                    self._layers[index].weights = _InTurn(self._turn, aliases)
                else:
                    stack.enter_context(_Aliased(aliases))
            try:
                yield
            finally:
                for index in self._in_turn:
                    self._layers[index].weights = _OWN

    def _refuse(self, gradient: Tensor) -> None:
        """Refuses a gradient that comes to a shared parameter itself, not to an alias."""
        if not self._adds:
            raise RuntimeError(PAST_ITS_LAYERS.format(shape=tuple(gradient.shape)))

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
                    total = gradient if total is None else _plus(total, gradient)
            if total is not None:
                self._adds = True
                run_backward([parameter], [total])  # as autograd would, hooks and all
                self._adds = False
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


def _refuse_compiled(modules: Iterable[nn.Module]) -> None:
    """Refuses compiled modules that are several layers.

    Raises:
        ValueError: Their code would go on with the parameters of the first.
    """
    for module in modules:
        if is_compiled(module):
            raise ValueError(
                f"a compiled {type(module).__name__} is several layers, which would need its code once for each; "
                f"give each layer a module of its own, and share their parameters, perhaps by ties=..."
            )


def _plus(one: Tensor, other: Tensor) -> Tensor:
    return other + one if one.is_sparse and not other.is_sparse else one + other


class _Aliased:
    """While entered, modules have aliases in the places of parameters."""

    def __init__(self, aliases: Mapping[Slot, Tensor]) -> None:
        self._aliases = aliases
        self._own: list[tuple[Slot, Tensor | None]] = []

    def __enter__(self) -> None:
        for (module, name), leaf in self._aliases.items():
            self._own.append(((module, name), module._parameters[name]))
            _put(module, name, leaf)

    def __exit__(self, *_: object) -> None:
        while self._own:
            (module, name), parameter = self._own.pop()
            _put(module, name, parameter)


class _InTurn(_Aliased):
    """Likewise, one layer at a time."""

    def __init__(self, turn: threading.RLock, aliases: Mapping[Slot, Tensor]) -> None:
        super().__init__(aliases)
        self._turn = turn

    def __enter__(self) -> None:
        self._turn.acquire()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._turn.release()
