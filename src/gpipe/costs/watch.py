"""Watches the memory that operations take, of real tensors and of those without values."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, count

from torch import Tensor

from gpipe.torch_private.operations import Operations
from gpipe.values.layout import storage_address


def storage_identity(tensor: Tensor) -> int:
    """Which storage a tensor has, though it be without values."""
    return id(tensor.untyped_storage())


class Watch(Operations):
    """Watches the storages that operations inside make, until they are let go of.

    >>> import torch
    >>> watch = Watch()
    >>> with watch:
    ...     kept = torch.zeros(10) + 1
    >>> watch.end(gradients=[])
    >>> watch.peak  # two of ten numbers at once
    80

    Args:
        key: By what storages are known apart; 0 of none.

    Attributes:
        held: The bytes that were held at the end of the last run, but for gradients.
        peak: The most bytes that were held at once in a run that ended, likewise.
    """

    def __init__(self, key: Callable[[Tensor], int] = storage_address) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.peak, self._key = 0, key
        self.held = 0
        self._alive: dict[int, int] = {}  # by address, which storage it is
        self._events: list[tuple[int, int]] = []  # which storage, and how many bytes more or less are held
        self._count = count()
        self._loose: set[int] = set()
        self._marked = 0  # among the events

    def see(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Notes the storages that an operation made: neither those of what it was given, nor known ones."""
        before = set(map(self._key, given))
        for tensor in made:
            if self._key(tensor) not in before:
                self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, if it has one that is not known."""
        address = self._key(tensor)
        if address and address not in self._alive:
            storage, which = tensor.untyped_storage(), next(self._count)
            self._alive[address] = which
            self._events.append((which, storage.nbytes()))
            weakref.finalize(storage, self._let_go, address, which, storage.nbytes())

    def mark(self, *, loose: bool) -> None:
        """Notes whether what was made since the last mark is kept here for nobody but those to whom it is handed."""
        self._loose |= {which for which, size in self._events[self._marked :] if loose and size > 0}
        self._marked = len(self._events)

    def give_up(self, tensor: Tensor, *, only_loose: bool = False) -> None:
        """Counts a tensor's storage no longer, if it did: only if it is loose, perhaps."""
        address = self._key(tensor)
        which = self._alive.get(address)
        if which is not None and (not only_loose or which in self._loose):
            self._let_go(address, which, tensor.untyped_storage().nbytes())

    def _let_go(self, address: int, which: int, size: int) -> None:
        if self._alive.get(address) == which:
            del self._alive[address]
            self._events.append((which, -size))

    def end(self, gradients: Iterable[Tensor]) -> None:
        """Ends a run, with these gradients: they are no activations, whenever their storages were made."""
        known = (self._alive.pop(self._key(gradient), None) for gradient in gradients)
        state = {which for which in known if which is not None}
        sizes = accumulate((size for which, size in self._events if which not in state), initial=self.held)
        *during, self.held = sizes
        self.peak = max(self.peak, self.held, *during)
        self._events.clear()
        self._loose.clear()
        self._marked = 0
