"""Gradients added up over several processes, in one order everywhere, so that all have the same bits.

They travel as the messages of a run do: what a failed run leaves on its way is thrown away by the next, which no
collective of a process group can promise.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe.run.boundary import Gradients
from gpipe.run.net import Net
from gpipe.run.place import DATA, Place
from gpipe.run.shared import Aliases
from gpipe.run.transport import Label, Message

if TYPE_CHECKING:
    from gpipe.run.engine import Engine

TIE, REDUCE, REDUCED = -2, -3, -4
"""Routes of messages that no program lists."""
PIECE = 2**20
"""Elements of a gradient that travel together between replicas."""
NAMES = 2**32 - 1  # the number of the message that says which gradients there are


def add_over_stages(engine: "Engine", aliases: Aliases) -> None:
    """Adds up the gradients of shared weights over the stages that use them, on each of these stages."""
    place = engine.place
    assert place is not None
    stage_of = [stage.index for stage in engine.stages for _ in stage.layers]
    first = place.replica * place.stages
    others = {
        at: sorted({stage_of[layer] for layer in aliases.users[at]} - {place.stage}) for at in sorted(aliases.shared)
    }
    for at, stages in others.items():
        for stage in stages:
            own: Gradients = list(aliases.gradients(at).values())
            engine.net.send(first + stage, Label(TIE, at, gradient=True), own)
    found = {at: dict(aliases.gradients(at)) for at in others}
    for at, stages in others.items():
        for stage in stages:
            theirs, _ = engine.net.receive(first + stage, Label(TIE, at, gradient=True))
            layers = (layer for layer in sorted(aliases.users[at]) if stage_of[layer] == stage)
            found[at] |= dict(zip(layers, _gradients(theirs), strict=True))
    aliases.add_up(found)


def add_over_replicas(net: Net, place: Place, parameters: Sequence[Tensor]) -> None:
    """Adds up `.grad` over the replicas of a stage, in the order of the replicas.

    Each replica adds up some of the pieces and tells the others the sums, so that all send and receive about as
    much. A parameter that one of them has a gradient of has one everywhere afterwards.
    """
    peers = [replica * place.stages + place.stage for replica in range(place.replicas)]
    others = [peer for peer in peers if peer != net.rank]
    flat = _flat_gradients(net, others, parameters)
    owners = [peers[at % place.replicas] for at in range(len(flat))]
    for at, owner in enumerate(owners):
        if owner != net.rank:
            net.send(owner, Label(REDUCE, at, gradient=True), [flat[at]])
    for at, owner in enumerate(owners):
        if owner == net.rank:
            _add(flat[at], [None if p == net.rank else _receive(net, p, REDUCE, at) for p in peers])
            for peer in others:
                net.send(peer, Label(REDUCED, at, gradient=True), [flat[at]])
    for at, owner in enumerate(owners):
        if owner != net.rank:
            flat[at].copy_(_receive(net, owner, REDUCED, at))


def _add(own: Tensor, parts: Sequence[Tensor | None]) -> None:
    """Puts the sum of all parts in their order into `own`, which is the one that is None."""
    total: Tensor | None = None
    for part in parts:
        piece = own.clone() if part is None else part
        total = piece if total is None else total.add_(piece)
    assert total is not None
    own.copy_(total)


def _receive(net: Net, peer: int, route: int, at: int) -> Tensor:
    (piece,) = _gradients(net.receive(peer, Label(route, at, gradient=True))[0])
    assert piece is not None
    return piece


def _flat_gradients(net: Net, others: Sequence[int], parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that any replica has, as flat pieces of the memory that `.grad` has here."""
    own = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.bool)
    for peer in others:
        net.send(peer, Label(REDUCE, NAMES, gradient=False), [own])
    present = own.clone()
    for peer in others:
        (theirs,) = _gradients(net.receive(peer, Label(REDUCE, NAMES, gradient=False))[0])
        assert theirs is not None
        present |= theirs
    pieces: list[Tensor] = []
    for parameter, wanted in zip(parameters, present.tolist(), strict=True):
        if wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            pieces += _local(parameter.grad).view(-1).split(PIECE)
    return pieces


def reduces_itself(parameter: Tensor) -> bool:
    """Whether a parameter is spread over the replicas, as `fully_shard` does it, which sums its gradient too."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and DATA in (mesh.mesh_dim_names or ())


def _local(gradient: Tensor) -> Tensor:
    """What this process has of a gradient: all, or its part of a DTensor."""
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _gradients(message: Message) -> Gradients:
    assert isinstance(message, list)
    return message
