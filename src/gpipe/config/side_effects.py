"""Tells what a forward changes beside parameters and buffers, and where code looks that a cut changes.

Tells of random numbers that no key of a scope reaches: a layer's own generators, Python's and numpy's.
"""

import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from gpipe._torch.modules import hooks_of
from gpipe.stages.side_effects import (
    Place,
    Snapshot,
    TensorVersion,
    Value,
    read_by_called,
    read_by_function,
    references,
    values_differ,
)
from gpipe.stages.tree import version


def mentions_random(module: nn.Module) -> bool:
    """Whether what a module runs reads something named random, also by functions that it calls."""
    todo = [value for value in (type(module).forward, *vars(module).values()) if _is_users(value)]
    seen: set[int] = set()
    while todo:
        function = todo.pop()
        if id(function) not in seen:
            seen.add(id(function))
            read = dict(read_by_function(function))
            if "random" in read or "random" in getattr(getattr(function, "__code__", None), "co_names", ()):
                return True
            todo += [value for value in read.values() if _is_users(value)]
    return False


def _is_users(value: object) -> bool:
    return isinstance(value, (FunctionType, MethodType)) and not str(value.__module__).startswith("torch")


def in_words(places: list[Place]) -> str:
    """The places of references, each once."""
    return "; ".join(dict.fromkeys(f"{layer}, {where}" for layer, where in places))


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


def find_side_effects(before: Snapshot, after: Snapshot, seen: Sequence[str], *, recomputes: bool) -> list[str]:
    """Tells of attributes, globals and closures that a step has changed, but for what was seen to in a backward."""
    said = "\n".join(seen)
    changed = {
        place: now
        for place, now in after.items()
        if values_differ(before.get(place), now) and in_words([place]) not in said
    }
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
    changed = {module for module, versions in after.items() if values_differ(before.get(module, []), versions)}
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


def _has_tensors(value: Value) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, TensorVersion)


UNKEYED = (
    "such draws are not keyed: they depend on what was drawn before, and the recompute of a forward draws others, so "
    "that its gradients are wrong; draw by torch's functions, without a generator"
)

RandomStates: TypeAlias = Mapping[str, object]
"""The states of the generators of Python and numpy, by the name of their module."""


def find_own_generators(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Tells of generators that modules have as attributes."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    for name, layer in layers.items():
        for path, module in layer.named_modules(prefix=name):
            for attribute, value in vars(module).items():
                if isinstance(value, kinds):
                    yield f"{path}.{attribute} is a random generator of its own: {UNKEYED}"


def random_states(told: Collection[str] = ()) -> RandomStates:
    """The states of Python's and numpy's generators, but for those of which all is told; compared behind a step."""
    readers: dict[str, Callable[[], object]] = {
        "random": random.getstate,
        "numpy.random": lambda: _comparable(np.random.get_state(legacy=False)),
    }
    return {name: read() for name, read in readers.items() if name not in told}


def _comparable(state: object) -> object:
    """A state of numpy's as something that can be compared: an array cannot."""
    if isinstance(state, Mapping):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def find_unkeyed_draws(
    layers: Mapping[str, nn.Module], before: RandomStates, after: RandomStates, step: int
) -> dict[str, str]:
    """Tells, by module, that somebody drew from Python's or numpy's generator in a step."""
    drawn = [name for name, state in after.items() if state != before[name]]
    if not drawn:
        return {}
    mention = [words for words, layer in layers.items() if any(map(mentions_random, layer.modules()))]
    elsewhere = ", or in another thread" if _other_threads() else ""
    where = f"perhaps in {', '.join(mention) or 'a layer or loss_fn'}{elsewhere}"
    return {name: f"something was drawn by the module {name} in step {step}, {where}: {UNKEYED}" for name in drawn}


def _other_threads() -> bool:
    """Whether there are threads that are neither this one nor a pipe's."""
    threads = set(threading.enumerate()) - {threading.current_thread()}
    return any(not thread.name.startswith("gpipe") for thread in threads)
