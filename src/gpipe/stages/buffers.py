"""Saves the buffers that a forward changes, so that its recomputation can start from the same values.

`Buffers` keeps a copy of each buffer and renews it only after the buffer has changed. Forwards between two changes
share the copy. A recomputation works on further copies, so it leaves the buffers unchanged.

To find changed buffers, `Buffers` compares them with the copies, because not every write increases a tensor's
version. For example, writes through `.data`, fused observers, and torch's own normalizations leave the version
unchanged. Two rules limit the cost:

- After a small buffer has changed once, it counts as changed in every later forward of the step.
- On an accelerator, a comparison would wait for the device. There, small buffers always count as changed, and larger
  buffers count as changed if their version has increased.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, methodcaller
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.accelerator import put_data
from gpipe.stages.digest import INTEGERS
from gpipe.stages.memory_layout import copy_of, storage_address, strided_parts, version
from gpipe.stages.quantized import prevent_packing
from gpipe.stages.reachable_state import ReachableState

Slot: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of one of its parameters or buffers."""
TRACING = "gpipe.tracing."
"""Prefix of the modules whose classes represent layers of a traced model. Their objects refer to the whole model."""
SMALL = 2**20
"""Maximum size in bytes of buffers that are copied for every forward, whether they changed or not."""


_NO_SLOTS: list[Slot] = []
_CHILDREN_OF, _BUFFERS_OF, _VALUES = attrgetter("_modules"), attrgetter("_buffers"), methodcaller("values")


