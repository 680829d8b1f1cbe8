"""Watches the memory that operations take, of real tensors and of those without values."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from torch import Tensor

from gpipe._torch.dispatcher import Operations
from gpipe.stages.memory_layout import storage_address


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

    `key` is that by which storages are known apart; 0 of none.
    """

    def __init__(self, key: Callable[[Tensor], int] = storage_address) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._key = key
        self.held = self._held_crossed = 0  # at the end of the last run, but for gradients
        self.peak = self.crossed = 0  # the most bytes at once in a run that ended; of these, those added by hand
        self._alive: dict[int, int] = {}  # by address, which storage it is
        self._events: list[tuple[int, int]] = []  # which storage, and how many bytes more or less are held
        self._numbers = count()
        self._loose: set[int] = set()
        self._added: set[int] = set()
        self._marked = 0  # among the events

    def see(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Notes the storages that an operation made: neither those of what it was given, nor known ones."""
        before = set(map(self._key, given))
        for tensor in made:
            if self._key(tensor) not in before:
                self._count(tensor)

    def add(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor that was brought, if it has one that is not known."""
        which = self._count(tensor)
        if which is not None:
            self._added.add(which)

    def _count(self, tensor: Tensor) -> int | None:
        address = self._key(tensor)
        if not address or address in self._alive:
            return None
        storage, which = tensor.untyped_storage(), next(self._numbers)
        self._alive[address] = which
        self._events.append((which, storage.nbytes()))
        weakref.finalize(storage, self._let_go, address, which, storage.nbytes())
        return which

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
        for which, size in self._events:
            if which in state:
                continue
            self.held += size
            self._held_crossed += size if which in self._added else 0
            if self.held > self.peak:
                self.peak, self.crossed = self.held, self._held_crossed
        self._events.clear()
        self._loose.clear()
        self._added.intersection_update(self._alive.values())
        self._marked = 0
