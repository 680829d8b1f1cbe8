"""How a value that a pipe is given becomes the arguments of a model's forward."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from gpipe.values.tree import Tree


class Given(NamedTuple):
    """The arguments of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(model: nn.Module, value: Tree) -> Given:
    """A mapping goes in as keywords, where the forward takes its keys; anything else is the one argument.

    >>> class Net(nn.Module):
    ...     def forward(self, x, mask=None): return x
    >>> arguments(Net(), {"x": 1}), arguments(Net(), {"y": 1})
    (Given(args=(), kwargs={'x': 1}), Given(args=({'y': 1},), kwargs={}))
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        try:
            inspect.signature(model.forward).bind(**value)
        except TypeError:
            return Given((dict(value),), {})
        return Given((), dict(value))
    return Given((value,), {})


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