class Submodules:
    """All modules of some layers, each once. The layers are searched again only after a module has changed."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)
        self._modules: list[nn.Module] = []
        self._children: list[nn.Module | None] = []

    def now(self) -> list[nn.Module]:
        """Returns the modules. The list is the same object as before if no module was added, removed or replaced."""
        children = [*chain.from_iterable(map(_VALUES, map(_CHILDREN_OF, self._modules)))]
        if not self._modules or children != self._children:  # A forward may create modules.
            self._modules = list(dict.fromkeys(chain.from_iterable(map(nn.Module.modules, self._layers))))
            self._children = [*chain.from_iterable(map(_VALUES, map(_CHILDREN_OF, self._modules)))]
        return self._modules


class SavedBuffer(NamedTuple):
    """A buffer, its version, and a copy. The copy is None for a buffer without values."""

    tensor: Tensor | None
    version: int
    copy: Tensor | None


class SavedBuffers(NamedTuple):
    """The buffers of a stage before a forward.

    Attributes:
        parts: The modules that existed before the forward.
        slots: The module and the name of each buffer.
        saved: The buffer in each slot.
        changed: The slots whose buffers the forward changed. A recomputation changes these buffers too, so it must
            use copies even if a buffer has its earlier values again.
    """

    parts: list[nn.Module]
    slots: list[Slot]
    saved: list[SavedBuffer]
    changed: set[Slot]


class Buffers:
    """Saves and restores the buffers of a stage's layers."""

    def __init__(self, modules: Submodules) -> None:
        self.modules = modules
        self._names: tuple[Sequence[object], ...] = ()  # The modules, the number of buffers of each, and their names.
        self._slots: list[Slot] = []
        self._copies: dict[Slot, SavedBuffer] = {}
        self._changing: set[Slot] = set()  # Small buffers that a forward of this step has changed.

    def forget(self) -> None:
        """Discards the copies. After a forward that may have changed buffers, call either `after` or this method."""
        self._copies.clear()

    def _now(self) -> tuple[list[Slot], list[Tensor | None]]:
        """Returns the slots of all buffers, and the buffers. Unchanged slots are returned as the same list object."""
        self._parts = parts = self.modules.now()
        buffers = [*map(_BUFFERS_OF, parts)]
        if not any(buffers):  # Most stages have no buffers.
            return _NO_SLOTS, []
        names = parts, [*map(len, buffers)], [*chain.from_iterable(buffers)]
        if names != self._names:
            self._names = names
            self._slots = [(part, name) for part in parts for name in part._buffers]
        return self._slots, [*chain.from_iterable(map(_VALUES, buffers))]

    def before(self) -> SavedBuffers:
        """Saves the buffers before a forward."""
        slots, tensors = self._now()
        return SavedBuffers(self._parts, slots, [*map(self._save, slots, tensors)], set())

    def _save(self, slot: Slot, tensor: Tensor | None) -> SavedBuffer:
        if tensor is None or is_lazy(tensor):
            return SavedBuffer(tensor, 0, None)
        saved = None if slot in self._changing else self._copies.get(slot)
        if saved is None or saved.tensor is not tensor or saved.version != version(tensor):
            saved = self._copies[slot] = SavedBuffer(tensor, version(tensor), copy_of(tensor.detach()))
        return saved

    def after(self, before: SavedBuffers) -> None:
        """Records in `before` the slots whose buffers a forward has changed or created.

        Also saves the first value of each buffer that had no value before the forward.
        """
        # A buffer that a forward adds to a stage without buffers is found by `as_before`.
        if before.slots and (changed := _changed(before, *self._now(), self._changing)):
            before.changed.update(changed)
            for slot in changed:
                self._copies.pop(slot, None)
            new = [slot for slot in changed if slot not in self._changing]
            _reject_views(before, new)
            self._changing.update(slot for slot in new if _is_small(slot[0]._buffers.get(slot[1])))
        for index, (tensor, _, copy) in enumerate(before.saved):
            if copy is None and tensor is not None and not is_lazy(tensor):
                before.saved[index] = SavedBuffer(tensor, -1, copy_of(tensor.detach()))

    @contextmanager
    def as_before(self, before: SavedBuffers) -> Iterator[None]:
        """Replaces changed buffers by copies of the saved buffers inside the context."""
        slots, tensors = self._now()
        changed = _changed(before, slots, tensors, before.changed)
        if not changed:
            yield
            return
        _reject_views(before, [slot for slot in changed if slot not in before.changed])
        current = dict(zip(slots, tensors, strict=True))
        saved = dict(zip(before.slots, before.saved, strict=True))
        restored: dict[Slot, Tensor | None] = {}
        copies: dict[int, Tensor] = {}  # By the id of the buffer, so that one in several slots stays one tensor.
        for slot in changed:
            if slot in saved:
                restored[slot], _, copy = saved[slot]
            elif slot[0] not in before.parts:  # The forward created the module.
                restored[slot] = copy = current[slot]
            if (tensor := restored.get(slot)) is not None and copy is not None:
                if id(tensor) not in copies:
                    copies[id(tensor)] = copy_of(copy)
                restored[slot] = copies[id(tensor)]
        try:
            _put(changed, restored)
            yield
        finally:
            _put(changed, current)


def _reject_views(before: SavedBuffers, changed: Sequence[Slot]) -> None:
    """Raises a RuntimeError if changed buffers share memory, because their copies would not share memory."""
    if not changed:
        return
    saved = dict(zip(before.slots, before.saved, strict=True))
    users: dict[int, set[int]] = {}
    for tensor, _, copy in before.saved:
        if tensor is not None and copy is not None and (address := storage_address(tensor)):
            users.setdefault(address, set()).add(id(tensor))
    names = [
        f"{type(slot[0]).__name__}.{slot[1]}"
        for slot in changed
        if slot in saved and (tensor := saved[slot].tensor) is not None
        if not is_lazy(tensor) and len(users.get(storage_address(tensor), ())) > 1
    ]
    if names:
        raise RuntimeError(
            f"{', '.join(dict.fromkeys(names))}: a forward changes buffers that share memory, so a recomputation "
            f"cannot restore them. Register one buffer and create views of it in the forward, or use remat='never' "
            f"for this partition. [buffers-share-memory]"
        )


