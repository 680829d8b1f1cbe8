"""A model's own modules, to be interpreted without being touched.

Open modules, those that blocks stand in, and those without parameters are shallow copies, whose code runs as it is.
Units, closed modules that have parameters or keep state, are stubs of classes derived from their own: they share all
attributes with the unit, and a call of one, or of its forward, goes to the interpreter that is under way. The user's
modules see none of it.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gpipe._torch.modules import hooks_of, is_called_by_forward
from gpipe.stages.memory_layout import version
from gpipe.tracing.parts import Parts
from gpipe.tracing.trace import CannotSplitError

REPLACED = "a part of {name} was replaced since the model was cut; make a new pipe of it"
HOOKED = (
    "{name} has a hook, and every layer walks through it, so the hook would run once for each, and see few values. "
    "Put the hook on a block or on a module inside of one; on a module without parameters, before the pipe is made"
)
OTHER_FORWARD = (
    "{name} has a forward that was set on it and is not its own method, as accelerate sets one for its hooks "
    "(device_map=, prepare), and blocks stand in it: it calls the model's modules where nothing sees them. Take it "
    "off (accelerate.hooks.remove_hook_from_submodules(model)), or set it on blocks"
)
COLLECTOR = "_output_capturing_hooks_installed"
"""Where a model of transformers looks whether it has hooks that collect (note "Collections" in trace.py)."""
COLLECTING = "transformers.utils.output_capturing"
"""The module of transformers that puts them into the modules of a model, once it is asked for what they give."""
CHANGES_BUFFER = (
    "the forward of the {model} changes the buffer {name} between blocks, and every layer would do so. Let a module "
    "inside of a block have it, or one of its own that is called. Rotary embeddings of the type 'dynamic' do so "
    "where a sequence is longer than max_position_embeddings: give shorter ones, or set it as high as they are long"
)


Attributes: TypeAlias = dict[tuple[str, str], object]
DEPTH = 3  # containers and objects around a value that are compared


def _noted(value: object) -> object:
    """What can be compared of an attribute; None if code of its class raises when it is read."""
    with suppress(Exception):
        return note(value)
    return None


@dataclass(frozen=True, eq=False)
class TensorVersion:
    """A tensor, and how often it had been changed in place."""

    tensor: Tensor | None
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorVersion) and self.tensor is other.tensor and self.version == other.version


def note(value: object, depth: int = DEPTH) -> object:
    """What can be compared of a value: numbers, versions of tensors, and both in containers and objects."""
    match value:
        case nn.Parameter() | nn.Module() | type():
            return None
        case Tensor():
            return TensorVersion(value, version(value))
        case bool() | int() | float() | complex() | str():
            return type(value), value
        case list() | tuple() if depth:
            return [note(item, depth - 1) for item in list(value)]  # other ranks' layers may change it meanwhile
        case dict() if depth:
            return {key: note(item, depth - 1) for key, item in list(value.items())}
        case _ if depth and type(value).__module__ not in ("builtins", "torch"):
            held = getattr(value, "__dict__", None)
            return note(held, depth - 1) if isinstance(held, dict) else None
    return None


class _Installer:
    """Has the user's module have the hooks, before its copy asks whether it has them: all copies share them then."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __bool__(self) -> bool:
        sys.modules[COLLECTING].maybe_install_capturing_hooks(self._module)
        return True


def own_hooks(module: nn.Module) -> list[object]:
    """The hooks of a module, but for those that put what it gives into lists: these do so for each layer."""
    return [hook for hook in hooks_of(module) if getattr(hook, "__module__", "") != COLLECTING]


