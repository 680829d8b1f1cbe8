"""Builds layers on the meta device, for processes that do not run them, and replaces the weights of such layers.

If the user passes layers as callables, every process first builds all layers without weights (`build_on_meta`). The
process then builds the layers of its own stages again, with weights (`materialize`). The layers of other processes
keep parameters that raise an error if their values or gradients are used (`RemoteParameter`).
"""

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
from gpipe.stages.quantized import drop_quantization_state, is_quantized
from gpipe.stages.sequence import Maker, build, name_layers
from gpipe.stages.stage import Stage

GRAD_READERS = (nn.Module._apply.__code__,)
"""Code of torch that may read `grad` of a `RemoteParameter`. This code receives None instead of an error."""
REMOTE_GRADIENT = (
    "The parameter belongs to layer {layer}, which is in another process, and has no gradient here. Use "
    "pipe.parameters(), pipe.zero_grad() or pipe.clip_grad_norm_(...). [remote-parameter]"
)
REMOTE_VALUES = (
    "The parameter belongs to layer {layer}, which is in another process, and has no values here. Call pipe(inputs) "
    "or pipe.step(...), or load gpipe.save_weights(folder, pipe) into a whole model. [remote-parameter]"
)
WITHOUT_VALUES = frozenset({
    "data", "detach", "detach_", "clone", "contiguous", "copy_", "requires_grad_", "share_memory_", "pin_memory",
    "to", "type", "type_as", "cpu", "cuda", "double", "float", "half", "bfloat16",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor",
})  # fmt: skip
"""Operations that return a tensor but do not read values: copies, moves, and new tensors of the same shape."""


class RemoteParameter(nn.Parameter):
    """A parameter of another process's layer, on the meta device. Reading its values or its gradient raises an error.

    A copy is a `RemoteParameter` too. Unpickling returns a plain parameter on the meta device.
    """

    layer: int

    @property
    def grad(self) -> Tensor | None:
        """Raises a RuntimeError. Assigning None is allowed."""
        if sys._getframe(1).f_code in GRAD_READERS:
            return None
        raise RuntimeError(REMOTE_GRADIENT.format(layer=self.layer))

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            raise RuntimeError(REMOTE_GRADIENT.format(layer=self.layer))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Rejects operations that read values. Runs all other operations as usual on the meta device."""
        func_name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if func_name == "__get__" else func_name
        cause = None
        try:
            # Called on nn.Parameter, torch handles the function as if there were no subclass.
            result = nn.Parameter.__torch_function__(func, types, args, kwargs or {})
            if name in WITHOUT_VALUES or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                return result
        except RuntimeError as error:  # The meta device has no data, or does not support the function.
            cause = error
        remote = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RemoteParameter))
        raise RuntimeError(REMOTE_VALUES.format(layer=remote.layer)) from cause

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), stand_in(self, self.layer))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def stand_in(empty: Tensor, layer: int) -> Tensor:
    """Returns a `RemoteParameter` for a parameter on the meta device. Buffers are returned unchanged."""
    if not isinstance(empty, nn.Parameter):
        return empty
    parameter = RemoteParameter(empty.data, empty.requires_grad)
    parameter.layer = layer
    return parameter


@dataclass(frozen=True)
class MetaLayers:
    """All layers of a pipe. Layers that callables build are on the meta device. Other layers are the user's modules.

    Attributes:
        layers: The layers by name.
        makers: The callables that build layers, by layer index.
        seed: The seed of the initial weights.
        mistakes: Messages about invalid layers.
    """

    layers: dict[str, nn.Module]
    makers: dict[int, Maker]
    seed: int
    mistakes: list[str]


def build_on_meta(layers: object, seed: int) -> MetaLayers:
    """Builds all layers without weights, to find their names, skip connections and shapes.

    Each callable runs with the meta device as default device, so it allocates no memory. If this raises an error, or
    if the callable sets a device itself, the callable runs normally, and its weights are then discarded. At most one
    layer with weights is in memory at a time.
    """
    makers: dict[int, Maker] = {}
    replacements = WeakIdKeyDictionary()
    if isinstance(layers, Iterable) and not describe_invalid_sequence(layers):
        layers = list(layers)
        for layer in layers:
            if isinstance(layer, nn.Module):  # Keep the user's modules, also if a callable puts one into its layer.
                replacements.update({part: part for part in (*layer.modules(), *_state(layer).values())})

    def build_empty(maker: Maker, index: int) -> object:
        makers[index] = maker
        return _without_values(_build_empty(maker, seed, index), replacements)

    named, mistakes = name_layers(layers, build_empty)
    return MetaLayers(named, makers, seed, mistakes)


def materialize(meta: MetaLayers, own: Collection[int]) -> tuple[dict[str, nn.Module], list[str]]:
    """Builds layers again, with weights.

    Args:
        meta: All layers, built without weights.
        own: The indices of the layers that this process runs.

    Returns:
        All layers by name, and a message for each callable that built a different layer than in its first call.
    """
    mistakes: list[str] = []
    named = dict(meta.layers)
    for index, maker in meta.makers.items():
        if index in own:
            layer = build(maker, meta.seed, index)
            mistakes += _find_differences(index, meta.layers[str(index)], layer)
            if isinstance(layer, nn.Module):
                named[str(index)] = layer
    return named, mistakes


def drop_remote_weights(stages: Sequence[Stage], own: Sequence[Stage], kept: Iterable[Tensor] = ()) -> None:
    """Replaces the weights and buffers of other processes' layers with tensors on the meta device.

    Otherwise the layers of other processes would keep their initial weights, and a model with these layers would be
    only partly trained.

    Args:
        stages: All stages.
        own: The stages of this process. Tensors that their layers use stay unchanged.
        kept: Other tensors that stay unchanged.
    """
    own_parts = {part for stage in own for layer in stage.layers for part in layer.module.modules()}
    kept_ids = {id(tensor) for part in own_parts for tensor in (*part._parameters.values(), *part._buffers.values())}
    kept_ids |= set(map(id, kept))
    replacements = WeakIdKeyDictionary()
    layers = [layer for stage in stages for layer in stage.layers]
    for part, index in {part: layer.index for layer in layers for part in layer.module.modules()}.items():
        if part not in own_parts:
            drop_quantization_state(part)
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in kept_ids and not _is_empty(tensor):
                    tensors[name] = replacements.setdefault(tensor, stand_in(_on_meta(tensor), index))
        refresh_weights_of_rnn(part)


def _build_empty(maker: Maker, seed: int, index: int) -> object:
    """Builds a layer on the meta device. If this raises an error, builds the layer on the default device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The process that builds the layer with weights shows its warnings.
        with suppress(Exception), torch.device("meta"):  # Errors of the callable itself are raised again below.
            return build(maker, seed, index)
        return build(maker, seed, index)


