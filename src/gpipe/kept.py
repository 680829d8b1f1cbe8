"""What modules keep beside parameters and buffers: attributes that a forward sets, and where their code looks."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import CellType
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from gpipe.run.skips import version

TENSORS = (
    "{names}: a forward leaves tensors there. If that is a cache of the module's own, never mind. Whoever else reads "
    "it, another layer or the loss, may see it of another micro-batch, since several are under way, or of a "
    "recompute: have the layer stash it (stash = ('aux',), returning (out, {{'aux': tensor}})) and pop it where it "
    "is used; a loss does so too, by loss_fn.pop = ('aux',) and an argument of that name"
)
COUNTS = (
    "{names}: a forward changes them, and a recompute will again; keep what counts in a buffer (register_buffer), "
    "which recomputes leave as they found it, or use remat='never'"
)
OF_THREADS = (
    "{names}: read by a layer's forward, and a threading.local; rank threads do not see what the caller's thread has "
    "set there. Use a contextvars.ContextVar, which they do see, or driver='lockstep'"
)
OF_TORCH = frozenset(vars(nn.Module()))


class Seen(NamedTuple):
    """A tensor as it was seen."""

    tensor: Tensor
    version: int


Value: TypeAlias = object
Kept: TypeAlias = Mapping[tuple[str, str], Value]
"""By module's path and attribute: numbers, tensors as they were seen, and lists and dicts of both."""


def kept_by(layers: Mapping[str, nn.Module]) -> Kept:
    """What modules keep now, to be compared with later."""
    return {
        (path, name): _seen(value)
        for layer, root in layers.items()
        for path, module in root.named_modules(prefix=layer)
        for name, value in vars(module).items()
        if name not in OF_TORCH and name not in _set_by_torch(module)
    }


def _set_by_torch(module: nn.Module) -> set[str]:
    """The attributes that torch's own weight and spectral norm set before each forward."""
    return {getattr(hook, "name", "") for hook in module._forward_pre_hooks.values()}


def _seen(value: object, depth: int = 2) -> Value:
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        return Seen(value, version(value))
    if isinstance(value, (bool, int, float, complex, str)):
        return value
    if depth and isinstance(value, (list, tuple)):
        return [_seen(item, depth - 1) for item in value]
    if depth and isinstance(value, dict):
        return {key: _seen(item, depth - 1) for key, item in value.items()}
    return None


def examine_kept(before: Kept, after: Kept, *, recomputes: bool) -> list[str]:
    """What can be said of attributes that a step has changed."""
    changed = {place: now for place, now in after.items() if _differ(before.get(place), now)}
    tensors = [place for place, now in changed.items() if _has_tensors(now)]
    counts = [place for place in changed if place not in tensors] if recomputes else []
    return [
        text.format(names=", ".join(f"{path}.{name}" for path, name in places))
        for text, places in ((TENSORS, tensors), (COUNTS, counts))
        if places
    ]


def _differ(one: Value, other: Value) -> bool:
    match one, other:
        case (Seen(), Seen()):
            return one.tensor is not other.tensor or one.version != other.version
        case (list(), list()):
            return len(one) != len(other) or any(map(_differ, one, other))
        case (dict(), dict()):
            return one.keys() != other.keys() or any(_differ(one[key], other[key]) for key in one)
    return type(one) is not type(other) or one != other


def _has_tensors(value: Value) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Seen)


def examine_threads(layers: Sequence[nn.Module]) -> list[str]:
    """What can be said of forwards that look at what each thread has for itself."""
    names = dict.fromkeys(name for layer in layers for module in layer.modules() for name in _locals_read_by(module))
    return [OF_THREADS.format(names=", ".join(names))] if names else []


def _locals_read_by(module: nn.Module) -> Iterator[str]:
    forward = type(module).forward
    code, around = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    read = {name: around.get(name) for name in getattr(code, "co_names", ())}
    cells = zip(getattr(code, "co_freevars", ()), getattr(forward, "__closure__", None) or (), strict=False)
    read |= {name: _content(cell) for name, cell in cells}
    read |= {f"{type(module).__name__}.{name}": value for name, value in vars(module).items()}
    yield from (name for name, value in read.items() if isinstance(value, threading.local))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None
