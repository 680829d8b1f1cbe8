"""Restores buffers that a forward changed for its recompute, which leaves them as it found them.

A copy of each buffer is kept, taken anew when the buffer has changed, so that forwards between two changes share one.
What has changed is found by comparing with the copies, since not every write raises a version (`.data`, fused
observers, torch's own normalizations). A small one that has changed counts as changed by every later forward of a
step. On a GPU to compare would halt it: there small ones count so from the start, and larger ones by their version
alone. A recompute works on a copy of what differs by then.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.accelerator import put_data
from gpipe.stages.digest import INTEGERS
from gpipe.stages.memory_layout import copy_of, storage_address, strided_parts, version
from gpipe.stages.quantized import leave_unpacked
from gpipe.stages.reachable_state import ReachableState

Slot: TypeAlias = tuple[nn.Module, str]  # where a parameter or a buffer stands: a module, and its name there
OWN = "gpipe.tracing."  # how the modules begin whose classes stand for parts of a model, and lead to all of it
SMALL = 2**20  # bytes up to which a buffer is copied for a forward though it may be as before


class SavedBuffers(NamedTuple):
    """The buffers of a stage before a forward: where they stand, and of each the tensor, its version, and a copy.

    `parts` are the modules that there were. What the forward `changed` its recompute changes as well, though by then
    it may be what it was before.
    """

    parts: list[nn.Module]
    slots: list[Slot]
    tensors: list[Tensor | None]
    versions: list[int]
    copies: list[Tensor | None]
    changed: set[Slot]


class Buffers:
    """Saves and restores the buffers of a stage's layers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self._parts: list[nn.Module] = []
        self._children: list[nn.Module | None] = []
        self._names: list[tuple[object, ...]] = []  # of the buffers, behind the module that has them
        self._slots: list[Slot] = []
        self._copies: dict[Slot, tuple[Tensor, int, Tensor]] = {}  # with the tensor and its version then
        self._changing: set[Slot] = set()  # small ones, by the forwards of this step

    def find(self) -> None:
        """Looks the modules up anew."""
        self._parts = list(dict.fromkeys(chain.from_iterable(map(nn.Module.modules, self.modules))))
        self._children = self._children_now()

    def _children_now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(part._modules.values() for part in self._parts)]

    def forget(self) -> None:
        """Lets go of the copies, behind a forward that nobody compared with them."""
        self._copies.clear()

    def _now(self) -> tuple[list[Slot], list[Tensor | None]]:
        """Where buffers stand, the same list as long as none comes or goes, and what stands there."""
        if not self._parts or self._children_now() != self._children:  # a forward may make some
            self.find()
        holders = [part for part in self._parts if part._buffers]  # most have none
        names = [(part, *part._buffers) for part in holders]
        if names != self._names:
            self._names, self._slots = names, [(part, name) for part in holders for name in part._buffers]
        return self._slots, [*chain.from_iterable(part._buffers.values() for part in holders)]

    def before(self) -> SavedBuffers:
        slots, tensors = self._now()
        copies = [*map(self._copy, slots, tensors)]
        saved = [0 if copy is None else version(tensor) for tensor, copy in zip(tensors, copies, strict=True)]
        return SavedBuffers(self._parts, slots, tensors, saved, copies, set())

    def _copy(self, slot: Slot, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or is_lazy(tensor):
            return None
        if slot in self._changing:
            return copy_of(tensor.detach())
        kept = self._copies.get(slot)
        if kept is None or kept[0] is not tensor or kept[1] != version(tensor):
            kept = self._copies[slot] = tensor, version(tensor), copy_of(tensor.detach())
        return kept[2]

    def after(self, before: SavedBuffers, *, exact: bool = False) -> list[Slot]:
        """The buffers that are not what they were, or are new; what had no value yet has the first one saved."""
        changed = _changed(before, *self._now(), () if exact else self._changing, exact=exact)
        before.changed.update(changed)
        for slot in changed:
            self._copies.pop(slot, None)
        if not exact:
            new = [slot for slot in changed if slot not in self._changing]
            _refuse_views(before, new)
            self._changing.update(slot for slot in new if _is_small(slot[0]._buffers.get(slot[1])))
        for at, (tensor, copy) in enumerate(zip(before.tensors, before.copies, strict=True)):
            if copy is None and tensor is not None and not is_lazy(tensor):
                before.versions[at], before.copies[at] = -1, copy_of(tensor.detach())
        return changed

    @contextmanager
    def as_before(self, before: SavedBuffers) -> Iterator[None]:
        """Shows modules their buffers as they were, and puts the real ones back."""
        slots, tensors = self._now()
        apart = _changed(before, slots, tensors, before.changed)
        _refuse_views(before, [slot for slot in apart if slot not in before.changed])
        now = dict(zip(slots, tensors, strict=True))
        shown = dict(zip(before.slots, before.tensors, strict=True))
        saved = dict(zip(before.slots, before.copies, strict=True))
        copies: dict[int, Tensor] = {}  # one tensor in several slots stays one
        for slot in apart:
            if slot not in shown and slot[0] not in before.parts:  # the forward has made its module
                shown[slot] = saved[slot] = now[slot]
            if (tensor := shown.get(slot)) is not None and (copy := saved[slot]) is not None:
                if id(tensor) not in copies:
                    copies[id(tensor)] = copy_of(copy)
                shown[slot] = copies[id(tensor)]
        try:
            _put(apart, shown)
            yield
        finally:
            _put(apart, now)


def _refuse_views(before: SavedBuffers, apart: Sequence[Slot]) -> None:
    """Refuses changed buffers that share memory: copies of them would not change together."""
    if not apart:
        return
    tensors = dict(zip(before.slots, before.tensors, strict=True))
    users: dict[int, set[int]] = {}
    for tensor, copy in zip(before.tensors, before.copies, strict=True):
        if tensor is not None and copy is not None and (address := storage_address(tensor)):
            users.setdefault(address, set()).add(id(tensor))
    names = [
        f"{type(slot[0]).__name__}.{slot[1]}"
        for slot in apart
        if (tensor := tensors.get(slot)) is not None
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


def _changed(
    before: SavedBuffers,
    slots: list[Slot],
    now: Sequence[Tensor | None],
    known: Collection[Slot],
    *,
    exact: bool = False,
) -> list[Slot]:
    """The slots whose buffers are not what they were, or were not there, and those that are known to change.

    If `exact`, a GPU is halted to compare.
    """
    new = list[Slot]()
    if slots is not before.slots:
        there = dict(zip(slots, now, strict=True))
        new, now = [*there.keys() - set(before.slots)], [there.get(slot, GONE) for slot in before.slots]
    pairs = zip(before.slots, before.tensors, before.versions, before.copies, now, strict=True)
    return new + [
        slot
        for slot, was, saved, copy, tensor in pairs
        if slot in known or is_changed(was, saved, copy, tensor, exact=exact)
    ]


GONE = torch.empty(0)


def _is_small(buffer: Tensor | None) -> bool:
    if buffer is None or is_lazy(buffer) or buffer.layout is not torch.strided:
        return False
    return buffer.nbytes <= SMALL


def is_changed(was: Tensor | None, saved: int, copy: Tensor | None, now: Tensor | None, *, exact: bool) -> bool:
    """Whether a buffer is another tensor than it `was`, of version `saved`, or no longer equals its copy."""
    if now is not was:
        return True
    if now is None or copy is None:
        return False
    if version(now) != saved or now.shape != copy.shape or now.dtype != copy.dtype:
        return True
    if now.is_cpu or (exact and not now.is_meta):
        return not all(map(torch.equal, _bits_of(now), _bits_of(copy)))
    return _is_small(now) and not now.is_meta


def _bits_of(tensor: Tensor) -> list[Tensor]:
    bits = INTEGERS.get(tensor.itemsize) if tensor.is_floating_point() else None
    return [
        part if bits is None or not part.is_floating_point() else part.view(bits) for part in strided_parts(tensor)
    ]


@contextmanager
def untouched(*layers: nn.Module) -> Iterator[None]:
    """Puts back what running layers may change: their device, gradients, and state that they can reach.

    What a forward writes into parameters stays, and what cannot be copied, such as Python generators and open files.
    """
    with state_kept(*layers), parameters_kept(*layers):
        yield


@contextmanager
def state_kept(*layers: nn.Module) -> Iterator[None]:
    """Puts back the state that layers can reach; neither gradients nor values of parameters."""
    for layer in layers:
        if any(map(is_lazy, (*layer.parameters(), *layer.buffers()))):  # what gives these values cannot be put back
            raise ValueError(
                f"{type(layer).__name__} is lazy: run it once on an example, so that its weights have shapes"
            )
    parts = enumerate(dict.fromkeys(part for layer in layers for part in layer.modules()))
    state = ReachableState.of({str(at): part for at, part in parts if not type(part).__module__.startswith(OWN)})
    for layer in layers:
        leave_unpacked(layer)  # an attribute, which is put back
    try:
        yield
    finally:
        state.restore()


@contextmanager
def parameters_kept(*layers: nn.Module) -> Iterator[None]:
    """Puts back the device and the gradients of parameters; inside there are no gradients at first."""
    every = dict.fromkeys(parameter for layer in layers for parameter in layer.parameters())
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in every]
    for parameter in every:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, data, gradient in parameters:
            parameter.grad = None  # it may be on another device than the parameter will be
            if parameter.device != data.device:
                put_data(parameter, data)
            parameter.grad = gradient
