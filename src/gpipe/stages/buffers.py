"""Restores buffers that a forward changed for its recompute, which leaves them as it found them.

A copy of each buffer is kept, taken anew when the buffer has changed, so that forwards between two changes share one.
What has changed is found by comparing with the copies, since not every write raises a version (`.data`, fused
observers, torch's own normalizations). On a GPU to compare would halt it: there small buffers count as changed by
every forward, and larger ones by their version alone. A recompute works on a copy of what differs by then.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.accelerator import put_data
from gpipe.stages.quantized import leave_unpacked
from gpipe.stages.tree import copy_of, storage_address, version

Slot: TypeAlias = tuple[nn.Module, str]  # where a parameter or a buffer stands: a module, and its name there
SMALL = 2**20  # bytes up to which a buffer on a GPU is copied for every forward


class SavedBuffer(NamedTuple):
    """A buffer, and its value, before a forward."""

    tensor: Tensor | None
    version: int = 0
    copy: Tensor | None = None


SavedBuffers: TypeAlias = dict[Slot, SavedBuffer]  # all buffers before a forward


class Buffers:
    """Saves and restores the buffers of a stage's layers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self._parts: list[nn.Module] = []
        self._copies: SavedBuffers = {}

    def find(self) -> None:
        """Looks the modules up anew, which may have come or gone since the last step."""
        self._copies.clear()
        self._parts = list(dict.fromkeys(chain.from_iterable(map(nn.Module.modules, self.modules))))

    def forget(self) -> None:
        """Lets go of the copies, behind a forward that nobody compared with them."""
        self._copies.clear()

    def _now(self) -> dict[Slot, Tensor | None]:
        holders = [part for part in self._parts if part._buffers]  # most have none
        return {(part, name): tensor for part in holders for name, tensor in part._buffers.items()}

    def before(self) -> SavedBuffers:
        now = self._now()
        return dict(zip(now, map(self._keep, now, now.values()), strict=True))

    def _keep(self, slot: Slot, tensor: Tensor | None) -> SavedBuffer:
        if tensor is None or is_lazy(tensor):
            return SavedBuffer(tensor)
        kept = self._copies.get(slot)
        if kept is None or kept.tensor is not tensor or kept.version != version(tensor):
            kept = self._copies[slot] = SavedBuffer(tensor, version(tensor), copy_of(tensor.detach()))
        return kept

    def after(self, before: SavedBuffers, *, exact: bool = False) -> list[Slot]:
        """The buffers that are not what they were, or are new; what had no value yet has the first one saved."""
        changed = _changed(before, self._now(), exact=exact)
        for slot in changed:
            self._copies.pop(slot, None)
        for slot, was in before.items():
            if was.tensor is not None and was.copy is None and not is_lazy(was.tensor):
                before[slot] = SavedBuffer(was.tensor, -1, copy_of(was.tensor.detach()))
        return changed

    def as_before(self, snapshot: SavedBuffers) -> AbstractContextManager[None]:
        """Shows modules their buffers as they were, and puts the real ones back."""
        now = self._now()
        apart = _changed(snapshot, now)
        return _shown(snapshot, now, apart) if apart else nullcontext()


@contextmanager
def _shown(snapshot: SavedBuffers, now: Mapping[Slot, Tensor | None], apart: Sequence[Slot]) -> Iterator[None]:
    _refuse_views(snapshot, apart)
    shown = {slot: snapshot[slot].tensor for slot in apart if slot in snapshot}
    copies: dict[int, Tensor] = {}  # one tensor in several slots stays one
    for slot in shown:
        tensor, _, copy = snapshot[slot]
        if copy is not None:
            if id(tensor) not in copies:
                copies[id(tensor)] = copy_of(copy)
            shown[slot] = copies[id(tensor)]
    _put(apart, shown)
    try:
        yield
    finally:
        _put(apart, now)


def _refuse_views(snapshot: SavedBuffers, apart: Sequence[Slot]) -> None:
    """Refuses changed buffers that share memory: copies of them would not change together."""
    users: dict[int, set[int]] = {}
    for tensor, _, copy in snapshot.values():
        if tensor is not None and copy is not None and (address := storage_address(tensor)):
            users.setdefault(address, set()).add(id(tensor))
    names = [
        f"{type(slot[0]).__name__}.{slot[1]}"
        for slot in apart
        if slot in snapshot and (tensor := snapshot[slot].tensor) is not None
        if not is_lazy(tensor) and len(users.get(storage_address(tensor), ())) > 1
    ]
    if names:
        raise RuntimeError(
            f"{', '.join(dict.fromkeys(names))}: buffers that lie in one memory, which a forward changes, so that a "
            f"recompute would need them as they were; register one buffer and take views of it in the forward, or "
            f"use remat='never' for this partition"
        )


def _put(slots: Sequence[Slot], tensors: Mapping[Slot, Tensor | None]) -> None:
    """Puts tensors into slots; those that have none are no buffers."""
    for module, name in slots:
        if (module, name) in tensors:
            module._buffers[name] = tensors[module, name]
        else:
            module._buffers.pop(name, None)


def _changed(before: SavedBuffers, now: Mapping[Slot, Tensor | None], *, exact: bool = False) -> list[Slot]:
    """The slots whose buffers are not what they were, or were not there; if `exact`, a GPU is halted to compare."""
    if not before and not now:  # as in most stages
        return []
    slots = dict.fromkeys((*before, *now))
    return [
        slot for slot in slots if slot not in before or slot not in now or _is_changed(before[slot], now[slot], exact)
    ]


def _is_changed(was: SavedBuffer, now: Tensor | None, exact: bool) -> bool:
    if now is not was.tensor:
        return True
    if now is None or was.copy is None:
        return False
    if version(now) != was.version or now.shape != was.copy.shape or now.dtype != was.copy.dtype:
        return True
    if now.is_cpu or (exact and not now.is_meta):
        return not all(map(torch.equal, _parts_of(now), _parts_of(was.copy)))
    return now.nbytes <= SMALL and not now.is_meta


def _parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor, or what a sparse one consists of, which torch does not compare itself."""
    match tensor.layout:
        case torch.strided:
            return (tensor,)
        case torch.sparse_coo:
            return tensor._indices(), tensor._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


@contextmanager
def untouched(layer: nn.Module) -> Iterator[None]:
    """Puts back what running a layer may change: attributes of its modules, gradients, buffers, and its device."""
    attributes = [(module, dict(vars(module))) for module in layer.modules()]
    insides = [(inside, dict(inside)) for _, own in attributes for inside in own.values() if isinstance(inside, dict)]
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in layer.parameters()]
    buffers = [(buffer, copy_of(buffer)) for buffer in layer.buffers()]
    for parameter, _, _ in parameters:
        parameter.grad = None
    leave_unpacked(layer)  # an attribute, which is put back
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
                put_data(parameter, data)
            parameter.grad = gradient
        for buffer, before in buffers:
            buffer.data.copy_(before)  # raises no version: a backward that is to come may have saved the buffer


def _refill(dictionary: dict[str, Any], items: Mapping[str, object]) -> None:
    dictionary.clear()
    dictionary.update(items)
