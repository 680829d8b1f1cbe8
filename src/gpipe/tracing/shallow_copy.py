"""Copies a model's modules so that the interpreter can run them without changing the user's modules.

- Opened modules (modules that contain blocks) and modules without parameters are shallow copies, whose code runs as
  usual.
- Units (modules with parameters or state) are replaced by stubs of a derived class, which share all attributes with
  the unit. The running interpreter handles each call of a stub or of its forward.
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
from gpipe.tracing.fast_config import fast_config
from gpipe.tracing.parts import Parts
from gpipe.tracing.trace import CannotSplitError

HOOKED = (
    "{name} has a hook, which every layer would call separately. Register the hook on a block, or on a module inside "
    "a block. On a module without parameters, register the hook before you create the pipe. [hook-around-blocks]"
)
REPLACED_FORWARD = (
    "{name} contains blocks, but its forward attribute is not its own method, as with accelerate's hooks "
    "(device_map=, prepare). gpipe cannot see the modules that it calls. Call "
    "accelerate.hooks.remove_hook_from_submodules(model), or set forward on blocks. [replaced-forward]"
)
COLLECTOR = "_output_capturing_hooks_installed"
"""The attribute that transformers sets if a model has collecting hooks (note "Collections" in trace.py)."""
COLLECTING = "transformers.utils.output_capturing"
"""The module of transformers that installs these hooks when a forward first needs the hooks."""
CHANGES_BUFFER = (
    "The forward of {model} changes the buffer {name} between blocks, and every layer would change it again. Move it "
    "into a block. For rotary embeddings of type 'dynamic', increase max_position_embeddings. [buffer-between-blocks]"
)


Attributes: TypeAlias = dict[tuple[str, str], object]
DEPTH = 3  # levels of containers and objects that `note` compares


def _noted(value: object) -> object:
    """Calls `note` on an attribute. Returns None if reading it raises."""
    with suppress(Exception):
        return note(value)
    return None


@dataclass(frozen=True, eq=False)
class TensorVersion:
    """A tensor and its version, which increases with each in-place change."""

    tensor: Tensor | None
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorVersion) and self.tensor is other.tensor and self.version == other.version


def note(value: object, depth: int = DEPTH) -> object:
    """Returns a comparable form of a value: its numbers and tensor versions, also inside containers and objects."""
    match value:
        case nn.Parameter() | nn.Module() | type():
            return None
        case Tensor():
            return TensorVersion(value, version(value))
        case bool() | int() | float() | complex() | str():
            return type(value), value
        case list() | tuple() if depth:
            return [note(item, depth - 1) for item in list(value)]  # a copy: other ranks may change it now
        case dict() if depth:
            return {key: note(item, depth - 1) for key, item in list(value.items())}
        case _ if depth and type(value).__module__ not in ("builtins", "torch"):
            attributes = getattr(value, "__dict__", None)
            return note(attributes, depth - 1) if isinstance(attributes, dict) else None
    return None


class _Installer:
    """Installs the collecting hooks on the user's module when a copy first needs them. All copies share the hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __bool__(self) -> bool:
        sys.modules[COLLECTING].maybe_install_capturing_hooks(self._module)
        return True


def own_hooks(module: nn.Module) -> list[object]:
    """Returns the hooks of a module, except the collecting hooks of transformers, which work in every layer."""
    return [hook for hook in hooks_of(module) if getattr(hook, "__module__", "") != COLLECTING]


