"""Tells what a forward changes beside parameters and buffers, and where code looks that a cut changes."""

import threading
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from gpipe.findings.references import Place, in_words, read_by_called, read_by_function, references
from gpipe.torch_private.modules import hooks_of
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
THREAD_LOCALS = (
    "{places}: a threading.local, and rank threads do not see what the caller's thread has set there. Use a "
    "contextvars.ContextVar, which they do see, or driver='lockstep'"
)
GRAD_FNS = (
    "{places}: its code asks for autograd's node of a tensor (grad_fn). Of what crosses a cut that is a node of the "
    "pipe's own, and hooks on it do not reach the one behind; put hooks on tensors (tensor.register_hook)"
)
DEEP = 3  # containers and objects around a value


class TensorVersion(NamedTuple):
    """A tensor, and how often it had been changed in place."""

    tensor: Tensor
    version: int


Value: TypeAlias = object
Snapshot: TypeAlias = Mapping[Place, Value]
"""By place numbers, versions of tensors, and lists and dicts of both."""


def snapshot(layers: Mapping[str, nn.Module]) -> Snapshot:
    """What layers, by their words, refer to now, to be compared with later."""
    return {place: _noted(value) for place, value in references(layers)}


def _noted(value: object, depth: int = DEEP) -> Value:
    match value:
        case nn.Parameter() | nn.Module() | type():
            return None
        case Tensor():
            return TensorVersion(value, version(value))
        case bool() | int() | float() | complex() | str():
            return value
        case list() | tuple() if depth:
            return [_noted(item, depth - 1) for item in value]
        case dict() if depth:
            return {key: _noted(item, depth - 1) for key, item in value.items()}
        case _ if depth and type(value).__module__ not in ("builtins", "torch"):
            held = getattr(value, "__dict__", None)
            return _noted(held, depth - 1) if isinstance(held, dict) else None
    return None


def find_side_effects(before: Snapshot, after: Snapshot, *, recomputes: bool) -> list[str]:
    """Tells of attributes, globals and closures that a step has changed."""
    changed = {place: now for place, now in after.items() if _differ(before.get(place), now)}
    tensors = [place for place, now in changed.items() if _has_tensors(now)]
    counts = [place for place in changed if place in before and place not in tensors] if recomputes else []
    return [text.format(places=in_words(places)) for text, places in ((TENSORS, tensors), (COUNTS, counts)) if places]


def find_thread_locals(layers: Mapping[str, nn.Module]) -> list[str]:
    """Tells of layers that read a threading.local."""
    places = [place for place, value in references(layers) if isinstance(value, threading.local)]
    return [THREAD_LOCALS.format(places=in_words(places))] if places else []


def find_grad_fn_readers(layers: Mapping[str, nn.Module]) -> list[str]:
    """Tells of forwards that look at the `grad_fn` of a tensor."""
    places = [
        (words, f"{type(module).__name__}.forward")
        for words, root in layers.items()
        for module in root.modules()
        if "grad_fn" in getattr(getattr(type(module).forward, "__code__", None), "co_names", ())
    ]
    return [GRAD_FNS.format(places=in_words(places))] if places else []


def buffers_of(layers: Mapping[str, nn.Module]) -> dict[nn.Module, list[TensorVersion]]:
    """The versions of the buffers of modules, to be compared with later."""
    modules = {module: None for root in layers.values() for module in root.modules()}
    return {m: [TensorVersion(b, version(b)) for b in m._buffers.values() if b is not None] for m in modules}


def find_buffer_readers(
    layers: Mapping[str, nn.Module], loss_fn: object, before: Mapping[nn.Module, list[TensorVersion]]
) -> list[str]:
    """Tells of functions, of the loss or of layers, that read modules whose buffers a step has changed."""
    after = buffers_of(layers)
    changed = {module for module, versions in after.items() if _differ(before.get(module, []), versions)}
    readers: list[tuple[str, object, set[nn.Module]]] = [("loss_fn", loss_fn, set())]
    for words, root in layers.items():
        own = set(root.modules())
        readers += [
            (words, function, own) for m in own for function in (type(m).forward, *vars(m).values(), *hooks_of(m))
        ]
    places = [
        (words, f"which reads {name}")
        for words, function, own in readers
        for name, value in (read_by_called(function) if words == "loss_fn" else read_by_function(function))
        if not changed.isdisjoint(_modules_in(value) - own)
    ]
    return [BUFFERS.format(places=in_words(places))] if places else []


def _modules_in(value: object) -> set[nn.Module]:
    """A module with its parts, or those in a container."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return {part for module in held if isinstance(module, nn.Module) for part in module.modules()}


def _differ(one: Value, other: Value) -> bool:
    match one, other:
        case (TensorVersion(), TensorVersion()):
            return one.tensor is not other.tensor or one.version != other.version
        case (list(), list()):
            return len(one) != len(other) or any(map(_differ, one, other))
        case (dict(), dict()):
            return one.keys() != other.keys() or any(_differ(one[key], other[key]) for key in one)
    return type(one) is not type(other) or one != other


def _has_tensors(value: Value) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, TensorVersion)
