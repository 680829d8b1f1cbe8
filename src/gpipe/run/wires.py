"""Tensors on GPUs go from process to process by NCCL, and not through the hosts' memory.

The links (links.py) carry what a message is; its tensors follow over a process group. Both ends use a group in the
order in which the link brings the messages, so nothing else tells them which is which.

NCCL has one queue a group, in which a send waits for its receive. In a queue for several peers, or for both
directions, they could wait for each other in a ring. So there are a few pairs of groups, one each direction, and in
each pair a process has one peer: `matchings` says which.

         stage 0 --A-- stage 1 --B-- stage 2 --A-- stage 3        A and B: a group down and a group up each

What a failed run has left on its way is received by the next, and thrown away, so that both ends stay in step. If a
process is gone, the groups end with it: what waits in a queue for it would keep the device busy for ever.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from gpipe.run import codec
from gpipe.run.boundary import Parcel
from gpipe.run.frames import Gone
from gpipe.run.microbatch import Tree
from gpipe.run.place import Place
from gpipe.run.transport import Message

Told: TypeAlias = tuple[list[int], torch.dtype, torch.Size, tuple[int, ...], bool, Tensor | None]
"""Of a tensor: where in the tree it stands, its shape (`codec.Shape`), and its elements if they come by the link."""


def matchings(pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Numbers pairs of processes, so that no process is in two pairs of the same number.

    >>> matchings([(0, 1), (1, 2), (2, 3)])
    {(0, 1): 0, (1, 2): 1, (2, 3): 0}
    """
    found: dict[tuple[int, int], int] = {}
    for pair in sorted({(min(pair), max(pair)) for pair in pairs}):
        used = {number for other, number in found.items() if set(other) & set(pair)}
        found[pair] = next(number for number in range(len(used) + 1) if number not in used)
    return found


