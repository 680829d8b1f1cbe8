"""What a rank holds at its peak: state, which is counted, and activations, which are watched as they come and go."""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from gpipe.torch_private.operations import Operations
from gpipe.torch_private.trees import tree_leaves
from gpipe.values.layout import storage_address


@dataclass(frozen=True)
class Held:
    """What a rank holds when it holds most, in bytes.

    Attributes:
        weights: Of parameters and buffers.
        gradients: Of parameters.
        optimizer: Of the states of optimizers that were stepped while recording.
        activations: All else that its operations make: what forwards keep for backwards, what goes to other ranks,
            and what is there for the length of an operation. What another rank made counts there. None if they were
            not watched.

    >>> Held(weights=100, gradients=100, optimizer=200, activations=50).total
    450
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int | None = None

    @property
    def state(self) -> int:
        """What is held whatever the mini-batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it that is known."""
        return self.state + (self.activations or 0)


class Watch(Operations):
    """Watches the storages that operations inside make, until they are let go of.

    >>> import torch
    >>> watch = Watch()
    >>> with watch:
    ...     kept = torch.zeros(10) + 1
    >>> watch.peak(without=[])  # two of ten numbers at once
    80
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._alive: set[int] = set()
        self._events: list[tuple[int, int]] = []  # where, and how many bytes more or less are held

    def see(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Notes the storages that an operation made: neither those of what it was given, nor known ones."""
        before = set(map(storage_address, given))
        for tensor in made:
            address = storage_address(tensor)
            if address and address not in self._alive and address not in before:
                storage = tensor.untyped_storage()
                self._alive.add(address)
                self._events.append((address, storage.nbytes()))
                weakref.finalize(storage, self._let_go, address, storage.nbytes())

    def _let_go(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._events.append((key, -size))

    def peak(self, without: Collection[int]) -> int:
        """The most bytes that were held at once, but for the storages with these addresses that are alive still."""
        alive = {key for key in without if key in self._alive}
        last = {key: at for at, (key, size) in enumerate(self._events) if size > 0 and key in alive}
        some = (size for at, (key, size) in enumerate(self._events) if last.get(key) != at)
        return max(accumulate(some), default=0)


def held(modules: Iterable[nn.Module], states: Iterable[Mapping[Tensor, Any]], watch: Watch | None) -> Held:
    """What the modules of a rank, optimizers and activations need.

    Args:
        modules: The layers of the rank.
        states: The states of optimizers, by parameter.
        watch: What was seen while it computed.
    """
    parameters = dict.fromkeys(p for module in modules for p in module.parameters())
    buffers = dict.fromkeys(b for module in modules for b in module.buffers())
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimizer = [state.get(p) for state in states for p in parameters]
    return Held(
        _bytes([*parameters, *buffers]),
        _bytes(gradients) or _bytes([p for p in parameters if p.requires_grad]),
        _bytes(leaf for leaf in tree_leaves(optimizer) if isinstance(leaf, Tensor)),
        None if watch is None else watch.peak(list(map(storage_address, gradients))),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({storage_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