def _put(slots: Sequence[Slot], tensors: Mapping[Slot, Tensor | None]) -> None:
    """Puts tensors into slots. If `tensors` has no entry for a slot, removes the buffer of the slot."""
    for module, name in slots:
        if (module, name) in tensors:
            module._buffers[name] = tensors[module, name]
        else:
            module._buffers.pop(name, None)


def _changed(
    before: SavedBuffers, slots: list[Slot], now: Sequence[Tensor | None], known: Collection[Slot]
) -> list[Slot]:
    """Returns the slots whose buffers differ from the saved buffers or are new.

    Args:
        before: The saved buffers.
        slots: The current slots.
        now: The current buffers.
        known: Slots that count as changed without a comparison.
    """
    changed = list[Slot]()
    if slots is not before.slots:
        current = dict(zip(slots, now, strict=True))
        changed, now = [*current.keys() - set(before.slots)], [current.get(slot, MISSING) for slot in before.slots]
    for slot, saved, tensor in zip(before.slots, before.saved, now, strict=True):
        if slot in known or is_changed(*saved, tensor):
            changed.append(slot)
    return changed


MISSING = torch.empty(0)
"""Stands for a buffer that no longer exists."""


def _is_small(buffer: Tensor | None) -> bool:
    if buffer is None or is_lazy(buffer) or buffer.layout is not torch.strided:
        return False
    return buffer.nbytes <= SMALL


def is_changed(
    was: Tensor | None, saved: int, copy: Tensor | None, now: Tensor | None, *, exact: bool = False
) -> bool:
    """Whether a buffer has changed.

    Args:
        was: The tensor that was the buffer when the copy was made.
        saved: The version of this tensor when the copy was made.
        copy: The saved copy.
        now: The current buffer.
        exact: Whether to also compare values on accelerators. The comparison waits for the device.
    """
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


def state_of(layers: Sequence[nn.Module]) -> ReachableState:
    """Copies the state that layers can reach, except for gradients and the values of parameters."""
    parts = enumerate(dict.fromkeys(part for layer in layers for part in layer.modules()))
    roots = {str(index): part for index, part in parts if not type(part).__module__.startswith(TRACING)}
    return ReachableState.of(roots)


@contextmanager
def untouched(*layers: nn.Module, state: ReachableState | None = None) -> Iterator[ReachableState]:
    """Restores the device, gradients and reachable state of layers after the context.

    Two kinds of changes remain: values that a forward writes into parameters, and state that cannot be copied, such
    as Python generators and open files.

    Args:
        layers: The layers that run in the context.
        state: The current state of the layers, if it has been copied already. Copying the state is slow.
    """
    with state_kept(*layers, state=state) as copied, parameters_kept(*layers):
        yield copied


@contextmanager
def state_kept(*layers: nn.Module, state: ReachableState | None = None) -> Iterator[ReachableState]:
    """Restores the state that layers can reach, except for gradients and the values of parameters.

    Raises:
        ValueError: If a layer is lazy, because its first forward cannot be undone.
    """
    for layer in layers:
        if any(map(is_lazy, (*layer.parameters(), *layer.buffers()))):
            raise ValueError(
                f"{type(layer).__name__} is lazy, so its weights have no shapes. Run it once on an example "
                f"mini-batch. [lazy-layer]"
            )
    state = state or state_of(layers)
    for layer in layers:
        prevent_packing(layer)  # `restore` resets the attribute that this sets.
    try:
        yield state
    finally:
        state.restore()


@contextmanager
def parameters_kept(*layers: nn.Module) -> Iterator[None]:
    """Restores the device and the gradients of parameters after the context. Gradients are None on entry."""
    every = dict.fromkeys(parameter for layer in layers for parameter in layer.parameters())
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in every]
    for parameter in every:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, data, gradient in parameters:
            parameter.grad = None  # It may be on a different device than the restored data.
            if parameter.device != data.device:
                put_data(parameter, data)
            parameter.grad = gradient
