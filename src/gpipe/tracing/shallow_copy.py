"""A model's own modules, to be interpreted without being touched.

Open modules, those that blocks stand in, and those without parameters are shallow copies, whose code runs as it is.
Units, closed modules that have parameters or keep state, are stubs of classes derived from their own: they share all
attributes with the unit, and a call of one goes to the interpreter that is under way. The user's modules see none of
it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gpipe._torch.modules import hooks_of
from gpipe.stages.tree import version
from gpipe.tracing.values import CannotSplitError

UnitCall = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""Is told of the call of a unit: its name and arguments; gives what it returns."""

REPLACED = "a part of {name} was replaced since the model was cut; make a new pipe of it"
HOOKED = (
    "{name} has a hook, and blocks stand in it: every layer walks through it, so the hook would run once "
    "for each, and see few values. Put the hook on a block or on a module inside of one"
)
COLLECTS = (
    "{name} collects what its blocks give on the way (output_hidden_states, output_attentions, output_router_logits "
    "and the like), by hooks inside of them that layers do not see: leave it out of what the model is given, and "
    "of model.config. What the model's own forward asks for it, as a vision tower or a backbone, may be one block: "
    "blocks=['model.vision_tower', ...]"
)
OTHER_FORWARD = (
    "{name} has a forward that was set on it and is not its own method, as accelerate sets one for its hooks "
    "(device_map=, prepare), and blocks stand in it: it calls the model's modules where nothing sees them. Take it "
    "off (accelerate.hooks.remove_hook_from_submodules(model)), or set it on blocks"
)
COLLECTOR = "_output_capturing_hooks_installed"
"""Where a model of transformers looks whether it has these hooks, before it puts them into all of its modules."""

HOOKED_LATER = (
    "{name} has a hook that it had not when the model was cut, and every layer walks through it: the hook would run "
    "once for each; make the pipe when the hook is there"
)
CHANGES_BUFFER = (
    "the forward changes the buffer {name} between blocks, which it did not on the sample: every layer would do so, "
    "and what micro-batches find there would depend on the schedule. Rotary embeddings of the type 'dynamic' do so "
    "where a sequence is longer than max_position_embeddings: give shorter ones, or set it as high as they are long. "
    "Else give a sample that shows the change, or move it into a block"
)


@dataclass(frozen=True)
class Parts:
    """A model, and which of its modules are what.

    Attributes:
        model: The user's.
        blocks: The names of the modules between which it may be cut.
        opened: The names of those that blocks stand in.
        stateful: The names of modules without parameters that change buffers.
    """

    model: nn.Module
    blocks: tuple[str, ...]
    opened: frozenset[str]
    stateful: frozenset[str] = frozenset()

    def shallow_copy(self) -> "ShallowCopy":
        """A copy that can be interpreted."""
        return ShallowCopy(self.model, self.opened, self.stateful)


class ShallowCopy:
    """A walkable copy of a model.

    Args:
        model: Stays as it is.
        opened: The names of its open modules.
        stateful: The names of modules that have no parameters, but change buffers.

    Attributes:
        root: What to call in place of the model.
        on_call: Is told of calls of units, while it is set.
        units: The units by name.
    """

    def __init__(self, model: nn.Module, opened: Collection[str], stateful: Collection[str] = ()) -> None:
        self.on_call: UnitCall | None = None
        self.units: dict[str, nn.Module] = {}
        self._opened, self._stateful = opened, stateful
        self._copies: list[_ModuleCopy] = []
        self._known: dict[int, nn.Module] = {}
        self.root = self._mirror("", model)

    @property
    def copied_modules(self) -> dict[str, nn.Module]:
        """The user's modules of which there are copies, by name."""
        return {copy.path: copy.module for copy in self._copies}

    @property
    def copies(self) -> dict[str, nn.Module]:
        """The copies, by name."""
        return {copy.path: copy.made for copy in self._copies}

    def _mirror(self, name: str, module: nn.Module) -> nn.Module:
        found = self._known.get(id(module))
        if found is None:
            keeps = name in self._stateful or next(module.parameters(), None) is not None
            is_unit = keeps and name not in self._opened
            found = self._stub(name, module) if is_unit else self._copy(name, module)
            self._known[id(module)] = found
        return found

    def _stub(self, name: str, unit: nn.Module) -> nn.Module:
        self.units[name] = unit

        def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return unit(*args, **kwargs) if self.on_call is None else self.on_call(name, args, kwargs)

        kind = type(unit)
        own = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        metaclass: Any = type(kind)
        stub: nn.Module = object.__new__(metaclass(kind.__name__, (kind,), own))
        object.__setattr__(stub, "__dict__", vars(unit))
        return stub

    def _copy(self, name: str, module: nn.Module) -> nn.Module:
        parts = {
            key: None if part is None else self._mirror(f"{name}.{key}" if name else key, part)
            for key, part in module._modules.items()
        }
        copy = _ModuleCopy(name, module, parts, is_open=name in self._opened)
        self._copies.append(copy)
        return copy.made

    def refresh(self) -> None:
        """Takes over what has changed in the user's modules: attributes, modes, buffers.

        Raises:
            CannotSplitError: A module was replaced, or a hook was put where it would run too often.
        """
        for copy in self._copies:
            copy.refresh()

    def refuse_changed_buffers(self) -> None:
        """Refuses what an interpreter did to buffers that every layer reads; the next run begins without it.

        Raises:
            CannotSplitError: One was written, or another of its shape was put in its place. A larger one is taken
                for a table that grew.
        """
        for copy in self._copies:
            if (changed := copy.changed_buffer()) is not None:
                copy.forget()
                raise CannotSplitError(CHANGES_BUFFER.format(name=f"{copy.path}.{changed}".lstrip(".")))

    def put_on(self, device: torch.device) -> None:
        """Moves the copies' buffers, which every layer reads."""
        for copy in self._copies:
            copy.put_on(device)


