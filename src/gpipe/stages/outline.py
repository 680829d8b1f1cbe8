"""Knows layers given as callables without their weights, so that each of several processes builds only its own.

All processes have an `outline` of all layers, and then each builds its own for real: `realize`. A layer's weights
depend on (seed, index) alone, so one process that builds all has the same.

Stands in for a parameter that another process holds: no values, and what needs them or a gradient is refused.
"""

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from gpipe._torch.modules import refresh_weights_of_rnn
from gpipe._torch.trees import tree_leaves, tree_map
from gpipe.stages.sequence import Maker, build, describe_invalid_sequence, name_layers
from gpipe.stages.stage import Stage

READERS = (nn.Module._apply.__code__,)  # moves gradients along with their parameters, if there are any
HELD = "this parameter is held by another process (layer {layer}); {instead}"
TRAIN = "use pipe.parameters(), pipe.zero_grad(), pipe.clip_grad_norm_"
COMPUTE = (
    "compute by pipe(inputs) or pipe.step(...), which all processes call, or have the whole model in one process: "
    "gpipe.save_weights(folder, pipe), and load it there"
)
WITHOUT_VALUES = frozenset({
    "data", "detach", "detach_", "clone", "contiguous", "copy_", "requires_grad_", "share_memory_", "pin_memory",
    "to", "type", "type_as", "cpu", "cuda", "double", "float", "half", "bfloat16",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor",
})  # fmt: skip
"""What gives a tensor and needs no values: copies and moves, which have none either, and what is shaped alike."""


class RemoteParameter(nn.Parameter):
    """Stands for a parameter of another process in a module of the user's; whoever computes with it is told so.

    So is whoever asks for its gradient. A copy of it is one too. In another process, where a pickle may come to, it
    is a plain parameter without values.

    >>> import torch
    >>> weight = stand_in(nn.Parameter(torch.empty(2, device="meta")), 3)
    >>> weight.shape, weight.requires_grad
    (torch.Size([2]), True)
    >>> weight.grad  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    RuntimeError: this parameter is held by another process (layer 3); use pipe.parameters(), pipe.zero_grad(), ...
    >>> torch.ones(1, 2) @ weight  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    RuntimeError: this parameter is held by another process (layer 3); compute by pipe(inputs) or pipe.step(...), ...
    """

    layer: int

    @property
    def grad(self) -> Tensor | None:
        """Refused; to let go of it is fine, since there is none."""
        if sys._getframe(1).f_code in READERS:
            return None
        raise RuntimeError(HELD.format(layer=self.layer, instead=TRAIN))

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            raise RuntimeError(HELD.format(layer=self.layer, instead=TRAIN))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuses what needs values; attributes, sizes, copies and moves are as of any tensor on the meta device."""
        named = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if named == "__get__" else named
        cause = None
        try:
            # of another class, since torch has it handle a function as if there were no subclass
            result = nn.Parameter.__torch_function__(func, types, args, kwargs or {})
            if name in WITHOUT_VALUES or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                return result
        except RuntimeError as error:  # "no data", or not of the meta device
            if name in WITHOUT_VALUES and not isinstance(error, NotImplementedError):
                raise
            cause = error
        remote = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RemoteParameter))
        raise RuntimeError(HELD.format(layer=remote.layer, instead=COMPUTE)) from cause

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found: Tensor = memo.setdefault(id(self), stand_in(self, self.layer))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def stand_in(empty: Tensor, layer: int) -> Tensor:
    """What stands for a tensor of another process's layer; `empty` is without values; buffers stay just that."""
    if not isinstance(empty, nn.Parameter):
        return empty
    made = RemoteParameter(empty.data, empty.requires_grad)
    made.layer = layer
    return made


@dataclass(frozen=True)
class Outline:
    """All layers, on the meta device where they are given as callables, and what it takes to build those."""

    layers: dict[str, nn.Module]  # by name; modules are the user's own
    makers: dict[int, Maker]  # the callables, by the index of their layer
    seed: int  # what the weights depend on
    mistakes: list[str]  # what is wrong with the layers


