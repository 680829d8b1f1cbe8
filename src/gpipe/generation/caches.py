"""The cache of a model for generation, by its layers: those that a stage fills, and what stands for those of others.

A cache is any object with a list `layers`, each of which holds the tensors of one block, as those of transformers do;
that of an encoder-decoder holds two. A forward asks it how long it is, of any layer: the masks and positions of all
blocks are made of that. So while a stage walks through the forward, the layers that other stages fill are stand-ins:
what they were before this forward, without values. Whoever computes with one is told so.
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
"""A layer of a cache: 0 in the decoder's own, or 1 in that of what it takes from an encoder; its number there."""
Layout: TypeAlias = dict[str, Any]
"""What JSON can hold of a layer: of floats their shape alone."""

FEW = 64
"""Whole numbers of a layer, its lengths, that a layout has itself."""
PARTS = ("self_attention_cache", "cross_attention_cache")


def is_cache(value: object) -> bool:
    """Whether a value is a cache by layers."""
    return all(hasattr(value, part) for part in PARTS) or (
        isinstance(getattr(value, "layers", None), list) and hasattr(value, "get_seq_length")
    )


def _parts(cache: Any) -> list[Any]:
    return [getattr(cache, part) for part in PARTS] if hasattr(cache, PARTS[1]) else [cache]


def layers_in(cache: Any) -> dict[Place, Any]:
    """All layers of a cache."""
    return {(part, at): layer for part, some in enumerate(_parts(cache)) for at, layer in enumerate(some.layers)}


def put(cache: Any, layers: Mapping[Place, Any]) -> None:
    """Has a cache have these layers."""
    for (part, at), layer in layers.items():
        _parts(cache)[part].layers[at] = layer


def put_stand_ins(cache: Any, layouts: Mapping[Place, Layout]) -> None:
    """Has a cache have stand-ins of these layouts; it may be one that grows where it is filled."""
    parts = _parts(cache)
    for (part, at), layout in layouts.items():
        layers = parts[part].layers
        while len(layers) <= at:
            layers.append(parts[part].layer_class_to_replicate())
        layers[at] = stand_in(layers[at], layout)
        if part:
            cache.is_updated[at] = True


def put_back(cache: Any, before: Any) -> None:
    """Has a cache be what another is."""
    put(cache, layers_in(before))
    vars(cache).update({name: value for name, value in vars(before).items() if type(value) is dict})


def copy_of_cache(cache: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A cache of its own, with others in place of its tensors."""
    made = copy.copy(cache)
    own = {name: value for name, value in vars(made).items() if type(value) in (list, dict) and name != "layers"}
    vars(made).update(map_tensors(own, change))
    if hasattr(made, PARTS[1]):
        vars(made).update({part: copy_of_cache(getattr(made, part), change) for part in PARTS})
    else:
        made.layers = [_changed(layer, change) for layer in made.layers]
    return made


def _changed(layer: Any, change: Callable[[Tensor], Tensor]) -> Any:
    made = copy.copy(layer)
    vars(made).update({name: map_tensors(value, change) for name, value in vars(made).items()})
    return made


def bytes_of(layer: Any) -> int:
    """The bytes that a layer of a cache holds."""
    return sum(tensor.nbytes for value in vars(layer).values() for tensor in tensors_in(value))


def grow(layer: Any, new: int | None, length: int) -> None:
    """Has a layer without values, if it keeps keys and values as they come, hold `new` tokens' less the last.

    Where that is None, as many as make `length` in all.
    """
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if getattr(layer, "is_compileable", False) or not (isinstance(keys, Tensor) and isinstance(values, Tensor)):
        return
    if keys.numel() and (tokens := (length - keys.shape[-2] if new is None else new) - 1) > 0:
        layer.keys, layer.values = keys.to("meta"), values.to("meta")
        layer.update(*(one.new_empty((*one.shape[:-2], tokens, one.shape[-1])) for one in (layer.keys, layer.values)))


def marks(cache: Any) -> dict[Place, object]:
    """What shows, when it is another, that a layer was filled."""
    return {
        place: [(id(tensor), version(tensor)) for value in vars(layer).values() for tensor in tensors_in(value)]
        for place, layer in layers_in(cache).items()
    }


def layout_of(layer: Any) -> Layout:
    """What a layer holds, without the values of its floats."""
    return {name: said for name, value in vars(layer).items() if (said := _said(value)) is not None}


def _said(value: Any) -> Any:
    if isinstance(value, Tensor):
        told = not (value.is_floating_point() or value.is_meta or value.numel() > FEW)
        return {"tensor": [str(value.dtype), list(value.shape), value.tolist() if told else None]}
    if isinstance(value, dict):
        return {"keys": list(value), "items": [_said(item) for item in value.values()]}
    if isinstance(value, (list, tuple)):
        return {"items": [_said(item) for item in value]}
    if isinstance(value, torch.device):
        return {"device": True}
    return {"plain": value} if isinstance(value, SENT_BY_VALUE) else None


def stand_in(layer: Any, layout: Layout) -> Any:
    """A layer of the same kind as this, of such a layout, without values."""
    made = copy.copy(layer)
    vars(made).update({name: _made(said) for name, said in layout.items()})
    return made


def _made(said: Any) -> Any:
    match said:
        case {"tensor": [dtype, shape, None]}:
            return torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        case {"tensor": [dtype, _, values]}:
            return torch.tensor(values, dtype=DTYPES[dtype], device="cpu")
        case {"keys": keys, "items": items}:
            return dict(zip(keys, map(_made, items), strict=True))
        case {"items": items}:
            return list(map(_made, items))
        case {"device": True}:
            return torch.device("meta")
        case {"plain": value}:
            return value
    return None


def stand_ins(cache: Any) -> dict[Place, Any]:
    """What stands for each layer of a cache, as it is now."""
    return {place: stand_in(layer, layout_of(layer)) for place, layer in layers_in(cache).items()}


@contextmanager
def seen_by(cache: Any, own: Collection[Place], before: Mapping[Place, Any]) -> Iterator[None]:
    """Has a cache have, of what others than one's own are, these stand-ins."""
    real = {place: layer for place, layer in layers_in(cache).items() if place not in own}
    put(cache, {place: before[place] for place in real if place in before})
    try:
        yield
    finally:
        put(cache, real)
