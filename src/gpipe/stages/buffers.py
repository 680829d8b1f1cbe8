"""Restores buffers that a forward changed for its recompute, which leaves them as it found them.

A copy of each buffer is kept, taken anew when the buffer has changed, so that forwards between two changes share one.
What has changed is found by comparing with the copies, since not every write raises a version (`.data`, fused
observers, torch's own normalizations). On a GPU to compare would halt it: there small buffers count as changed by
every forward, and larger ones by their version alone. A recompute works on a copy of what differs by then.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe.stages.layout import copy_of
from gpipe.stages.tree import version

Slot: TypeAlias = tuple[nn.Module, str]
"""Where a parameter or a buffer stands: a module, and its name there."""
SMALL = 2**20
"""Bytes up to which a buffer on a GPU is copied for every forward."""


class SavedBuffer(NamedTuple):
    """A buffer, and its value, before a forward; `there` is whether there was one of that name."""

    tensor: Tensor | None
    version: int = 0
    copy: Tensor | None = None
    there: bool = True


SavedBuffers: TypeAlias = dict[Slot, SavedBuffer]
"""All buffers before a forward."""
_NONE, _ABSENT = SavedBuffer(None), SavedBuffer(None, there=False)


class Buffers:
    """Saves and restores the buffers of a stage's layers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.slots: list[Slot] = []
        self._tables: list[Mapping[str, Tensor | None]] = []  # of each module inside
        self._copies: dict[Slot, SavedBuffer] = {}

    def find(self) -> None:
        """Looks the buffers up anew; modules may have come or gone since the last step."""
        self._copies.clear()
        parts = dict.fromkeys(chain.from_iterable(root.modules() for root in self.modules))
        self._tables = [part._buffers for part in parts]
        self.slots = [(part, name) for part in parts for name in part._buffers]

    def forget(self) -> None:
        """Lets go of the copies, behind a forward that nobody compared with them."""
        self._copies.clear()

    def before(self) -> SavedBuffers:
        """The buffers before a forward."""
        if self._are_others():
            self.find()
        return {slot: self._keep(slot) for slot in self.slots}

    def _are_others(self) -> bool:
        return sum(map(len, self._tables)) != len(self.slots)

    def _keep(self, slot: Slot) -> SavedBuffer:
        module, name = slot
        tensor = module._buffers.get(name)
        if tensor is None:
            return _NONE
        if is_lazy(tensor):
            return SavedBuffer(tensor)
        kept = self._copies.get(slot)
        if kept is None or kept.tensor is not tensor or kept.version != version(tensor):
            kept = self._copies[slot] = SavedBuffer(tensor, version(tensor), copy_of(tensor.detach()))
        return kept

    def after(self, before: SavedBuffers) -> list[Slot]:
        """The buffers that are not what they were; those that are new join the snapshot."""
        changed = [slot for slot, was in before.items() if _is_changed(slot, was)]
        for slot in changed:
            self._copies.pop(slot, None)
        for (module, name), was in before.items():
            if was.tensor is not None and was.copy is None and not is_lazy(was.tensor):  # it has values since
                before[module, name] = SavedBuffer(was.tensor, -1, copy_of(was.tensor.detach()))
        if self._are_others():
            self.find()
            new = [slot for slot in self.slots if slot not in before]
            before.update(dict.fromkeys(new, _ABSENT))
            changed += new
        return changed

    @contextmanager
    def as_before(self, snapshot: SavedBuffers) -> Iterator[None]:
        """Shows modules their buffers as they were, and puts the real ones back."""
        apart = [(slot, was) for slot, was in snapshot.items() if _is_changed(slot, was)]
        real = [(slot, slot[0]._buffers.get(slot[1]), slot[1] in slot[0]._buffers) for slot, _ in apart]
        _refuse_views(snapshot, apart)
        copies: dict[int, Tensor] = {}  # one tensor in several slots stays one
        for slot, was in apart:
            if was.copy is not None and id(was.tensor) not in copies:
                copies[id(was.tensor)] = copy_of(was.copy)
            _put(slot, was.tensor if was.copy is None else copies[id(was.tensor)], there=was.there)
        try:
            yield
        finally:
            for slot, tensor, there in real:
                _put(slot, tensor, there=there)


def _refuse_views(snapshot: SavedBuffers, apart: Sequence[tuple[Slot, SavedBuffer]]) -> None:
    """Refuses changed buffers that share memory: copies of them would not change together."""
    users: dict[int, set[int]] = {}
    for was in snapshot.values():
        if was.copy is not None and was.tensor is not None and was.tensor.untyped_storage().nbytes():
            users.setdefault(was.tensor.untyped_storage().data_ptr(), set()).add(id(was.tensor))
    names = [
        f"{type(module).__name__}.{name}"
        for (module, name), was in apart
        if was.tensor is not None and was.copy is not None
        if len(users.get(was.tensor.untyped_storage().data_ptr(), ())) > 1
    ]
    if names:
        raise RuntimeError(
            f"{', '.join(dict.fromkeys(names))}: buffers that lie in one memory, which a forward changes, so that a "
            f"recompute would need them as they were; register one buffer and take views of it in the forward, or "
            f"use remat='never' for this partition"
        )


def _put(slot: Slot, tensor: Tensor | None, *, there: bool) -> None:
    module, name = slot
    if there:
        module._buffers[name] = tensor
    else:
        module._buffers.pop(name, None)


def _is_changed(slot: Slot, was: SavedBuffer) -> bool:
    module, name = slot
    now = module._buffers.get(name)
    if now is not was.tensor or (name in module._buffers) != was.there:
        return True
    if now is None or was.copy is None:
        return False
    if version(now) != was.version or now.shape != was.copy.shape or now.dtype != was.copy.dtype:
        return True
    if now.is_cpu:
        return not torch.equal(now, was.copy)
    return now.nbytes <= SMALL and not now.is_meta


@contextmanager
def untouched(layer: nn.Module) -> Iterator[None]:
    """Puts back what running a layer may change: attributes of its modules, gradients, buffers, and its device."""
    attributes = [(module, dict(vars(module))) for module in layer.modules()]
    insides = [(inside, dict(inside)) for _, own in attributes for inside in own.values() if isinstance(inside, dict)]
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in layer.parameters()]
    buffers = [(buffer, copy_of(buffer)) for buffer in layer.buffers()]
    for parameter, _, _ in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for module, own in attributes:
            _refill(vars(module), own)
        for inside, items in insides:
            _refill(inside, items)
        for parameter, data, gradient in parameters:
            parameter.grad = None  # it may be on another device than the parameter will be
            if parameter.device != data.device:
                parameter.data = data
            parameter.grad = gradient
        for buffer, before in buffers:
            buffer.data.copy_(before)  # raises no version: a backward that is to come may have saved the buffer


def _refill(dictionary: dict[str, Any], items: Mapping[str, object]) -> None:
    dictionary.clear()
    dictionary.update(items)
