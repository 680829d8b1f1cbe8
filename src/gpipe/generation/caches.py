"""Handles the layers of a model's KV cache separately, because each rank fills only the layers of its own stages.

A cache is any object with a list `layers`, such as the caches of transformers. Each element of the list holds the
tensors of one block. The cache of an encoder-decoder model consists of two of these caches.

A forward reads the length of the cache from any layer to compute the masks and positions of all blocks. While a stage
runs, placeholders therefore replace the layers of other stages. A placeholder has the shapes that the layer had
before this forward. The placeholder is on the meta device, so computing with it raises an error.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpipe._torch.trees import map_tensors
from gpipe.stages.memory_layout import version
from gpipe.stages.tree import tensors_in
from gpipe.tracing.interpreter import DTYPES, SENT_BY_VALUE

Place: TypeAlias = tuple[int, int]
"""Identifies a layer of a cache: 0 for self-attention or 1 for cross-attention, and the index of the layer."""
Layout: TypeAlias = dict[str, Any]
"""The content of a layer as JSON. Floating-point tensors have only a dtype and a shape."""

MAX_VALUES = 64
"""Maximum number of elements of integer tensors, such as lengths, whose values are part of a layout."""
PARTS = ("self_attention_cache", "cross_attention_cache")


def is_cache(value: object) -> bool:
    """Whether a value is a cache that consists of layers."""
    return all(hasattr(value, part) for part in PARTS) or (
        isinstance(getattr(value, "layers", None), list) and hasattr(value, "get_seq_length")
    )


def _parts(cache: Any) -> list[Any]:
    return [getattr(cache, part) for part in PARTS] if hasattr(cache, PARTS[1]) else [cache]


def layers_in(cache: Any) -> dict[Place, Any]:
    """Returns all layers of a cache by their place."""
    return {(i, index): layer for i, part in enumerate(_parts(cache)) for index, layer in enumerate(part.layers)}


def put_layers(cache: Any, layers: Mapping[Place, Any]) -> None:
    """Replaces layers of a cache."""
    for (part, index), layer in layers.items():
        _parts(cache)[part].layers[index] = layer


def put_placeholders(cache: Any, layouts: Mapping[Place, Layout]) -> None:
    """Replaces layers of a cache with placeholders that have these layouts. Appends layers that do not exist yet."""
    parts = _parts(cache)
    for (part, index), layout in layouts.items():
        layers = parts[part].layers
        while len(layers) <= index:
            layers.append(parts[part].layer_class_to_replicate())
        layers[index] = placeholder(layers[index], layout)
        if part:
            cache.is_updated[index] = True


def restore(cache: Any, saved: Any) -> None:
    """Restores the layers and the dictionaries of a cache from a saved cache."""
    put_layers(cache, layers_in(saved))
    vars(cache).update({name: value for name, value in vars(saved).items() if type(value) is dict})


def copy_of_cache(cache: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copies a cache, with `change` applied to its tensors."""
    copied = copy.copy(cache)
    containers = {name: x for name, x in vars(copied).items() if type(x) in (list, dict) and name != "layers"}
    vars(copied).update(map_tensors(containers, change))
    if hasattr(copied, PARTS[1]):
        vars(copied).update({part: copy_of_cache(getattr(copied, part), change) for part in PARTS})
    else:
        copied.layers = [_copy_layer(layer, change) for layer in copied.layers]
    return copied


def _copy_layer(layer: Any, change: Callable[[Tensor], Tensor]) -> Any:
    copied = copy.copy(layer)
    vars(copied).update({name: map_tensors(value, change) for name, value in vars(copied).items()})
    return copied


def bytes_of(layer: Any) -> int:
    """Returns the size in bytes of a layer of a cache."""
    return sum(tensor.nbytes for value in vars(layer).values() for tensor in tensors_in(value))


def grow(layer: Any, new: int | None, length: int) -> None:
    """Extends the tensors of a layer on the meta device, as generation would. Layers of a fixed size stay unchanged.

    Args:
        layer: The layer after the forward of the prompt.
        new: The number of new tokens. The last new token is not added to the cache.
        length: The total number of tokens, if `new` is None.
    """
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if getattr(layer, "is_compileable", False) or not (isinstance(keys, Tensor) and isinstance(values, Tensor)):
        return
    if keys.numel() and (tokens := (length - keys.shape[-2] if new is None else new) - 1) > 0:
        layer.keys, layer.values = keys.to("meta"), values.to("meta")
        layer.update(*(x.new_empty((*x.shape[:-2], tokens, x.shape[-1])) for x in (layer.keys, layer.values)))


def fingerprints(cache: Any) -> dict[Place, object]:
    """Returns a fingerprint of each layer, which changes when the layer is filled."""
    return {
        place: [(id(tensor), version(tensor)) for value in vars(layer).values() for tensor in tensors_in(value)]
        for place, layer in layers_in(cache).items()
    }


def layout_of(layer: Any) -> Layout:
    """Returns the layout of a layer."""
    return {name: encoded for name, value in vars(layer).items() if (encoded := _encode(value)) is not None}


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        has_values = not (value.is_floating_point() or value.is_meta or value.numel() > MAX_VALUES)
        return {"tensor": [str(value.dtype), list(value.shape), value.tolist() if has_values else None]}
    if isinstance(value, dict):
        return {"keys": list(value), "items": [_encode(item) for item in value.values()]}
    if isinstance(value, (list, tuple)):
        return {"items": [_encode(item) for item in value]}
    if isinstance(value, torch.device):
        return {"device": True}
    return {"plain": value} if isinstance(value, SENT_BY_VALUE) else None


def placeholder(layer: Any, layout: Layout) -> Any:
    """Returns a layer of the same class with a given layout and without values."""
    empty = copy.copy(layer)
    vars(empty).update({name: _decode(encoded) for name, encoded in layout.items()})
    return empty


def _decode(encoded: Any) -> Any:
    match encoded:
        case {"tensor": [dtype, shape, None]}:
            return torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        case {"tensor": [dtype, _, values]}:
            return torch.tensor(values, dtype=DTYPES[dtype], device="cpu")
        case {"keys": keys, "items": items}:
            return dict(zip(keys, map(_decode, items), strict=True))
        case {"items": items}:
            return list(map(_decode, items))
        case {"device": True}:
            return torch.device("meta")
        case {"plain": value}:
            return value
    return None


def placeholders(cache: Any) -> dict[Place, Any]:
    """Returns a placeholder with the current layout of each layer of a cache."""
    return {place: placeholder(layer, layout_of(layer)) for place, layer in layers_in(cache).items()}


@contextmanager
def remote_layers_replaced(cache: Any, own: Collection[Place], replacements: Mapping[Place, Any]) -> Iterator[None]:
    """Replaces, inside the context, the layers that other stages fill.

    Args:
        cache: The cache.
        own: The layers that this stage fills.
        replacements: The placeholders.
    """
    remote = {place: layer for place, layer in layers_in(cache).items() if place not in own}
    put_layers(cache, {place: replacements[place] for place in remote if place in replacements})
    try:
        yield
    finally:
        put_layers(cache, remote)
