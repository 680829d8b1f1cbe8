"""What layers keep beside parameters and buffers, and where their code looks: told, since a cut may change it."""

import threading
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from gpipe.values.tree import version

TENSORS = (
    "{places}: a forward leaves tensors there. If that is a cache of the module's own, never mind. Whoever else "
    "reads it, another layer, a hook or the loss, may see it of another micro-batch, since several are under way, or "
    "of a recompute: have the layer stash it (stash = ('aux',), returning (out, {{'aux': tensor}})) and pop it where "
    "it is used; a loss does so too, by loss_fn.pop = ('aux',) and an argument of that name"
)
COUNTS = (
    "{places}: a forward changes it, and a recompute will again; keep what counts in a buffer (register_buffer), "
    "which recomputes leave as they found it, or use remat='never'"
)
BUFFERS = (
    "{places}, of which a forward changes buffers: since several micro-batches are under way, they may be those of "
    "another one when they are read there. Have the layer stash what is needed of them (stash = ('aux',)), and pop "
    "it where it is used; a loss does so too, by loss_fn.pop = ('aux',)"
)
OF_THREADS = (
    "{places}: a threading.local, and rank threads do not see what the caller's thread has set there. Use a "
    "contextvars.ContextVar, which they do see, or driver='lockstep'"
)
GRAPHS = (
    "{places}: its code asks for autograd's node of a tensor (grad_fn). Of what crosses a cut that is a node of the "
    "pipe's own, and hooks on it do not reach the one behind; put hooks on tensors (tensor.register_hook)"
)
OF_TORCH = frozenset(vars(nn.Module()))
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
DEEP = 3  # containers and objects around a value


class Seen(NamedTuple):
    """A tensor as it was seen."""

    tensor: Tensor
    version: int


Value: TypeAlias = object
Place: TypeAlias = tuple[str, str]
"""A layer in words, and where in it."""
Kept: TypeAlias = Mapping[Place, Value]
"""Numbers, tensors as they were seen, and lists and dicts of both."""


def kept_by(layers: Mapping[str, nn.Module]) -> Kept:
    """What layers, by their words, keep now, to be compared with later."""
    return {place: _seen(value) for place, value in _all_kept(layers)}


def _all_kept(layers: Mapping[str, nn.Module]) -> Iterator[tuple[Place, object]]:
    """What modules have as attributes, and what their functions read beside these."""
    for words, root in layers.items():
        for path, module in root.named_modules():
            own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
            for name in own.keys() - _set_by_torch(module):
                yield (words, f"its attribute {path and path + '.'}{name}"), own[name]
            for function in (type(module).forward, *own.values(), *_hooks_of(module)):
                for name, value in _read_by(function):
                    yield (words, f"{name}, which it reads"), value


def _hooks_of(module: nn.Module) -> list[object]:
    return [hook for held in HOOKS for hook in vars(module)[held].values()]


def _set_by_torch(module: nn.Module) -> set[str]:
    """The attributes that torch's own weight and spectral norm set before each forward."""
    return {getattr(hook, "name", "") for hook in module._forward_pre_hooks.values()}


def _read_by(function: object) -> Iterator[tuple[str, object]]:
    """What a function finds in its closure and among the globals."""
    inner = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(inner, FunctionType):
        names = inner.__code__.co_names
        yield from ((name, inner.__globals__[name]) for name in names if name in inner.__globals__)
        cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
        yield from ((name, _content(cell)) for name, cell in cells)


def _is_users(value: object) -> bool:
    return isinstance(value, (FunctionType, MethodType)) and not str(value.__module__).startswith("torch")


def mentions_random(module: nn.Module) -> bool:
    """Whether what a module runs reads something named random, also by functions that it calls."""
    todo = [value for value in (type(module).forward, *vars(module).values()) if _is_users(value)]
    seen: set[int] = set()
    while todo:
        function = todo.pop()
        if id(function) not in seen:
            seen.add(id(function))
            read = dict(_read_by(function))
            if "random" in read or "random" in getattr(getattr(function, "__code__", None), "co_names", ()):
                return True
            todo += [value for value in read.values() if _is_users(value)]
    return False