def _without_values(value: object, replacements: WeakIdKeyDictionary) -> object:
    """Returns a copy of a module with its state on the meta device. Modules without values are returned unchanged.

    The module itself may belong to the user and is not changed.

    Args:
        value: A module, a tensor, or an attribute of a module.
        replacements: The copies that have been made, by original, so that shared modules and tensors stay shared.
    """
    if isinstance(value, Tensor):
        return value if _is_empty(value) else replacements.setdefault(value, _on_meta(value))
    if not isinstance(value, nn.Module) or isinstance(value, torch.jit.ScriptModule):
        return value
    if all(map(_is_empty, _state(value).values())):
        return value
    if value not in replacements:
        replacements[value] = twin = value.__new__(type(value))
        twin.__dict__ = tree_map(lambda leaf: _without_values(leaf, replacements), value.__dict__)
    return replacements[value]


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


def find_without_values(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields a message for each layer with tensors on the meta device, such as remote layers of an earlier pipe."""
    for name, layer in layers.items():
        if empty := [path for path, tensor in _state(layer).items() if tensor.is_meta and not is_lazy(tensor)]:
            yield (
                f"layer {name} ({type(layer).__name__}): {', '.join(empty[:3])} is on the meta device and has no "
                f"values. Build the layers again, or pass callables that build them. [layer-without-values]"
            )


def _find_differences(index: int, empty: nn.Module, layer: object) -> Iterator[str]:
    """Yields a message if a layer differs from the layer that the same callable built on the meta device."""
    first, second = (
        {name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in _state(module).items()}
        for module in (empty, layer)
    )
    same_class = type(layer).__name__ == type(empty).__name__  # By name: some classes are created for each instance.
    if not same_class or first != second:
        names = [name for name in first | second if first.get(name) != second.get(name)]
        differences = "; ".join(f"{name}: {first.get(name)}, then {second.get(name)}" for name in names)
        yield (
            f"layer {index}: its callable built a {type(empty).__name__} in the first call and a "
            f"{type(layer).__name__} in the second ({differences}). Let every call build the same layer, because "
            f"each process calls the callable. [callable-builds-different-layers]"
        )
    elif missing := [name for name, tensor in _state(layer).items() if tensor.is_meta]:
        yield (
            f"layer {index}: its callable did not initialize {', '.join(missing)}. Let every call build the whole "
            f"layer, and pass the names of shared weights as ties=. [callable-leaves-weights-out]"
        )
