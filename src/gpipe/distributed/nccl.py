"""Sends tensors on GPUs with NCCL, without a copy in host memory.

The connection (connection.py) sends the description of a message. The tensors of the message follow through a process
group. Sender and receiver use the group in the order in which the connection delivers messages. Only this order
identifies the tensors.

NCCL executes the operations of a group in one queue, and a send waits for its receive. If one queue were used for
several peers or for both directions, operations could deadlock in a cycle. gpipe therefore creates a few pairs of
groups, with one group for each direction. In each pair, a process has only one peer (see `matchings`).

         rank 0 --A-- rank 1 --B-- rank 2 --A-- rank 3        A and B: two groups each, one per direction

After a failed run, the next run receives and drops the tensors that are still in flight. Sender and receiver
therefore keep the same order. If the order may differ, or if a process is lost, gpipe aborts the groups. Otherwise an
operation without a peer would block the device forever, or a process could receive the wrong tensor.

This module assumes that the queues of different NCCL groups progress independently, which was not tested with two
GPUs. This module does not limit the number of tensors in flight. The groups exist as long as the default process
group.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe._torch.accelerator import current_stream, queued_on, queues
from gpipe._torch.trees import tree_flatten, tree_unflatten
from gpipe.distributed import codec
from gpipe.distributed.codec import PeerClosed, decoding
from gpipe.distributed.mesh import Position
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Message
from gpipe.stages.tree import Tree


def matchings(pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Assigns numbers to pairs of processes. Pairs with the same number have no process in common.

    >>> matchings([(0, 1), (1, 2), (2, 3)])
    {(0, 1): 0, (1, 2): 1, (2, 3): 0}
    """
    numbers: dict[tuple[int, int], int] = {}
    for pair in sorted({(min(pair), max(pair)) for pair in pairs}):
        used = {number for other, number in numbers.items() if set(other) & set(pair)}
        numbers[pair] = next(number for number in range(len(used) + 1) if number not in used)
    return numbers


@dataclass(frozen=True)
class PendingMessage:
    """A received message with tensors that are still in flight.

    Attributes:
        sharing: See `BoundaryValue`. None for gradients.
        tree: The content of the message, with None in place of GPU tensors.
        tensors: A tuple for each GPU tensor: its positions among the leaves, its extent, its elements, and the
            pending work.
    """

    sharing: list[int] | None
    tree: Tree
    tensors: Sequence[tuple[list[int], codec.Extent, Tensor, dist.Work | None]]

    def finish(self) -> Message:
        """Returns the complete message. The current CUDA stream waits for the tensors of the message."""
        leaves, spec = tree_flatten(self.tree)
        for positions, extent, elements, work in self.tensors:
            if work is not None:
                with _backend_errors():
                    work.wait()
                if queues(elements.device):
                    elements.record_stream(current_stream(elements.device))
            tensor = codec.restore_layout(elements.view(extent.shape[0]), extent)
            for at in positions:
                leaves[at] = tensor
        value = tree_unflatten(leaves, spec)
        if self.sharing is None:
            return value  # type: ignore[no-any-return]  # gradients
        differentiable = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        return BoundaryValue(value, list(differentiable.values()), sharing=frozenset(self.sharing))


