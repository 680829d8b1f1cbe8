"""Buffers that a forward changes: a recompute sees what the forward saw, and leaves them as it found them.

Most buffers never change. The first forward finds out which ones do, and from then on only these are copied before a
forward that will be recomputed; the recompute works on the copies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gpipe.run.layout import copy_of

Place = tuple[nn.Module, str]
Snapshot = list[tuple[Place, Tensor | None]]
"""What changed buffers were before a forward."""


@dataclass(slots=True)
class _Before:
    tensor: Tensor | None
    version: int
    copy: Tensor | None


class Buffers:
    """The buffers of a stage's layers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.places: list[Place] = []
        self.changing: set[Place] | None = None  # None until the first forward has shown them

    def find(self) -> None:
        """Looks the buffers up anew; modules may have come or gone since the last step."""
        found = {
            (module, name): None for root in self.modules for module in root.modules() for name in module._buffers
        }
        self.places = list(found)

    def before(self) -> list[_Before]:
        """Notes the state of the buffers before a forward, and copies those that are known to change."""
        return [self._note(place) for place in self.places]

    def _note(self, place: Place) -> _Before:
        module, name = place
        tensor = module._buffers[name]
        if tensor is None:
            return _Before(None, 0, None)
        copied = self.changing is None or place in self.changing or _writes_unseen(module)
        return _Before(tensor, tensor._version, copy_of(tensor) if copied else None)

    def after(self, before: Sequence[_Before]) -> Snapshot:
        """What a recompute must see: the earlier values of the buffers that the forward changed.

        Raises:
            RuntimeError: A buffer changed in place for the first time, and its earlier value is gone.
        """
        snapshot: Snapshot = []
        lost = []
        for place, was in zip(self.places, before, strict=True):
            module, name = place
            now = module._buffers.get(name)
            replaced = now is not was.tensor
            if not replaced and not _is_changed(module, was):
                continue
            if not replaced and was.copy is None:
                lost.append(f"{type(module).__name__}.{name}")
            snapshot.append((place, was.tensor if replaced else was.copy))
        self.changing = {place for place, _ in snapshot} | (self.changing or set())
        if lost:
            raise RuntimeError(
                f"{', '.join(lost)} changed in a forward for the first time after earlier ones had left it alone, so "
                f"a recompute would not see what the forward saw; run the step again, now that it is known, or use "
                f"remat='never'"
            )
        return snapshot

    @contextmanager
    def as_before(self, snapshot: Snapshot) -> Iterator[None]:
        """Shows modules their buffers as they were, and puts the real ones back."""
        real = [(module, name, module._buffers.get(name)) for (module, name), _ in snapshot]
        for place, was in snapshot:
            module, name = place
            module._buffers[name] = was
        try:
            yield
        finally:
            for module, name, tensor in real:
                module._buffers[name] = tensor


def _is_changed(module: nn.Module, was: _Before) -> bool:
    """Whether a buffer was written to."""
    if was.tensor is None:
        return False
    if _writes_unseen(module) or was.tensor._version != was.version:
        return True
    return was.copy is not None and not torch.equal(was.copy, was.tensor)


def _writes_unseen(module: nn.Module) -> bool:
    """Whether a module writes to its buffers without raising their version, as torch's normalizations do."""
    return isinstance(module, _NormBase) and module.training
