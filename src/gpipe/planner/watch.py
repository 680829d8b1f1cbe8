"""Tracks the memory that operations allocate, for real and for fake tensors."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from torch import Tensor

from gpipe._torch.dispatcher import Operations
from gpipe.stages.memory_layout import storage_address


def storage_identity(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage. This also works for fake tensors."""
    return id(tensor.untyped_storage())


class Watch(Operations):
    """Tracks the storages that operations in this context allocate, until the storages are freed.

    Args:
        key: A function that returns the same key for tensors with the same storage, and 0 for tensors without
            storage.
            Default: the address of the storage.

    Attributes:
        held: The bytes that existed at the end of the last run, without gradients.
        peak: The maximum number of bytes that existed at the same time during a run that ended.
        crossed: The share of `peak` that `add` counted, in bytes.

    >>> import torch
    >>> watch = Watch()
    >>> with watch:
    ...     kept = torch.zeros(10) + 1
    >>> watch.end(gradients=[])
    >>> watch.peak  # two tensors with ten numbers at the same time
    80
    """

    def __init__(self, key: Callable[[Tensor], int] = storage_address) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._key = key
        self.held = self._held_crossed = 0
        self.peak = self.crossed = 0
        self._alive: dict[int, int] = {}  # the number of each storage, by key
        self._events: list[tuple[int, int]] = []  # the number of a storage, and the change in bytes
        self._numbers = count()
        self._loose: set[int] = set()
        self._added: set[int] = set()
        self._marked = 0  # the number of events at the last mark

    def see(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Counts the new storages of an operation's outputs `made`. Storages of its inputs `given` are not new."""
        before = set(map(self._key, given))
        for tensor in made:
            if self._key(tensor) not in before:
                self._count(tensor)

    def add(self, tensor: Tensor) -> None:
        """Counts the storage of a received tensor, if it is new."""
        number = self._count(tensor)
        if number is not None:
            self._added.add(number)

    def _count(self, tensor: Tensor) -> int | None:
        key = self._key(tensor)
        if not key or key in self._alive:
            return None
        storage, number = tensor.untyped_storage(), next(self._numbers)
        self._alive[key] = number
        self._events.append((number, storage.nbytes()))
        weakref.finalize(storage, self._free, key, number, storage.nbytes())
        return number

    def mark(self, *, loose: bool) -> None:
        """Marks the storages allocated since the last mark.

        If `loose`, also records that only a different rank keeps these storages.
        """
        self._loose |= {number for number, size in self._events[self._marked :] if loose and size > 0}
        self._marked = len(self._events)

    def give_up(self, tensor: Tensor, *, only_loose: bool = False) -> None:
        """Stops counting a tensor's storage. If `only_loose`, only if the storage was marked as loose."""
        key = self._key(tensor)
        number = self._alive.get(key)
        if number is not None and (not only_loose or number in self._loose):
            self._free(key, number, tensor.untyped_storage().nbytes())

    def _free(self, key: int, number: int, size: int) -> None:
        if self._alive.get(key) == number:
            del self._alive[key]
            self._events.append((number, -size))

    def end(self, gradients: Iterable[Tensor]) -> None:
        """Ends a run. The storages of `gradients` do not count, even if they were allocated in the run."""
        numbers = (self._alive.pop(self._key(gradient), None) for gradient in gradients)
        state = {number for number in numbers if number is not None}
        for number, size in self._events:
            if number in state:
                continue
            self.held += size
            self._held_crossed += size if number in self._added else 0
            if self.held > self.peak:
                self.peak, self.crossed = self.held, self._held_crossed
        self._events.clear()
        self._loose.clear()
        self._added.intersection_update(self._alive.values())
        self._marked = 0