def outline(layers: object, seed: int) -> Outline:
    """The layers as far as they can be known without weights: names, routes, shapes and numbers of parameters.

    Callables are called with the meta device as the default, where nothing is allocated. One that needs values there,
    or has a device of its own, is built for real and left with shapes alone, so that one such layer at a time is in
    memory. Torch's, numpy's and Python's generators stay untouched.

    >>> found = outline([lambda: nn.Linear(10**6, 10**6), nn.Tanh], seed=0)
    >>> found.layers["0"].weight.numel(), found.layers["0"].weight.device.type
    (1000000000000, 'meta')
    """
    makers: dict[int, Maker] = {}
    known = WeakIdKeyDictionary()
    if isinstance(layers, Iterable) and not describe_invalid_sequence(layers):
        layers = list(layers)
        for layer in layers:
            if isinstance(layer, nn.Module):  # stays as it is, also where a callable puts it into another
                known.update({part: part for part in (*layer.modules(), *_state(layer).values())})

    def without_values(maker: Maker, index: int) -> object:
        makers[index] = maker
        return _without_values(_build_on_meta(maker, seed, index), known)

    named, mistakes = name_layers(layers, without_values)
    return Outline(named, makers, seed, mistakes)


def realize(found: Outline, own: Collection[int]) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers of an outline with those of the indices `own` built for real, and what is wrong with them.

    They are built by another call of their callables, and have the weights that `build_layers` gives them. Modules
    are the user's own, as they are.

    >>> found = outline([lambda: nn.Linear(10**6, 10**6), lambda: nn.Linear(2, 1)], seed=0)
    >>> layers, mistakes = realize(found, range(1, 2))
    >>> [(name, layer.weight.device.type) for name, layer in layers.items()], mistakes
    ([('0', 'meta'), ('1', 'cpu')], [])
    """
    mistakes: list[str] = []
    named = dict(found.layers)
    for index, maker in found.makers.items():
        if index in own:
            layer = build(maker, found.seed, index)
            mistakes += _find_differences(index, found.layers[str(index)], layer)
            if isinstance(layer, nn.Module):
                named[str(index)] = layer
    return named, mistakes


def release(stages: Sequence[Stage], own: Sequence[Stage], others: Iterable[Tensor] = ()) -> None:
    """Leaves the layers of other stages without values, but for what a layer of one's own has too, and `others`.

    They would keep the weights that they began with, and a model of the user's that holds them would be half trained.
    """
    mine = [part for stage in own for layer in stage.layers for part in layer.module.modules()]
    kept = {id(tensor) for part in mine for tensor in (*part._parameters.values(), *part._buffers.values())}
    kept |= set(map(id, others))
    known = WeakIdKeyDictionary()
    layers = [layer for stage in stages for layer in stage.layers]
    for part, index in {part: layer.index for layer in layers for part in layer.module.modules()}.items():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in kept and not _is_empty(tensor):
                    held[name] = known.setdefault(tensor, stand_in(_on_meta(tensor), index))
        refresh_weights_of_rnn(part)


def _build_on_meta(maker: Maker, seed: int, index: int) -> object:
    """Builds a layer on the meta device, or for real if it asks for values there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever builds the layer for real is warned
        with suppress(Exception), torch.device("meta"):  # whatever is raised without values; other errors come again
            return build(maker, seed, index)
        return build(maker, seed, index)


def _without_values(value: object, known: WeakIdKeyDictionary) -> object:
    """The same module or, if it has values, one of the same class, parts and names on the meta device.

    The module itself stays as it is: it may be the user's. What is shared stays shared, by way of `known`.
    """
    if isinstance(value, Tensor):
        return value if _is_empty(value) else known.setdefault(value, _on_meta(value))
    if not isinstance(value, nn.Module) or isinstance(value, torch.jit.ScriptModule):
        return value
    if all(map(_is_empty, _state(value).values())):
        return value
    if value not in known:
        known[value] = twin = value.__new__(type(value))
        twin.__dict__ = tree_map(lambda leaf: _without_values(leaf, known), value.__dict__)
    return known[value]


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta or is_lazy(tensor)


def _state(module: object) -> dict[str, Tensor]:
    if not isinstance(module, nn.Module):
        return {}
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _find_differences(index: int, empty: nn.Module, layer: object) -> Iterator[str]:
    """What is wrong with a layer built for real, beside the one built without values."""
    first, later = (
        {name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in _state(one).items()}
        for one in (empty, layer)
    )
    same = type(layer).__name__ == type(empty).__name__  # some are of classes made for them alone
    if not same or first != later:
        names = [name for name in first | later if first.get(name) != later.get(name)]
        apart = [f"{name}: {first.get(name)}, then {later.get(name)}" for name in names]
        yield (
            f"layer {index}: its callable built a {type(empty).__name__} first and a {type(layer).__name__} later "
            f"({'; '.join(apart)}); it is called in every process, so let every call build the same layer"
        )
    elif missing := [name for name, tensor in _state(layer).items() if tensor.is_meta]:
        yield (
            f"layer {index}: its callable gave no values to {', '.join(missing)}; let every call build the whole "
            f"layer anew, and name weights that it shares with another layer in ties=... instead"
        )
