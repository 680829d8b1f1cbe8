"""Buffers that a forward changes: a recompute sees what the forward saw, and leaves them as it found them.

A copy of each buffer is kept, taken anew when the buffer has changed, so that forwards between two changes share one.
What has changed is found by comparing with the copies, since not every write raises a version (`.data`, fused
observers, torch's own normalizations). On a GPU to compare would halt it: there small buffers count as changed by
every forward, and larger ones by their version alone. A recompute works on a copy of what differs by then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe.values.layout import copy_of
from gpipe.values.tree import version

Slot: TypeAlias = tuple[nn.Module, str]
SMALL = 2**20
"""Bytes up to which a buffer on a GPU is copied for every forward."""


class Before(NamedTuple):
    """A buffer, and its value, before a forward; `there` is whether there was one of that name."""

    tensor: Tensor | None
    version: int = 0
    copy: Tensor | None = None
    there: bool = True


Snapshot: TypeAlias = dict[Slot, Before]
"""All buffers before a forward."""
_NONE, _ABSENT = Before(None), Before(None, there=False)


class Buffers:
    """The buffers of a stage's layers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.places: list[Slot] = []
        self._parts: list[nn.Module] = []
        self._kept: dict[Slot, Before] = {}

    def find(self) -> None:
        """Looks the buffers up anew; modules may have come or gone since the last step."""
        self._kept.clear()
        self._parts = list({part: None for root in self.modules for part in root.modules()})
        self.places = [(part, name) for part in self._parts for name in part._buffers]

    def forget(self) -> None:
        """Lets go of the copies, behind a forward that nobody compared with them."""
        self._kept.clear()

    def before(self) -> Snapshot:
        """The buffers before a forward."""
        if self._are_others():
            self.find()
        return {place: self._keep(place) for place in self.places}

    def _are_others(self) -> bool:
        return sum(len(part._buffers) for part in self._parts) != len(self.places)

    def _keep(self, place: Slot) -> Before:
        module, name = place
        tensor = module._buffers.get(name)
        if tensor is None:
            return _NONE
        if is_lazy(tensor):
            return Before(tensor)
        kept = self._kept.get(place)
        if kept is None or kept.tensor is not tensor or kept.version != version(tensor):
            kept = self._kept[place] = Before(tensor, version(tensor), copy_of(tensor.detach()))
        return kept

    def after(self, before: Snapshot) -> list[Slot]:
        """The buffers that are not what they were; those that are new join the snapshot."""
        changed = [place for place, was in before.items() if _is_changed(place, was)]
        for place in changed:
            self._kept.pop(place, None)
        for (module, name), was in before.items():
            if was.tensor is not None and was.copy is None and not is_lazy(was.tensor):  # it has values since
                before[module, name] = Before(was.tensor, -1, copy_of(was.tensor.detach()))
        if self._are_others():
            self.find()
            new = [place for place in self.places if place not in before]
            before.update(dict.fromkeys(new, _ABSENT))
            changed += new
        return changed

    @contextmanager
    def as_before(self, snapshot: Snapshot) -> Iterator[None]:
        """Shows modules their buffers as they were, and puts the real ones back."""
        apart = [(place, was) for place, was in snapshot.items() if _is_changed(place, was)]
        real = [(place, place[0]._buffers.get(place[1]), place[1] in place[0]._buffers) for place, _ in apart]
        _refuse_views(snapshot, apart)
        copies: dict[int, Tensor] = {}  # one tensor in several places stays one
        for place, was in apart:
            if was.copy is not None and id(was.tensor) not in copies:
                copies[id(was.tensor)] = copy_of(was.copy)
            _put(place, was.tensor if was.copy is None else copies[id(was.tensor)], there=was.there)
        try:
            yield
        finally:
            for place, tensor, there in real:
                _put(place, tensor, there=there)


def _refuse_views(snapshot: Snapshot, apart: Sequence[tuple[Slot, Before]]) -> None:
    """Refuses changed buffers that share memory: copies of them would not change together.

    Raises:
        RuntimeError: Names them.
    """
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


def _put(place: Slot, tensor: Tensor | None, *, there: bool) -> None:
    module, name = place
    if there:
        module._buffers[name] = tensor
    else:
        module._buffers.pop(name, None)


def _is_changed(place: Slot, was: Before) -> bool:
    module, name = place
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
