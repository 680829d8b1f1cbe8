"""Tensors on GPUs go from process to process by NCCL, and not through the hosts' memory.

The connection carries what a message is; its tensors follow over a process group. Both ends use a group in the order
in which the connection brings the messages, so nothing else tells them which is which.

NCCL has one queue a group, in which a send waits for its receive. In a queue for several peers, or for both
directions, they could wait for each other in a ring. So there are a few pairs of groups, one each direction, and in
each pair a process has one peer: `matchings` says which.

         rank 0 --A-- rank 1 --B-- rank 2 --A-- rank 3        A and B: a group down and a group up each

What a failed run has left on its way is received by the next, and thrown away, so that both ends stay in step. Where
they may not be, or if a process is gone, the groups end: what waits in a queue for it would keep the device busy for
ever, and the next tensor could be taken for another.

Assumed, since no two GPUs were at hand: that NCCL's queues of several groups go on independently of each other. How
many tensors are under way is not bounded here. The groups last as long as the world's.
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
from gpipe.distributed.codec import Gone, reading
from gpipe.distributed.mesh import Position
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Message
from gpipe.stages.tree import Tree


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


@dataclass(frozen=True)
class Coming:
    """A message some of whose tensors are on their way; `sharing` is None of gradients."""

    sharing: list[int] | None
    tree: Tree
    tensors: Sequence[tuple[list[int], codec.Extent, Tensor, dist.Work | None]]

    def finish(self) -> Message:
        """The whole message, for what is queued on the current stream from now on."""
        leaves, spec = tree_flatten(self.tree)
        for positions, extent, elements, work in self.tensors:
            if work is not None:
                with _breaking_off():
                    work.wait()
                if queues(elements.device):
                    elements.record_stream(current_stream(elements.device))
            tensor = codec.lay(elements.view(extent.shape[0]), extent)
            for at in positions:
                leaves[at] = tensor
        value = tree_unflatten(leaves, spec)
        if self.sharing is None:
            return value  # type: ignore[no-any-return]  # gradients
        wanting = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        return BoundaryValue(value, list(wanting.values()), sharing=frozenset(self.sharing))


class NcclGroups:
    """The groups by which the tensors of one device go to and from other processes.

    `crossings` are the pairs of rows that have tensors for each other; replicas of a row always have. All
    processes of the world make it at the same time. Without a backend tensors go through the hosts' memory. Whatever
    sends or waits raises `Gone` where the other end broke off.
    """

    def __init__(self, position: Position, crossings: Iterable[tuple[int, int]], backend: str | None) -> None:
        self._rank, self._members, self._device = position.rank, position.members, position.device
        rows, replicas, rank_of = range(position.rows), range(position.replicas), position.rank_of
        pairs = {(rank_of(low, replica), rank_of(high, replica)) for replica in replicas for low, high in crossings}
        pairs |= {(rank_of(row, one), rank_of(row, two)) for row in rows for one, two in combinations(replicas, 2)}
        numbers = matchings(pairs) if backend else {}
        limit = timedelta(seconds=position.timeout)
        ways = {
            number: [dist.new_group(backend=backend, timeout=limit) for _ in range(2)]
            for number in sorted(set(numbers.values()))
        }
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}  # by sender and receiver
        for (low, high), number in numbers.items():
            self._groups[low, high], self._groups[high, low] = ways[number]
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        device = position.device  # where room is made, its stream: not behind what is queued to be computed
        self._arriving = torch.Stream(device) if queues(device) else None
        self._ended = False
        # NCCL connects two processes now: at the first message, the sender would wait before it says what comes
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for low, high in sorted(numbers, key=numbers.__getitem__):
            for sender, receiver in ((low, high), (high, low)):
                if self._rank == sender:
                    dist.send(byte, self._members[receiver], self._groups[sender, receiver])
                elif self._rank == receiver:
                    dist.recv(byte, self._members[sender], self._groups[sender, receiver])

    def pack(self, peer: int, message: Message) -> tuple[BoundaryValue, list[Tensor]]:
        """What of a message the connection carries, and the tensors that follow it."""
        leaves, spec = tree_flatten(message.value if isinstance(message, BoundaryValue) else message)
        found: dict[int, tuple[Tensor, list[int]]] = {}
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device.type:
                found.setdefault(id(leaf), (leaf, []))[1].append(at)
                leaves[at] = None
        follow = (self._rank, peer) in self._groups
        described, following = [], []
        for tensor, positions in found.values():
            shape = codec.shape_of(tensor)
            (extent,) = codec.extents_of((shape,))
            elements = codec.flat(tensor, extent) if extent.end else None
            if follow and elements is not None:
                following.append(elements.view(torch.uint8))
                elements = None
            described.append((positions, shape, elements))
        sharing = sorted(message.sharing) if isinstance(message, BoundaryValue) else None
        return BoundaryValue((sharing, tree_unflatten(leaves, spec), described), []), following

    def follow(self, peer: int, following: Sequence[Tensor]) -> None:
        """Puts tensors on their way, in the order of their messages on the connection."""
        self._under_way = [(work, kept) for work, kept in self._under_way if not work.is_completed()]
        for tensor in following:
            with _breaking_off():
                work = dist.isend(tensor, self._members[peer], self._groups[self._rank, peer])
            assert work is not None  # this process is in the group
            self._under_way.append((work, tensor))

    def expect(self, peer: int, packed: Message) -> Coming:
        """Has room for what follows a message that the connection brought, in that order, as soon as it is here."""
        with reading("a message for a GPU"):
            sent: Any = packed.value if isinstance(packed, BoundaryValue) else ()
            sharing, tree, described = sent  # what `pack` gave
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
                with queued_on(self._arriving), _breaking_off():
                    elements = torch.empty(extent.end, dtype=torch.uint8, device=self._device)
                    work = dist.irecv(elements, self._members[peer], self._groups[peer, self._rank])
                assert work is not None
                self._under_way.append((work, elements))  # also if the message is thrown away
            tensors.append((positions, extent, elements, work))
        return Coming(sharing, tree, tensors)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What is begun inside is ended, or the groups are: else the ends would take one tensor for another."""
        if self._ended:
            raise RuntimeError(
                "the process groups of this pipe were ended, because a process was interrupted or gone while tensors "
                "were under way; make the pipe again"
            )
        try:
            yield
        except BaseException:
            self.end()
            raise

    def settle(self) -> None:
        """Has what is queued on the current stream from now on wait for what is under way: memory may be reused."""
        for work, _ in self._under_way:
            with suppress(RuntimeError):  # who had all may be gone
                if not work.is_completed():  # to wait twice is for ever with gloo
                    work.wait()
        self._under_way.clear()

    def end(self) -> None:
        self._ended = True
        for group in {id(group): group for group in self._groups.values()}.values():
            with suppress(RuntimeError):  # the backend cannot, or has already
                group.abort()


def groups_for(position: Position, crossings: Iterable[tuple[int, int]], *, plain: bool) -> NcclGroups | None:
    """The groups of a process whose stages have tensors for each other as `crossings` say; a CPU needs none.

    What may not travel in the clear goes by the connections, through the hosts' memory: no backend encrypts.
    """
    if position.device.type == "cpu":
        return None
    named = dict(part.split(":") for part in str(dist.get_backend_config()).split(",") if ":" in part)
    backend = named.get(position.device.type, "gloo")
    return NcclGroups(position, crossings, backend if plain and backend != "gloo" else None)


@contextmanager
def _breaking_off() -> Iterator[None]:
    """While the backend may learn sooner than the connections that the other end is gone."""
    try:
        yield
    except RuntimeError as error:
        raise Gone(str(error)) from error
