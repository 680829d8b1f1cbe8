"""Gradients added up over several processes, in one order everywhere, so that all have the same bits.

They travel as the messages of a run do: what a failed run leaves on its way is thrown away by the next, which no
collective of a process group can promise.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpipe._torch.autograd import copy_each
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.frames import damaged
from gpipe.distributed.mesh import DATA, Position
from gpipe.stages.boundary import Gradients
from gpipe.stages.layout import is_spread_over, local
from gpipe.stages.messages import Control, Label
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.tree import Tree

BUCKET = 2**22
"""Bytes of gradients that travel together between replicas; measured between 2**19 and 2**23, on two cores."""
SMALL = 2**16
"""Bytes of a gradient that is copied to be together with others: a message costs more."""
MOST = 2**20
"""Messages that a stage numbers: one for each bucket, and the last says which gradients there are."""

Bucket: TypeAlias = list[Tensor]
"""Gradients that travel together: flat pieces of the memory that `.grad` has."""


def add_over_stages(
    net: Endpoint, position: Position, placement: Sequence[int], stage_of: Sequence[int], aliases: WeightAliases
) -> None:
    """Adds up the gradients of shared weights over the stages that use them, in each process that has one of these.

    `placement` is the row of each stage, `stage_of` the stage of each layer.
    """
    label = Label(Control.TIED_GRADIENTS, 0, gradient=True)
    row_of = [placement[stage] for stage in stage_of]  # of each layer
    found = {at: dict(aliases.gradients(at)) for at in sorted(aliases.shared)}
    common: dict[int, list[int]] = {}  # which shared parameters each other row uses as well
    for at in found:
        for row in {row_of[layer] for layer in aliases.users[at]} - {position.row}:
            common.setdefault(row, []).append(at)
    for row, shared in sorted(common.items()):
        own: Gradients = [gradient for at in shared for gradient in aliases.gradients(at).values()]
        net.send(position.rank_of(row), label, own)
    for row, shared in sorted(common.items()):
        theirs = iter(_receive(net, position.rank_of(row), label))
        for at in shared:
            found[at] |= {layer: next(theirs) for layer in sorted(aliases.users[at]) if row_of[layer] == row}
    aliases.add_up(found)


def add_over_replicas(net: Endpoint, position: Position, stage: int, parameters: Sequence[Tensor]) -> None:
    """Adds up `.grad` over the replicas of a stage, in the order of the replicas.

    Each replica adds up some of the buckets and sends the others the sums, so that all send and receive about as
    much. A parameter that one of them has a gradient of has one everywhere afterwards.

    Note "Ahead". A replica sends one round of buckets before it ends the one before: so all have work while messages
    are under way, and never more than four are to one that takes none, for which a link has room (see `Endpoint`).
    """
    peers = position.ranks_of_row
    first = stage * MOST
    gradients = list(_all_gradients(net, peers, first + MOST - 1, parameters))
    staged = [gradient.contiguous() for gradient in gradients]  # mostly the same memory
    buckets = _buckets(_pieces(staged))
    rounds = [range(at, min(at + len(peers), len(buckets))) for at in range(0, len(buckets), len(peers))]
    flat: dict[int, Tensor] = {}  # of the buckets under way
    for ahead, behind in zip([*rounds, ()], [(), *rounds], strict=True):
        for at, owner in zip(ahead, peers, strict=False):
            flat[at] = _flat(buckets[at])
            _send(net, [owner], Control.GRADIENTS, first + at, flat[at])
        for at, owner in zip(behind, peers, strict=False):
            if owner == net.rank:
                _add(
                    flat[at],
                    [None if p == net.rank else _receive_one(net, p, Control.GRADIENTS, first + at) for p in peers],
                )
                _send(net, peers, Control.SUMMED_GRADIENTS, first + at, flat[at])
        for at, owner in zip(behind, peers, strict=False):
            here = owner == net.rank
            _put_back(
                buckets[at], flat.pop(at) if here else _receive_one(net, owner, Control.SUMMED_GRADIENTS, first + at)
            )
    for gradient, total in zip(gradients, staged, strict=True):
        if total is not gradient:
            gradient.copy_(total)


def _flat(bucket: Bucket) -> Tensor:
    """One tensor is much sooner sent than many."""
    return bucket[0] if len(bucket) == 1 else torch.cat(bucket)


def _put_back(bucket: Bucket, total: Tensor) -> None:
    if len(bucket) > 1:
        copy_each(bucket, total.split([piece.numel() for piece in bucket]))
    elif total.data_ptr() != bucket[0].data_ptr():
        bucket[0].copy_(total)


def _add(own: Tensor, parts: Sequence[Tensor | None]) -> None:
    """Puts the sum of all parts in their order into `own`, which is the one that is None."""
    first, second, *others = [own if part is None else part for part in parts]
    total = second.add_(first) if second is own else first.add_(second)  # the same sum, and mostly no copy
    for other in others:
        total.add_(other)
    if total is not own:
        own.copy_(total)


def _send(net: Endpoint, peers: Sequence[int], control: Control, at: int, gradient: Tensor) -> None:
    for peer in peers:
        if peer != net.rank:
            net.send(peer, Label(control, at, gradient=True), [gradient])


def _receive_one(net: Endpoint, peer: int, control: Control, at: int) -> Tensor:
    (gradient,) = _receive(net, peer, Label(control, at, gradient=True))
    if gradient is None:
        raise damaged(peer, "no gradient")
    return gradient


def _all_gradients(net: Endpoint, peers: Sequence[int], at: int, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """The gradients that any replica has, zeros where it is another."""
    own = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.bool)
    _send(net, peers, Control.GRADIENTS, at, own)
    present = own.clone()
    for peer in peers:
        if peer != net.rank:
            present |= _receive_one(net, peer, Control.GRADIENTS, at)
    for parameter, wanted in zip(parameters, present.tolist(), strict=True):
        if wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and cannot be added "
                    f"up over replicas; use sparse=False"
                )
            yield local(parameter.grad)


def _pieces(gradients: Iterable[Tensor]) -> Iterator[Tensor]:
    """Gradients in flat pieces, none larger than a bucket."""
    for gradient in gradients:
        flat = gradient.view(-1)
        yield from [flat] if flat.nbytes <= BUCKET else flat.split(BUCKET // flat.element_size())


def _buckets(pieces: Iterable[Tensor]) -> list[Bucket]:
    """Pieces in their order, a large one by itself, of small ones of one dtype as many as make a bucket."""
    buckets: list[Bucket] = []
    room = 0
    for piece in pieces:
        if not buckets or piece.nbytes > min(room, SMALL) or piece.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = BUCKET if piece.nbytes <= SMALL else piece.nbytes
        buckets[-1].append(piece)
        room -= piece.nbytes
    return buckets


def check_lockstep(net: Endpoint, position: Position, micro_batches: int, why: str) -> None:
    """Checks that all replicas have as many micro-batches, because they will wait for each other in each."""
    counts = gather_replicas(net, position, Control.MICRO_BATCHES, micro_batches)
    if len(set(counts)) > 1:
        raise ValueError(
            f"{why}, but the replicas have {counts} of them; give each replica at least M rows in every step, and "
            f"leave out a last mini-batch that is smaller (drop_last=True)"
        )


def gather_replicas(
    net: Endpoint, position: Position, control: Control, value: Tree, *, number: int = 0
) -> list[Any]:
    """Gathers a value from each replica, by replica; once a run for each number."""
    peers, label = position.ranks_of_row, Label(control, number, gradient=False)
    for peer in peers:
        if peer != net.rank:
            net.send_value(peer, label, value)
    return [value if peer == net.rank else net.receive_value(peer, label) for peer in peers]


def reduces_itself(parameter: Tensor) -> bool:
    """Whether a parameter is spread over the replicas, as `fully_shard` does it, which sums its gradient too."""
    return is_spread_over(parameter, DATA)


def _receive(net: Endpoint, peer: int, label: Label) -> list[Tensor | None]:
    """Receives gradients of weights, which are never undefined."""
    message, _ = net.receive(peer, label)
    if not isinstance(message, list):
        raise damaged(peer, "a value in place of gradients")
    return [found if isinstance(found, Tensor) else None for found in message]