def pairs_of(stages: int, replicas: int, crossings: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """The pairs of processes that have tensors for each other: within a replica, and the replicas of a stage.

    >>> sorted(pairs_of(2, 2, {(0, 1)}))
    [(0, 1), (0, 2), (1, 3), (2, 3)]
    """
    within = {(r * stages + low, r * stages + high) for r in range(replicas) for low, high in crossings}
    beside = combinations(range(replicas), 2)
    return within | {(one * stages + s, other * stages + s) for one, other in beside for s in range(stages)}


@dataclass(frozen=True)
class Coming:
    """A message some of whose tensors are on their way."""

    is_parcel: bool
    tree: Tree
    tensors: Sequence[tuple[list[int], codec.Place, Tensor, dist.Work | None]]

    def finish(self) -> Message:
        """The whole message, for what is queued on the current stream from now on.

        Raises:
            Gone: The other end broke off.
        """
        leaves, spec = pytree.tree_flatten(self.tree)
        for positions, place, elements, work in self.tensors:
            if work is not None:
                with _breaking_off():
                    work.wait()
                if elements.is_cuda:
                    elements.record_stream(torch.cuda.current_stream(elements.device))
            tensor = codec.lay(elements.view(place.shape[0]), place)
            for at in positions:
                leaves[at] = tensor
        value = pytree.tree_unflatten(leaves, spec)
        if not self.is_parcel:
            return value  # type: ignore[no-any-return]  # gradients
        wanting = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        return Parcel(value, list(wanting.values()))


class Wires:
    """The groups by which the tensors of one device go to and from other processes.

    `crossings` are the pairs of stages that have tensors for each other; replicas of a stage always have. All
    processes of the world make it at the same time. Without a backend tensors go through the hosts' memory.
    """

    def __init__(self, place: Place, crossings: Iterable[tuple[int, int]], backend: str | None) -> None:
        self._rank, self._members, self._device = place.rank, place.members, place.device
        self._groups = (
            _groups(matchings(pairs_of(place.stages, place.replicas, crossings)), backend) if backend else {}
        )
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._arriving = _stream(place.device)

    def send(self, peer: int, message: Message) -> Parcel:
        """Puts the tensors of a message on their way; gives what else there is of it, for the link.

        Raises:
            Gone: The other end broke off.
        """
        is_parcel = isinstance(message, Parcel)
        leaves, spec = pytree.tree_flatten(message.value if isinstance(message, Parcel) else message)
        found: dict[int, tuple[Tensor, list[int]]] = {}
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device.type:
                found.setdefault(id(leaf), (leaf, []))[1].append(at)
                leaves[at] = None
        told = [self._send(peer, tensor, positions) for tensor, positions in found.values()]
        return Parcel((is_parcel, pytree.tree_unflatten(leaves, spec), told), [])

    def _send(self, peer: int, tensor: Tensor, positions: list[int]) -> Told:
        (place,) = codec.places_of((codec.shape_of(tensor),))
        dtype, size, strides, wants_gradient = place.shape
        elements = codec.flat(tensor, place) if place.end else None
        group = self._groups.get((self._rank, peer))
        if group is not None and elements is not None:
            sent = elements.view(torch.uint8)
            with _breaking_off():
                self._keep(_begun(dist.isend(sent, self._members[peer], group)), sent)
            elements = None
        return positions, dtype, torch.Size(size), strides, wants_gradient, elements

    def _keep(self, work: dist.Work, tensor: Tensor) -> None:
        """Holds what a queue still needs, also if the message was thrown away."""
        self._under_way = [(other, kept) for other, kept in self._under_way if not other.is_completed()]
        self._under_way.append((work, tensor))

    def expect(self, peer: int, packed: Message) -> Coming:
        """Has room for what follows a message that the link brought: for each in its order, as soon as it is here.

        Raises:
            Gone: The other end broke off.
        """
        assert isinstance(packed, Parcel)
        sent: Any = packed.value
        is_parcel, tree, told = sent  # what `send` gave
        return Coming(is_parcel, tree, [self._expect(peer, one) for one in told])

    def _expect(self, peer: int, told: Told) -> tuple[list[int], codec.Place, Tensor, dist.Work | None]:
        positions, dtype, size, strides, wants_gradient, elements = told
        shape: codec.Shape = (dtype, tuple(size), strides, wants_gradient)
        (place,) = codec.places_of((shape,))
        if elements is not None or not place.end:
            elements = torch.empty(0, dtype=dtype) if elements is None else elements
            return positions, place, elements.to(self._device), None
        with self._arriving():
            elements = torch.empty(place.end, dtype=torch.uint8, device=self._device)
            with _breaking_off():
                work = _begun(dist.irecv(elements, self._members[peer], self._groups[peer, self._rank]))
            self._keep(work, elements)
        return positions, place, elements, work

    def end(self) -> None:
        """Ends the groups, and with them what waits in their queues."""
        for group in {id(group): group for group in self._groups.values()}.values():
            with suppress(RuntimeError):  # the backend cannot, or has already
                group.abort()


def wires_for(place: Place, crossings: Iterable[tuple[int, int]]) -> Wires | None:
    """The wires of a process whose stages have tensors for each other as `crossings` say; a CPU needs none."""
    if place.device.type == "cpu":
        return None
    return Wires(place, crossings, "nccl" if "nccl" in str(dist.get_backend_config()) else None)


def _groups(numbers: Mapping[tuple[int, int], int], backend: str) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group for each sender and receiver; two for each number of a pair, of all processes of the world."""
    ways = {number: [dist.new_group(backend=backend) for _ in range(2)] for number in sorted(set(numbers.values()))}
    found = {}
    for (low, high), number in numbers.items():
        found[low, high], found[high, low] = ways[number]
    return found


@contextmanager
def _breaking_off() -> Iterator[None]:
    """While the backend may learn sooner than the links that the other end is gone."""
    try:
        yield
    except RuntimeError as error:
        raise Gone(str(error)) from error


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this process is in the group
    return work


def _stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Where room is made: not behind what is queued to be computed."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.Stream(device)
    return lambda: torch.cuda.stream(stream)
