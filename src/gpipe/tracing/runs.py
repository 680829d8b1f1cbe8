"""Runs a model and restores it, and converts a micro-batch to the arguments of its forward."""

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
    "gpipe was tracing {model} on the sample, or on the first mini-batch with different keys or settings. Pass the "
    "arguments of model(...): a dict of keyword arguments, or the only argument. [model-rejects-sample]"
)
FAILS_SPLIT = (
    "{place} fails with {error} only in the split {model}. This code reads a value that another block stores instead "
    "of returning it. Pass the value as an argument, or choose other blocks: gpipe.layers_of(model, sample, "
    "blocks=[...]). [split-forward-fails]"
)
FAILS_SPLIT_AFTER_STORE = (
    "{place} fails with {error} only in the split {model}. This code reads a stored value, and the forward stores "
    "tensors in {places}. Pass the value as an argument, or choose other blocks: gpipe.layers_of(model, sample, "
    "blocks=[...]). [split-forward-fails]"
)


@contextmanager
def unchanged(model: nn.Module, state: ReachableState | None = None) -> Iterator[ReachableState]:
    """Restores a model, its modes and all state that it can reach, and the random number generator of torch.

    Grad mode is enabled inside the context, because functions of autograd are visible only in a graph.

    Args:
        model: The model that runs inside.
        state: The current state of the model, if it has been copied already. Copying the state is slow.
    """
    with untouched(model, state=state) as state, torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            yield state
        except Exception as error:
            if not isinstance(error, CannotSplitError):
                error.add_note(ON_SAMPLE.format(model=type(model).__name__))
            raise
        collecting = [module for module in model.modules() if COLLECTOR in vars(module)]
    # After the model is restored. Otherwise restoring a part of it could remove the hooks of that part only.
    for module in collecting:
        sys.modules[COLLECTING].maybe_install_capturing_hooks(module)


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, Tensor | None]]:
    """Restores the buffers of a model after the context. Yields a dict that then has the values of changed buffers.

    gpipe compares the values of buffers, because a write through `.data` does not change the version of a tensor.
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
        """Returns the output of a model for copies of the arguments, because the model may change them in place."""
        copied: Any = replace_tensors((self.args, self.kwargs), copy_of)
        return model(*copied[0], **copied[1])


ERRORS_OF_CODE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions that code raises if a value is missing or has an unexpected type or shape."""
NO_MEMORY = "can't allocate memory"  # The words of the RuntimeError that torch's CPU allocator raises.


def lacks_memory(error: BaseException) -> bool:
    """Whether an error means that memory was exhausted."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or NO_MEMORY in str(error)


def is_of_code(error: Exception) -> bool:
    """Whether a missing value may be the cause of an error. Its type must be in `ERRORS_OF_CODE`, not a subclass."""
    is_of_user = type(error).__module__.partition(".")[0] not in ("builtins", "torch")
    return isinstance(error, ERRORS_OF_CODE) and not is_of_user and not lacks_memory(error)


def run_split(
    model: nn.Module, arguments: ForwardArguments, run: Callable[[], T], stored: Callable[[], Sequence[str]] = list
) -> T:
    """Calls `run`, which runs the layers of a model one by one, and returns its result.

    Args:
        model: The model.
        arguments: The arguments of its forward in `run`.
        run: The function that runs the layers. If it fails, it is called again, to find out whether the error is
            reproducible.
        stored: Returns the names of attributes in which the forward has stored tensors, for the message.

    Raises:
        CannotSplitError: If `run` fails twice and the model itself does not fail.
    """
    try:
        return run()
    except Exception as error:
        if not is_of_code(error):
            raise
        with watched(model):
            passes = _passes(lambda: arguments.call(model))
        if not passes:
            raise
        places = stored()
        if _passes(run):
            raise
        names = {id(module): name for name, module in model.named_modules() if name}
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        failed = [names[module] for frame in frames if (module := id(frame.f_locals.get("self"))) in names]
        raise CannotSplitError(
            (FAILS_SPLIT_AFTER_STORE if places else FAILS_SPLIT).format(
                place=failed[-1] if failed else "The forward",
                model=type(model).__name__,
                error=f"{type(error).__name__}: {error}",
                places=", ".join(places),
            )
        ) from error


def _passes(run: Callable[[], object]) -> bool:
    with suppress(Exception):
        run()
        return True
    return False


SETTINGS = (bool, str, type(None), enum.Enum)
"""Types of values on which control flow usually depends."""
OPTIONS_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, type)


def settings_of(attributes: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    """Returns the attributes on which control flow may depend: booleans, strings, None and enum members."""
    return tuple([(name, value) for name, value in attributes.items() if isinstance(value, SETTINGS)])


def kind_of(leaf: Any) -> object:
    """Returns the properties of an input on which the control-flow path may depend.

    - tensor: the number of dimensions, and whether it is sent only to the layers that use it (not its shape),
    - boolean, string, None, enum member or option of torch: its value,
    - integer or float: its type,
    - any other object: its type and its settings.
    """
    if isinstance(leaf, Tensor):
        return "tensor", is_carried(leaf), leaf.dim()
    if isinstance(leaf, (*SETTINGS, *OPTIONS_OF_TORCH)):
        return repr(leaf)
    if isinstance(leaf, (int, float)):
        return type(leaf)
    return type(leaf), settings_of(getattr(leaf, "__dict__", {}))


def arguments(model: nn.Module, value: Tree) -> ForwardArguments:
    """Converts a mapping to keyword arguments if the forward accepts its keys, and wraps any other value."""
    return arguments_of_each(model, [value])[0]


def arguments_of_each(model: nn.Module, values: Sequence[Tree]) -> list[ForwardArguments]:
    """Returns the arguments of one forward per value, as `arguments` does."""
    takes_keys = cache(lambda keys: can_be_called(model.forward, **dict.fromkeys(keys)))
    return [
        ForwardArguments((), dict(value))
        if isinstance(value, Mapping) and takes_keys(tuple(value))
        else ForwardArguments((dict(value) if isinstance(value, Mapping) else value,), {})
        for value in values
    ]


def can_be_called(function: Callable[..., object], *args: object, **kwargs: object) -> bool:
    """Whether the signature of a function accepts these arguments."""
    with suppress(TypeError, ValueError):
        inspect.signature(function).bind(*args, **kwargs)
        return True
    return False


def without_cache(model: nn.Module, value: Tree) -> Tree:
    """Adds `use_cache=False` to an input if the model's forward accepts this argument.

    With a cache, each stage would fill only the entries of its own layers.
    """
    config = getattr(model, "config", None)
    inner = vars(config).values() if hasattr(config, "__dict__") else ()  # Settings of a text model or decoder.
    has_setting = any(getattr(settings, "use_cache", None) is not None for settings in (config, *inner))
    if not (has_setting and takes(model.forward, "use_cache")):
        return value
    if isinstance(value, Mapping):
        return {"use_cache": False, **value}
    first = next(iter(inspect.signature(model.forward).parameters.values()))
    return {first.name: value, "use_cache": False} if first.kind is first.POSITIONAL_OR_KEYWORD else value


def takes(function: Callable[..., object], keyword: str, *, by_name: bool = False) -> bool:
    """Whether a function accepts a keyword argument. If `by_name` is True, a parameter with this name is required."""
    parameters = inspect.signature(function).parameters
    has_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return keyword in parameters or (has_kwargs and not by_name)