class _Refusal:
    """Refuses to say whether something is so."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __bool__(self) -> bool:
        raise CannotSplitError(self._text)


class _ModuleCopy:
    """A shallow copy of a module, with other parts."""

    def __init__(self, name: str, module: nn.Module, parts: Mapping[str, nn.Module | None], *, is_open: bool) -> None:
        self.path, self.name = name, name or type(module).__name__
        self.module, self.is_open = module, is_open
        self.made: nn.Module = object.__new__(type(module))
        self._device: torch.device | None = None
        self._parts = tuple(map(id, module._modules.values()))
        self._seen = dict(vars(module))
        self._buffers = dict(module._buffers)
        self._versions: dict[str, tuple[Tensor | None, int]] = {}  # of the copy's, when a run began
        own = {
            **{key: self._of_copy(value) for key, value in self._seen.items()},
            "_modules": dict(parts),
            "_buffers": dict(self._buffers),
        }
        if is_open:
            own[COLLECTOR] = _Refusal(COLLECTS.format(name=self.name))
        object.__setattr__(self.made, "__dict__", own)

    def _of_copy(self, value: Any) -> Any:
        """An attribute as the copy has it: a method that was set on the module is bound to the copy."""
        is_own = isinstance(value, MethodType) and value.__self__ is self.module
        return MethodType(value.__func__, self.made) if is_own else value

    def put_on(self, device: torch.device) -> None:
        self._device = device
        self._buffers.clear()

    def refresh(self) -> None:
        if tuple(map(id, self.module._modules.values())) != self._parts:
            raise CannotSplitError(REPLACED.format(name=self.name))
        if hooks_of(self.module):
            raise CannotSplitError((HOOKED if self.is_open else HOOKED_LATER).format(name=self.name))
        given = vars(self.module).get("forward")
        if self.is_open and given is not None and self._of_copy(given) is given:
            raise CannotSplitError(OTHER_FORWARD.format(name=self.name))
        own = vars(self.made)
        for key, value in vars(self.module).items():
            if self._seen.get(key, self) is not value and key != COLLECTOR:
                self._seen[key] = value
                own[key] = self._of_copy(value)
        for key, buffer in self.module._buffers.items():
            if self._buffers.get(key, self) is not buffer:
                self._buffers[key] = buffer
                if buffer is not None and self._device is not None:
                    buffer = buffer.to(self._device)
                own["_buffers"][key] = buffer
        self._versions = {key: (buffer, version(buffer)) for key, buffer in own["_buffers"].items()}

    def changed_buffer(self) -> str | None:
        """The name of a buffer that was written, or replaced by another of its shape."""
        for key, buffer in self.made._buffers.items():
            before, seen = self._versions.get(key, (buffer, version(buffer)))
            if buffer is before and version(buffer) == seen:
                continue
            if buffer is before or is_replaced(before, buffer):
                return key
        return None

    def forget(self) -> None:
        """Has the next refresh take over all attributes and buffers, also those that the user did not change."""
        self._seen = {key: self._seen[key] for key in ("_modules", "_buffers")}
        self._buffers.clear()


def is_replaced(before: Tensor | None, after: Tensor | None) -> bool:
    """Whether a buffer has other values in the same shape: of another shape, it is a table that grew.

    >>> is_replaced(torch.ones(2), torch.zeros(2)), is_replaced(torch.ones(2), torch.ones(2))
    (True, False)
    >>> is_replaced(torch.ones(2), torch.ones(3)), is_replaced(None, torch.ones(3))
    (False, False)
    """
    if before is None or after is None or before.shape != after.shape:
        return False
    return before.device != after.device or not torch.equal(before, after)