class NcclGroups:
    """The process groups that send the tensors of one device to other processes.

    All processes of the default process group must create an object of this class at the same time. Methods that send
    or wait raise `PeerClosed` if the peer aborted the group.

    Args:
        position: The position of this process in the mesh.
        crossings: Pairs of pipeline ranks that send each other tensors. Replicas always send each other tensors.
        backend: The backend, or None to send tensors through host memory.
    """

    def __init__(self, position: Position, crossings: Iterable[tuple[int, int]], backend: str | None) -> None:
        self._rank, self._members, self._device = position.rank, position.members, position.device
        pp_ranks, replicas, rank_of = range(position.pp_size), range(position.replicas), position.rank_of
        pairs = {(rank_of(low, replica), rank_of(high, replica)) for replica in replicas for low, high in crossings}
        pairs |= {(rank_of(rank, i), rank_of(rank, j)) for rank in pp_ranks for i, j in combinations(replicas, 2)}
        numbers = matchings(pairs) if backend else {}
        timeout = timedelta(seconds=position.timeout)
        groups = {
            number: [dist.new_group(backend=backend, timeout=timeout) for _ in range(2)]
            for number in sorted(set(numbers.values()))
        }
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}  # by sender and receiver
        for (low, high), number in numbers.items():
            self._groups[low, high], self._groups[high, low] = groups[number]
        self._in_flight: list[tuple[dist.Work, Tensor]] = []
        device = position.device
        # Receive on a separate stream, so that a receive does not wait for queued computations.
        self._receive_stream = torch.Stream(device) if queues(device) else None
        self._ended = False
        # Connect all pairs now. At the first message, the sender would block before it announces the message.
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for low, high in sorted(numbers, key=numbers.__getitem__):
            for sender, receiver in ((low, high), (high, low)):
                if self._rank == sender:
                    dist.send(byte, self._members[receiver], self._groups[sender, receiver])
                elif self._rank == receiver:
                    dist.recv(byte, self._members[sender], self._groups[sender, receiver])

    def has_group(self, peer: int) -> bool:
        """Returns whether NCCL sends GPU tensors to a peer. If so, `pack` does not depend on the peer."""
        return (self._rank, peer) in self._groups

    def pack(self, peer: int, message: Message) -> tuple[BoundaryValue, list[Tensor]]:
        """Splits a message into a description, which the connection sends, and the tensors to send with NCCL."""
        leaves, spec = tree_flatten(message.value if isinstance(message, BoundaryValue) else message)
        gpu_tensors: dict[int, tuple[Tensor, list[int]]] = {}
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device.type:
                gpu_tensors.setdefault(id(leaf), (leaf, []))[1].append(at)
                leaves[at] = None
        has_group = self.has_group(peer)
        described, following = [], []
        for tensor, positions in gpu_tensors.values():
            shape = codec.shape_of(tensor)
            (extent,) = codec.extents_of((shape,))
            elements = codec.flat_elements(tensor, extent) if extent.end else None
            if has_group and elements is not None:
                following.append(elements.view(torch.uint8))
                elements = None
            described.append((positions, shape, elements))
        sharing = sorted(message.sharing) if isinstance(message, BoundaryValue) else None
        return BoundaryValue((sharing, tree_unflatten(leaves, spec), described), []), following

    def follow(self, peer: int, following: Sequence[Tensor]) -> None:
        """Sends the tensors of the last message whose description the connection sent."""
        self._in_flight = [(work, tensor) for work, tensor in self._in_flight if not work.is_completed()]
        for tensor in following:
            with _backend_errors():
                work = dist.isend(tensor, self._members[peer], self._groups[self._rank, peer])
            assert work is not None  # this process is in the group
            self._in_flight.append((work, tensor))

    def expect(self, peer: int, packed: Message) -> PendingMessage:
        """Starts to receive the tensors of a message. Call this method in the order in which descriptions arrive."""
        with decoding("a message for a GPU"):
            sent: Any = packed.value if isinstance(packed, BoundaryValue) else ()
            sharing, tree, described = sent  # see `pack`
            for _, shape, _ in described:
                codec.check_shape(shape)
            extents = [codec.extents_of((shape,))[0] for _, shape, _ in described]
        tensors = []
        for (positions, _, elements), extent in zip(described, extents, strict=True):
            work = None
            if elements is not None or not extent.end:
                elements = torch.empty(0) if elements is None else elements
                elements = elements.to(self._device)
            else:
                with queued_on(self._receive_stream), _backend_errors():
                    elements = torch.empty(extent.end, dtype=torch.uint8, device=self._device)
                    work = dist.irecv(elements, self._members[peer], self._groups[peer, self._rank])
                assert work is not None
                self._in_flight.append((work, elements))  # also if the message is dropped
            tensors.append((positions, extent, elements, work))
        return PendingMessage(sharing, tree, tensors)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Aborts the groups if an exception leaves the context, because later messages could get wrong tensors."""
        if self._ended:
            raise RuntimeError(
                "The process groups of this pipe were aborted, because a process was interrupted or lost while "
                "tensors were in flight. Create the pipe again."
            )
        try:
            yield
        except BaseException:
            self.end()
            raise

    def settle(self) -> None:
        """Makes the current stream wait for all tensors in flight, so that their memory can be reused."""
        for work, _ in self._in_flight:
            with suppress(RuntimeError):  # a peer that has received everything may have ended
                if not work.is_completed():  # waiting twice blocks forever with gloo
                    work.wait()
        self._in_flight.clear()

    def end(self) -> None:
        """Aborts all groups."""
        self._ended = True
        for group in {id(group): group for group in self._groups.values()}.values():
            with suppress(RuntimeError):  # the backend cannot abort, or has already
                group.abort()


def groups_for(position: Position, crossings: Iterable[tuple[int, int]], *, plain: bool) -> NcclGroups | None:
    """Creates the groups of this process, or returns None on a CPU.

    Args:
        position: The position of this process in the mesh.
        crossings: Pairs of pipeline ranks that send each other tensors.
        plain: Whether unencrypted communication is allowed. If False, tensors go through host memory and the
            connections, because NCCL does not encrypt.
    """
    if position.device.type == "cpu":
        return None
    backends = dict(part.split(":") for part in str(dist.get_backend_config()).split(",") if ":" in part)
    backend = backends.get(position.device.type, "gloo")
    return NcclGroups(position, crossings, backend if plain and backend != "gloo" else None)


@contextmanager
def _backend_errors() -> Iterator[None]:
    """Converts errors of the backend to `PeerClosed`. The backend may detect a lost peer before the connection."""
    try:
        yield
    except RuntimeError as error:
        raise PeerClosed(str(error)) from error
