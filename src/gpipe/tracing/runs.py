"""Runs of a model that leave it as it was.

A value that a pipe is given becomes the arguments of a model's forward, and says which trace is its own.
"""

import enum
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gpipe._torch.dispatcher import is_fake
from gpipe.stages.buffers import untouched
from gpipe.stages.layout import copy_of
from gpipe.stages.microbatch import MicroBatches
from gpipe.stages.tree import Tree, replace_tensors, version
from gpipe.tracing.values import CannotSplitError, is_carried

T = TypeVar("T")


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back what traces inside change: modules, their state, torch's generator. Inside there is a graph.

    It shows what torch does not: functions of autograd.
    """
    with untouched(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            yield
        except Exception as error:
            if not isinstance(error, CannotSplitError):
                error.add_note(ON_SAMPLE.format(model=type(model).__name__))
            raise


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Has a model be in training mode or not, and puts back the mode of each module."""
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def watched(model: nn.Module, run: Callable[[], T]) -> tuple[T, dict[str, Tensor | None]]:
    """What a run gives, and the buffers that it wrote, with their new values; they are put back."""
    before = {
        f"{path}.{key}".lstrip("."): (module._buffers, key, buffer, copy_of(buffer), version(buffer))
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and not is_fake(buffer)
    }
    made = run()
    changed: dict[str, Tensor | None] = {}
    with torch.no_grad():
        for name, (held, key, buffer, copy, was) in before.items():
            now = held.get(key)
            if now is not buffer or version(buffer) != was:
                changed[name] = None if now is None else copy_of(now)
                held[key] = buffer
                buffer.copy_(copy)
    return made, changed


def copied(value: Any) -> Any:
    """Inputs for a forward to keep: it may work on them in place."""
    return replace_tensors(value, copy_of)


SETTINGS = (bool, str, type(None), enum.Enum)
"""Kinds of values that switch something: with others, a forward may take another path."""
TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format, type)


def settings_of(held: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    """The attributes among these that switch something."""
    return tuple((name, value) for name, value in held.items() if isinstance(value, SETTINGS))


def kind_of(leaf: Any) -> object:
    """What of an input a path depends on: not a tensor's size, nor what a number is; of an object, its settings.

    >>> kind_of(1.5), kind_of("mean"), kind_of(print)
    (<class 'float'>, "'mean'", (<class 'builtin_function_or_method'>, ()))
    """
    if isinstance(leaf, Tensor):
        return "tensor", is_carried(leaf), leaf.dim()
    if isinstance(leaf, (*SETTINGS, *TORCHS)):
        return repr(leaf)
    if isinstance(leaf, (int, float)):
        return type(leaf)
    return type(leaf), settings_of(getattr(leaf, "__dict__", {}))


def call(model: nn.Module, given: "ForwardArguments") -> Any:
    """What a model by itself gives; it stays as it was."""
    return watched(model, lambda: model(*copied(given.args), **copied(given.kwargs)))[0]


ON_SAMPLE = (
    "while the {model} was traced, whole and in layers: on the sample, or on the first mini-batch of another kind; "
    "give what model(...) takes: a dict for keywords, anything else for its one argument"
)


def plain(value: Tree) -> Tree:
    """A mapping of a class that torch's trees do not know, such as what a tokenizer gives, as a dict."""
    if isinstance(value, MicroBatches):
        return MicroBatches([plain(part) for part in value])
    return dict(value) if isinstance(value, UserDict) else value


class ForwardArguments(NamedTuple):
    """The arguments of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(model: nn.Module, value: Tree) -> ForwardArguments:
    """A mapping goes in as keywords, where the forward takes its keys; anything else is the one argument.

    >>> class Net(nn.Module):
    ...     def forward(self, x, mask=None): return x
    >>> arguments(Net(), {"x": 1}), arguments(Net(), {"y": 1})
    (ForwardArguments(args=(), kwargs={'x': 1}), ForwardArguments(args=({'y': 1},), kwargs={}))
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        try:
            inspect.signature(model.forward).bind(**value)
        except TypeError:
            return ForwardArguments((dict(value),), {})
        return ForwardArguments((), dict(value))
    return ForwardArguments((value,), {})


def without_cache(model: nn.Module, value: Tree) -> Tree:
    """What has a model keep no cache for generation: each layer would have its own part of it alone."""
    config = getattr(model, "config", None)
    inner = vars(config).values() if hasattr(config, "__dict__") else ()  # of a text model within, or a decoder
    keeps = any(getattr(one, "use_cache", None) is not None for one in (config, *inner))
    if not (keeps and takes(model, "use_cache")):
        return value
    if isinstance(value, Mapping):
        return {"use_cache": False, **value}
    first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    named = first is not None and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {first.name: value, "use_cache": False} if named and first is not None else value


def takes(model: nn.Module, keyword: str) -> bool:
    """Whether a forward takes a keyword, if only among others."""
    parameters = inspect.signature(model.forward).parameters
    return keyword in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def names_taken(model: nn.Module) -> str:
    """The names of what a forward takes, one after another."""
    return ", ".join(inspect.signature(model.forward).parameters)