class ShallowCopy:
    """A copy of a model that can be interpreted, with buffers on a device; `root` is called in place of the model."""

    def __init__(self, parts: Parts, device: torch.device | None = None) -> None:
        # while it is set, it is told of calls of units
        self.on_call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.parts, self._device = parts, device
        self.copies: dict[str, nn.Module] = {}
        self._made: dict[nn.Module, nn.Module] = {}  # for each of the user's modules what stands for it
        for name, unit in parts.units.items():
            self._made[unit] = self._stub(name, unit)
        for name, module in parts.copied.items():
            self._made[module] = self.copies[name] = object.__new__(type(module))
        self.root = self.copies[""]
        self.refresh()

    def _stub(self, name: str, unit: nn.Module) -> nn.Module:
        def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return unit(*args, **kwargs) if self.on_call is None else self.on_call(name, args, kwargs)

        kind = type(unit)

        @wraps(kind.forward)
        def forward(stub: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run: Callable[..., Any] = call if is_called_by_forward(unit) else kind.forward
            return run(stub, *args, **kwargs)

        own = {"__call__": call, "forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        metaclass: Any = type(kind)
        stub: nn.Module = object.__new__(metaclass(kind.__name__, (kind,), own))
        object.__setattr__(stub, "__dict__", vars(unit))
        return stub

    def refresh(self) -> None:
        """Has the copies be what the user's modules are now: what a forward has set on them is forgotten."""
        self._buffers: dict[tuple[str, str], tuple[Tensor | None, int]] = {}
        for name, copy in self.copies.items():
            module = self.parts.copied[name]
            shown = name or type(module).__name__
            if own_hooks(module):
                raise CannotSplitError(HOOKED.format(name=shown))
            own = dict(vars(module))
            for key, value in own.items():
                if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):  # that was set on it
                    own[key] = self._method_of_copy(value)
            if name in self.parts.opened:
                if own.get("forward") is not None and own["forward"] is vars(module)["forward"]:
                    raise CannotSplitError(OTHER_FORWARD.format(name=shown))
                own.setdefault(COLLECTOR, _Installer(module))
            own["_modules"] = self._parts_of(module, shown)
            own["_buffers"] = dict(module._buffers)
            for key, buffer in module._buffers.items():
                if buffer is not None and self._device is not None:
                    own["_buffers"][key] = buffer = buffer.to(self._device)
                self._buffers[name, key] = buffer, 0 if buffer is None else version(buffer)
            object.__setattr__(copy, "__dict__", own)

    def _method_of_copy(self, method: MethodType) -> MethodType:
        """The method of what stands for a module, in place of one that is bound to the module."""
        stands = self._made.get(method.__self__)  # type: ignore[call-overload]  # a module
        if stands is None:
            return method
        is_copy = type(stands) is type(method.__self__)  # a stub has a forward of its own
        return MethodType(method.__func__ if is_copy else getattr(type(stands), method.__name__), stands)

    def _parts_of(self, module: nn.Module, name: str) -> dict[str, nn.Module | None]:
        parts = module._modules.items()
        if any(part is not None and part not in self._made for _, part in parts):
            raise CannotSplitError(REPLACED.format(name=name))
        return {key: None if part is None else self._made[part] for key, part in parts}

    def refuse_changed_buffers(self, written: Collection[str] = ()) -> None:
        """Rejects changes of buffers that every layer reads: those with a new version, and those that are `written`.

        A module that contains no block may replace a buffer by the same values, or by a longer table.
        """
        for name, copy in self.copies.items():
            for key, buffer in copy._buffers.items():
                before, was = self._buffers.get((name, key), (None, 0))
                place = f"{name}.{key}".lstrip(".")
                if buffer is before and (buffer is None or version(buffer) == was) and place not in written:
                    continue
                may_be = (
                    before is None
                    or buffer is None
                    or before.shape != buffer.shape
                    or (before.device == buffer.device and torch.equal(before, buffer))
                )
                if buffer is before or name in self.parts.opened or not may_be:
                    text = CHANGES_BUFFER.format(model=type(self.parts.model).__name__, name=place)
                    raise CannotSplitError(text, [name])

    def attributes(self) -> Attributes:
        """What the copies have now, but for buffers, to be compared with later."""
        return {
            (name, key): _noted(value)
            for name, copy in self.copies.items()
            for key, value in vars(copy).items()
            if key != "_buffers"
        }

    def changed_since(self, before: Attributes) -> Iterator[tuple[str, str, Any]]:
        """The attributes of copies that are others now: the copy's name, the attribute's, and its value."""
        now = self.attributes()
        for name, key in {**before, **now}:
            if before.get((name, key)) != now.get((name, key)):
                yield name, key, vars(self.copies[name]).get(key)
