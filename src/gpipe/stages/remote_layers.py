"""Builds layers without their weights, for the processes that do not run them."""

import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from gpipe._torch.modules import refresh_weights_of_rnn
from gpipe._torch.trees import tree_leaves, tree_map
from gpipe.stages.invalid_layers import describe_invalid_sequence
from gpipe.stages.quantized import forget_beside, is_quantized
from gpipe.stages.sequence import Maker, build, name_layers
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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


def build_on_meta(layers: object, seed: int) -> Outline:
    """The layers as far as they can be known without weights: names, routes, shapes and numbers of parameters.

    Callables are called with the meta device as the default, where nothing is allocated. One that needs values there,
    or has a device of its own, is built for real and left with shapes alone, so that one such layer at a time is in
    memory.
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
        return _without_values(_build_empty(maker, seed, index), known)

    named, mistakes = name_layers(layers, without_values)
    return Outline(named, makers, seed, mistakes)


def materialize(found: Outline, own: Collection[int]) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers of an outline with those of the indices `own` built anew for real, and what is wrong with them."""
    mistakes: list[str] = []
    named = dict(found.layers)
    for index, maker in found.makers.items():
        if index in own:
            layer = build(maker, found.seed, index)
            mistakes += _find_differences(index, found.layers[str(index)], layer)
            if isinstance(layer, nn.Module):
                named[str(index)] = layer
    return named, mistakes


def drop_remote_weights(stages: Sequence[Stage], own: Sequence[Stage], others: Iterable[Tensor] = ()) -> None:
    """Leaves the layers of other stages without values, but for what a layer of one's own has too, and `others`.

    They would keep the weights that they began with, and a model of the user's that holds them would be half trained.
    """
    mine = {part for stage in own for layer in stage.layers for part in layer.module.modules()}
    kept = {id(tensor) for part in mine for tensor in (*part._parameters.values(), *part._buffers.values())}
    kept |= set(map(id, others))
    known = WeakIdKeyDictionary()
    layers = [layer for stage in stages for layer in stage.layers]
    for part, index in {part: layer.index for layer in layers for part in layer.module.modules()}.items():
        if part not in mine:
            forget_beside(part)
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in kept and not _is_empty(tensor):
                    held[name] = known.setdefault(tensor, stand_in(_on_meta(tensor), index))
        refresh_weights_of_rnn(part)


def _build_empty(maker: Maker, seed: int, index: int) -> object:
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
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_quantized(tensor) else tensor
    empty = torch.empty_like(like, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta or is_lazy(tensor)


def _state(module: object) -> dict[str, Tensor]:
    if not isinstance(module, nn.Module):
        return {}
    return dict(module.named_parameters()) | dict(module.named_buffers())


def find_without_values(named: Mapping[str, nn.Module]) -> Iterator[str]:
    """The modules that have no values, as those of other stages once a pipe of several processes is built."""
    for name, layer in named.items():
        if empty := [path for path, tensor in _state(layer).items() if tensor.is_meta and not is_lazy(tensor)]:
            yield (
                f"layer {name} ({type(layer).__name__}) has no values: {', '.join(empty[:3])} on the meta "
                f"device, as layers of other stages once a pipe over processes is built; build the layers anew, or "
                f"give callables that build them"
            )


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