def _held_by(called: object) -> Iterator[tuple[str, object]]:
    """What a function reads, or an object that is called: its attributes too."""
    if isinstance(called, (FunctionType, MethodType)):
        yield from _read_by(called)
    else:
        yield from getattr(called, "__dict__", {}).items()
        yield from _read_by(getattr(type(called), "forward", getattr(type(called), "__call__", None)))  # noqa: B004


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _seen(value: object, depth: int = DEEP) -> Value:
    match value:
        case nn.Parameter() | nn.Module() | type():
            return None
        case Tensor():
            return Seen(value, version(value))
        case bool() | int() | float() | complex() | str():
            return value
        case list() | tuple() if depth:
            return [_seen(item, depth - 1) for item in value]
        case dict() if depth:
            return {key: _seen(item, depth - 1) for key, item in value.items()}
        case _ if depth and type(value).__module__ not in ("builtins", "torch"):
            held = getattr(value, "__dict__", None)
            return _seen(held, depth - 1) if isinstance(held, dict) else None
    return None


def examine_kept(before: Kept, after: Kept, *, recomputes: bool) -> list[str]:
    """What can be said of what a step has changed."""
    changed = {place: now for place, now in after.items() if _differ(before.get(place), now)}
    tensors = [place for place, now in changed.items() if _has_tensors(now)]
    counts = [place for place in changed if place in before and place not in tensors] if recomputes else []
    return [
        text.format(places=_in_words(places)) for text, places in ((TENSORS, tensors), (COUNTS, counts)) if places
    ]


def examine_threads(layers: Mapping[str, nn.Module]) -> list[str]:
    """What can be said of layers that look at what each thread has for itself."""
    places = [place for place, value in _all_kept(layers) if isinstance(value, threading.local)]
    return [OF_THREADS.format(places=_in_words(places))] if places else []


def examine_nodes(layers: Mapping[str, nn.Module]) -> list[str]:
    """What can be said of layers that look behind the tensors that they are given."""
    places = [
        (words, f"{type(module).__name__}.forward")
        for words, root in layers.items()
        for module in root.modules()
        if "grad_fn" in getattr(getattr(type(module).forward, "__code__", None), "co_names", ())
    ]
    return [GRAPHS.format(places=_in_words(places))] if places else []


def buffers_of(layers: Mapping[str, nn.Module]) -> dict[nn.Module, list[Seen]]:
    """The buffers of modules as they are seen, to be compared with later."""
    modules = {module: None for root in layers.values() for module in root.modules()}
    return {m: [Seen(b, version(b)) for b in m._buffers.values() if b is not None] for m in modules}


def examine_readers(
    layers: Mapping[str, nn.Module], loss_fn: object, before: Mapping[nn.Module, list[Seen]]
) -> list[str]:
    """What can be said of functions, of the loss or of layers, that read modules whose buffers a step has changed."""
    after = buffers_of(layers)
    changed = {module for module, seen in after.items() if _differ(before.get(module, []), seen)}
    readers: list[tuple[str, object, set[nn.Module]]] = [("loss_fn", loss_fn, set())]
    for words, root in layers.items():
        own = set(root.modules())
        readers += [
            (words, function, own) for m in own for function in (type(m).forward, *vars(m).values(), *_hooks_of(m))
        ]
    places = [
        (words, f"which reads {name}")
        for words, function, own in readers
        for name, value in (_held_by(function) if words == "loss_fn" else _read_by(function))
        if not changed.isdisjoint(_modules_in(value) - own)
    ]
    return [BUFFERS.format(places=_in_words(places))] if places else []


def _modules_in(value: object) -> set[nn.Module]:
    """A module with its parts, or those in a container."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return {part for module in held if isinstance(module, nn.Module) for part in module.modules()}


def _in_words(places: list[Place]) -> str:
    return "; ".join(dict.fromkeys(f"{layer}, {where}" for layer, where in places))


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
