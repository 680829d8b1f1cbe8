"""Runs of a model that leave it as it was.

A value that a pipe is given becomes the arguments of a model's forward, and says which trace is its own.
"""

import enum
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gpipe._torch.dispatcher import is_fake
from gpipe.stages.buffers import is_changed, untouched
from gpipe.stages.memory_layout import copy_of, restore_values, version
from gpipe.stages.reachable_state import ReachableState
from gpipe.stages.tree import Tree, replace_tensors
from gpipe.tracing.shallow_copy import COLLECTING, COLLECTOR
from gpipe.tracing.trace import CannotSplitError, is_carried

T = TypeVar("T")

ON_SAMPLE = (
    "while the {model} was traced, whole and in layers: on the sample, or on the first mini-batch of another kind; "
    "give what model(...) takes: a dict for keywords, anything else for its one argument"
)
APART = (
    "in layers, {place} of the {model} fails with {error}, and in the model by itself it does not{left}. It looks "
    "for what another block, or the forward around it, has put where layers that run apart do not see it: into a "
    "dict, list or cache that all blocks are given, or on their parent. Return it where it is made and hand it on as "
    "an argument, or name other blocks (blocks=[...]), each with all that shares it. Layers of transformers that "
    "share keys and values do so: num_kv_shared_layers=0"
)


@contextmanager
def unchanged(model: nn.Module, state: ReachableState | None = None) -> Iterator[ReachableState]:
    """Restores a model, its modes and all state that it can reach, and the random number generator of torch.

    Gradients are recorded inside, because only a graph shows functions of autograd.

    Args:
        model: The model that runs inside.
        state: Its current state, if it has been copied already. To find all state takes long.
    """
    with untouched(model, state=state) as state, torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            yield state
        except Exception as error:
            if not isinstance(error, CannotSplitError):
                error.add_note(ON_SAMPLE.format(model=type(model).__name__))
            raise
        asked = [module for module in model.modules() if COLLECTOR in vars(module)]
    for module in asked:  # outside: else what puts back a part of the model may take off the hooks of that alone
        sys.modules[COLLECTING].maybe_install_capturing_hooks(module)


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, Tensor | None]]:
    """Collects the buffers that are written inside, with their new values, and puts the old values back at the end.

    Values are compared too, since a write through `.data` does not change a tensor's version.
    """
    before = {
        f"{path}.{key}".lstrip("."): (module._buffers, key, buffer, copy_of(buffer), version(buffer))
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and not is_fake(buffer)
    }
    changed: dict[str, Tensor | None] = {}
    yield changed
    with torch.no_grad():
        for name, (held, key, buffer, copy, was) in before.items():
            now = held.get(key)
            if is_changed(buffer, was, copy, now, exact=True):
                changed[name] = None if now is None else copy_of(now)
                held[key] = buffer
                restore_values(buffer, copy)


class ForwardArguments(NamedTuple):
    """The arguments of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, model: nn.Module) -> Any:
        """What a model by itself gives with copies of them, since it may work on them in place."""
        copied: Any = replace_tensors((self.args, self.kwargs), copy_of)
        return model(*copied[0], **copied[1])


LOOKS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
"""What is raised where something is looked for and not found, but for classes of others derived from these."""
NO_MEMORY = "can't allocate memory"  # what torch's allocator of the CPU says, in a RuntimeError


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was exhausted."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or NO_MEMORY in str(error)


def is_of_code(error: Exception) -> bool:
    """Whether an error is of a class, of Python's or torch's, that code raises where it lacks what it needs."""
    is_users = type(error).__module__.partition(".")[0] not in ("builtins", "torch")
    return isinstance(error, LOOKS) and not is_users and not lacks_memory(error)


def failing_apart(
    model: nn.Module, given: ForwardArguments, run: Callable[[], T], left: Callable[[], Sequence[str]] = list
) -> T:
    """What a run in layers gives; refused, with where it `left` tensors, if it alone fails, and each time."""
    try:
        return run()
    except Exception as error:
        if not is_of_code(error):
            raise
        with watched(model):
            passes = _passes(lambda: given.call(model))
        if not passes:
            raise
        places = left()
        if _passes(run):
            raise
        names = {id(module): name for name, module in model.named_modules() if name}
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        inside = [names[it] for frame in frames if (it := id(frame.f_locals.get("self"))) in names]
        raise CannotSplitError(
            APART.format(
                place=inside[-1] if inside else "the forward",
                model=type(model).__name__,
                error=f"{type(error).__name__}: {error}",
                left=f" (there its forward puts tensors into {', '.join(places)})" if places else "",
            )
        ) from error


def _passes(run: Callable[[], object]) -> bool:
    with suppress(Exception):
        run()
        return True
    return False


SETTINGS = (bool, str, type(None), enum.Enum)
"""Kinds of values that switch something: with others, a forward may take another path."""
TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format, type)


def settings_of(held: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    """The attributes among these that switch something."""
    return tuple([(name, value) for name, value in held.items() if isinstance(value, SETTINGS)])


def kind_of(leaf: Any) -> object:
    """What of an input a path depends on: not a tensor's size, nor what a number is; of an object, its settings."""
    if isinstance(leaf, Tensor):
        return "tensor", is_carried(leaf), leaf.dim()
    if isinstance(leaf, (*SETTINGS, *TORCHS)):
        return repr(leaf)
    if isinstance(leaf, (int, float)):
        return type(leaf)
    return type(leaf), settings_of(getattr(leaf, "__dict__", {}))


def arguments(model: nn.Module, value: Tree) -> ForwardArguments:
    """A mapping goes in as keywords, where the forward takes its keys; anything else is the one argument."""
    return arguments_of_each(model, [value])[0]


def arguments_of_each(model: nn.Module, values: Sequence[Tree]) -> list[ForwardArguments]:
    """The arguments of several forwards; whether one takes some keys is looked up once."""
    takes_keys = cache(lambda keys: can_be_called(model.forward, **dict.fromkeys(keys)))
    return [
        ForwardArguments((), dict(value))
        if isinstance(value, Mapping) and takes_keys(tuple(value))
        else ForwardArguments((dict(value) if isinstance(value, Mapping) else value,), {})
        for value in values
    ]


def can_be_called(function: Callable[..., object], *args: object, **kwargs: object) -> bool:
    """Whether a function takes such arguments."""
    with suppress(TypeError, ValueError):
        inspect.signature(function).bind(*args, **kwargs)
        return True
    return False


def without_cache(model: nn.Module, value: Tree) -> Tree:
    """What has a model keep no cache for generation: each layer would have its own part of it alone."""
    config = getattr(model, "config", None)
    inner = vars(config).values() if hasattr(config, "__dict__") else ()  # of a text model within, or a decoder
    keeps = any(getattr(one, "use_cache", None) is not None for one in (config, *inner))
    if not (keeps and takes(model.forward, "use_cache")):
        return value
    if isinstance(value, Mapping):
        return {"use_cache": False, **value}
    first = next(iter(inspect.signature(model.forward).parameters.values()))
    return {first.name: value, "use_cache": False} if first.kind is first.POSITIONAL_OR_KEYWORD else value


def takes(function: Callable[..., object], keyword: str, *, by_name: bool = False) -> bool:
    """Whether a function has a parameter of this name or, if not `by_name`, `**kwargs`."""
    parameters = inspect.signature(function).parameters
    others = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return keyword in parameters or (others and not by_name)