class ShallowCopy:
    """A copy of a model for an interpreter.

    Args:
        parts: The split model.
        device: The device of the copied buffers. Default: the device of each buffer.

    Attributes:
        root: The copy to call in place of the model.
        copies: The copied modules, by name.
        on_call: A function that is called in place of each unit, with the name, the arguments and the keyword
            arguments.
    """

    def __init__(self, parts: Parts, device: torch.device | None = None) -> None:
        self.on_call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.parts, self._device = parts, device
        self.copies: dict[str, nn.Module] = {}
        self._counterparts: dict[nn.Module, nn.Module] = {}  # the copy or stub of each of the user's modules
        for name, unit in parts.units.items():
            self._counterparts[unit] = self._stub(name, unit)
        for name, module in parts.copied.items():
            self._counterparts[module] = self.copies[name] = object.__new__(type(module))
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
        """Resets the copies to the current state of the user's modules. Forgets attributes that a forward has set."""
        self._buffers: dict[tuple[str, str], tuple[Tensor | None, int]] = {}
        for name, copy in self.copies.items():
            module = self.parts.copied[name]
            label = name or type(module).__name__
            if own_hooks(module):
                raise CannotSplitError(HOOKED.format(name=label))
            attributes = dict(vars(module))
            for key, value in attributes.items():
                if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
                    attributes[key] = self._method_of_copy(value)
                else:
                    attributes[key] = fast_config(value)
            if name in self.parts.opened:
                if attributes.get("forward") is not None and attributes["forward"] is vars(module)["forward"]:
                    raise CannotSplitError(REPLACED_FORWARD.format(name=label))
                attributes.setdefault(COLLECTOR, _Installer(module))
            attributes["_modules"] = self._parts_of(module, label)
            attributes["_buffers"] = dict(module._buffers)
            for key, buffer in module._buffers.items():
                if buffer is not None and self._device is not None:
                    attributes["_buffers"][key] = buffer = buffer.to(self._device)
                self._buffers[name, key] = buffer, 0 if buffer is None else version(buffer)
            object.__setattr__(copy, "__dict__", attributes)

    def _method_of_copy(self, method: MethodType) -> MethodType:
        """Returns the same method of the copy or stub, for a method that is bound to one of the user's modules."""
        owner = self._counterparts.get(method.__self__)  # type: ignore[call-overload]  # a module
        if owner is None:
            return method
        is_copy = type(owner) is type(method.__self__)  # a stub has a forward of its own
        return MethodType(method.__func__ if is_copy else getattr(type(owner), method.__name__), owner)

    def _parts_of(self, module: nn.Module, name: str) -> dict[str, nn.Module | None]:
        parts = module._modules.items()
        if any(part is not None and part not in self._counterparts for _, part in parts):
            raise CannotSplitError(
                f"{name}: a child module was replaced after gpipe split the model. Create a new pipe of the model. "
                f"[module-replaced]"
            )
        return {key: None if part is None else self._counterparts[part] for key, part in parts}

    def reject_changed_buffers(self, written: Collection[str] = ()) -> None:
        """Raises an error if a buffer of the copies is a new object, has a new version, or is in `written`.

        A module that does not contain a block may replace a buffer by equal values, or by a tensor of a different
        shape.
        """
        for name, copy in self.copies.items():
            for key, buffer in copy._buffers.items():
                before, old_version = self._buffers.get((name, key), (None, 0))
                place = f"{name}.{key}".lstrip(".")
                if buffer is before and (buffer is None or version(buffer) == old_version) and place not in written:
                    continue
                is_allowed = (
                    before is None
                    or buffer is None
                    or before.shape != buffer.shape
                    or (before.device == buffer.device and torch.equal(before, buffer))
                )
                if buffer is before or name in self.parts.opened or not is_allowed:
                    text = CHANGES_BUFFER.format(model=type(self.parts.model).__name__, name=place)
                    raise CannotSplitError(text, [name])

    def attributes(self) -> Attributes:
        """Returns the current attributes of the copies without buffers, in a comparable form."""
        return {
            (name, key): _noted(value)
            for name, copy in self.copies.items()
            for key, value in vars(copy).items()
            if key != "_buffers"
        }

    def changed_since(self, before: Attributes) -> Iterator[tuple[str, str, Any]]:
        """Yields the attributes of copies that have changed: the copy's name, the attribute's name, and the value."""
        now = self.attributes()
        for name, key in {**before, **now}:
            if before.get((name, key)) != now.get((name, key)):
                yield name, key, vars(self.copies[name]).get(key)
