"""Gradients added up over several processes, in one order everywhere, so that all have the same bits.

They travel as the messages of a run do: what a failed run leaves on its way is thrown away by the next, which no
collective of a process group can promise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from gpipe._torch.autograd import copy_each
from gpipe._torch.modules import break_off, carry_gradients, end_backwards, gradients_of, settings_of
from gpipe.distributed.codec import damaged
from gpipe.distributed.endpoint import Endpoint, Exchange
from gpipe.distributed.mesh import DATA, Position
from gpipe.stages.boundary import BoundaryValue, Gradients
from gpipe.stages.dtensor import is_distributed_over, local_tensor
from gpipe.stages.messages import Control, Label
from gpipe.stages.shared_weights import WeightAliases

BUCKET = 2**22  # bytes of gradients that travel together between replicas; measured from 2**19 to 2**23, on two cores
SMALL = 2**16  # bytes of a gradient that is copied to be together with others: a message costs more
MOST = 2**20  # messages that a stage numbers: one for each bucket, and the last says which gradients there are


def add_over_stages(
    endpoint: Endpoint, position: Position, placement: Sequence[int], stage_of: Sequence[int], aliases: WeightAliases
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
        endpoint.send(position.rank_of(row), label, own)
    for row, shared in sorted(common.items()):
        message, _ = endpoint.receive(position.rank_of(row), label)
        if not isinstance(message, list):
            raise damaged(position.rank_of(row), "a value in place of gradients")
        theirs = (one if isinstance(one, Tensor) else None for one in message)  # no weight's is UNDEFINED
        for at in shared:
            found[at] |= {layer: next(theirs) for layer in sorted(aliases.users[at]) if row_of[layer] == row}
    aliases.add_up(found)


def add_over_replicas(
    endpoint: Endpoint, position: Position, stage: int, parameters: Sequence[Tensor]
) -> Exchange[None]:
    """Adds up `.grad` over the replicas of a stage, in the order of the replicas.

    Each replica adds up some of the buckets and sends the others the sums, so that all send and receive about as
    much. A parameter that one of them has a gradient of has one everywhere afterwards.

    Note "Ahead". A replica sends one round of buckets before it ends the one before: so all have work while messages
    are under way, and never more than four are to one that takes none, for which there is room (see `Endpoint`).
    """
    peers, first = position.ranks_of_row, stage * MOST
    gradients = yield from _all_gradients(endpoint, position, first + MOST - 1, parameters)
    staged = [gradient.contiguous() for gradient in gradients]  # mostly the same memory
    buckets = _buckets(staged)
    rounds = [range(at, min(at + len(peers), len(buckets))) for at in range(0, len(buckets), len(peers))]
    flat: dict[int, Tensor] = {}  # of the buckets under way; one tensor is much sooner sent than many
    for ahead, behind in zip([*rounds, ()], [(), *rounds], strict=True):
        for at, owner in zip(ahead, peers, strict=False):
            flat[at] = buckets[at][0] if len(buckets[at]) == 1 else torch.cat(buckets[at])
            if owner != endpoint.rank:
                label = Label(Control.GRADIENTS, first + at, gradient=True)
                yield from endpoint.sending(owner, label, BoundaryValue(flat[at], []))
        for at, owner in zip(behind, peers, strict=False):
            if owner == endpoint.rank:
                flat[at] = yield from _add_up(endpoint, peers, first + at, flat[at])
        for at, owner in zip(behind, peers, strict=False):
            total = flat.pop(at)
            if owner != endpoint.rank:
                label = Label(Control.SUMMED_GRADIENTS, first + at, gradient=True)
                total = yield from endpoint.receiving_value(owner, label)
            if total is not buckets[at][0]:
                copy_each(buckets[at], total.split([piece.numel() for piece in buckets[at]]))
    for gradient, total in zip(gradients, staged, strict=True):
        if total is not gradient:
            gradient.copy_(total)


def _add_up(endpoint: Endpoint, peers: Sequence[int], at: int, own: Tensor) -> Exchange[Tensor]:
    parts = dict.fromkeys(peers, own)
    others = [peer for peer in peers if peer != endpoint.rank]
    for peer in others:
        parts[peer] = yield from endpoint.receiving_value(peer, Label(Control.GRADIENTS, at, gradient=True))
    total, *rest = parts.values()
    for part in rest:
        total.add_(part)
    for peer in others:
        label = Label(Control.SUMMED_GRADIENTS, at, gradient=True)
        yield from endpoint.sending(peer, label, BoundaryValue(total, []))
    return total


def _all_gradients(
    endpoint: Endpoint, position: Position, at: int, parameters: Sequence[Tensor]
) -> Exchange[list[Tensor]]:
    """The gradients that any replica has, zeros where it is another."""
    own = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.bool, device="cpu")
    label = Label(Control.GRADIENTS, at, gradient=True)
    gathered = yield from endpoint.swapping(label, dict.fromkeys(position.ranks_of_row, own))
    present = [parameter for parameter, has in zip(parameters, torch.stack(gathered).any(0), strict=True) if has]
    for parameter in present:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and cannot be added "
                f"up over replicas; use sparse=False"
            )
    return [local_tensor(parameter.grad) for parameter in present if parameter.grad is not None]


def _buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Flat pieces of the memory of `.grad`, in order: large ones apart, small ones of one dtype a bucket together."""
    buckets: list[list[Tensor]] = []
    room = 0
    for piece in (p for gradient in gradients for p in gradient.view(-1).split(BUCKET // gradient.element_size())):
        if not buckets or piece.nbytes > min(room, SMALL) or piece.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = BUCKET if piece.nbytes <= SMALL else piece.nbytes
        buckets[-1].append(piece)
        room -= piece.nbytes
    return buckets


def reduces_itself(parameter: Tensor) -> bool:
    """Whether a parameter is spread over the replicas, as `fully_shard` does it, which sums its gradient too."""
    return is_distributed_over(parameter, DATA)


class Shards:
    """What layers under `fully_shard` exchange in a run, by connections: seen by who records, and in one order.

    Those of a stage are gathered by its UNSHARD and freed by its RESHARD; its REDUCE adds up the gradients of all
    micro-batches. What is spread over other processes than the replicas is gathered by torch, when first needed.
    A single replica has none of these actions: torch gathers all when a run begins, and gives the shards
    their gradients when one that `trains` ends. `spread` has the modules by stage.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        position: Position,
        spread: Mapping[int, Sequence[nn.Module]],
        *,
        trains: bool = False,
    ) -> None:
        self._endpoint, self._position, self._spread = endpoint, position, spread
        self._peers = position.ranks_of_row
        self._numbers = count()
        self._own = {stage: [m for m in some if goes_over_replicas(m, position)] for stage, some in spread.items()}
        self._rooms: list[tuple[Tensor, Tensor]] = []  # for what is gathered, and its part that is here
        self._put_back = list(map(settings_of, self.modules))
        self._alone, self._trains, self._carried = position.replicas == 1, trains, list[Tensor]()
        for module in self.modules:
            module.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
        for module in () if self._alone else self.modules:
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # what is added up is weighed already
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # as gloo can
        for module in () if self._alone else chain.from_iterable(self._own.values()):
            module.set_custom_all_gather(_Collective(self._note_gather))  # type: ignore[operator]
            module.set_custom_reduce_scatter(_Collective(self._take_sum))  # type: ignore[operator]
        self._sync(self.modules, False)
        for module in self.modules if self._alone else ():
            module.unshard()  # type: ignore[operator]
            self._carried += carry_gradients(module) if trains else []

    @property
    def modules(self) -> list[nn.Module]:
        return [module for some in self._spread.values() for module in some]

    @property
    def goes_beyond(self) -> bool:
        return self._own != self._spread

    def gather(self, stage: int) -> Exchange[None]:
        """Gathers the weights of a stage, a module at a time."""
        for module in self._own[stage]:
            gathering = module.unshard(async_op=True)  # type: ignore[operator]
            while self._rooms:
                room, own = self._rooms.pop()
                label = self._label(gradient=False)
                parts = yield from self._endpoint.swapping(label, dict.fromkeys(self._peers, own))
                for place, part in zip(room.chunk(len(parts)), parts, strict=True):
                    if part is not own:  # which is in its place
                        place.copy_(part)
            gathering.wait()

    def free(self, stage: int) -> None:
        for module in self._own[stage]:
            module.reshard()  # type: ignore[operator]

    def reduce(self, stage: int) -> Exchange[None]:
        """Adds up the gradients of a stage, each process its shards.

        Raises:
            ValueError: Replicas have gradients of different weights, whose sums torch would mix up.
        """
        if not self.modules:  # of any stage
            return
        modules = self._spread.get(stage, ())
        have = [[gradient is not None for gradient, _ in gradients_of(module)] for module in modules]
        theirs = yield from self._endpoint.swapping(self._label(gradient=True), dict.fromkeys(self._peers, have))
        if any(other != have for other in theirs):
            raise ValueError(
                f"stage {stage} has layers under fully_shard, and the replicas used different ones of its weights in "
                f"this step; use the same in all replicas, or leave layers that not all use without fully_shard"
            )
        for module in self._own.get(stage, ()):
            yield from self._add_up(
                [g.chunk(len(self._peers), at) for g, at in gradients_of(module) if g is not None]
            )
        self._settle(modules)

    def end(self, *, well: bool) -> None:
        """Frees what was gathered, of a run that failed also what gradients there are of it; torch gathers again."""
        if well and self._alone and self._trains:
            for parameter in self._carried:
                parameter.grad = None
            self._settle(self.modules)
        for module in self.modules:
            if not well:
                break_off(module)
            module.reshard()  # type: ignore[operator]
        for put_back in self._put_back:
            put_back()

    def _label(self, *, gradient: bool) -> Label:
        return Label(Control.SHARDS, next(self._numbers), gradient)

    def _settle(self, modules: Iterable[nn.Module]) -> None:
        """Has torch give the shards the gradients of what was gathered."""
        self._sync(modules, True)
        for module in modules:
            end_backwards(module)

    def _sync(self, modules: Iterable[nn.Module], now: bool) -> None:
        for module in modules:
            module.set_requires_gradient_sync(now, recurse=False)  # type: ignore[operator]
            module.set_reshard_after_backward(now, recurse=False)  # type: ignore[operator]

    def _add_up(self, gradients: Sequence[Sequence[Tensor]]) -> Exchange[None]:
        """Adds up of gradients, each in shards, those of this process, in their places, in the order of replicas."""
        parts = {
            peer: [shards[at] for shards in gradients if at < len(shards)]  # few rows are fewer shards
            for at, peer in enumerate(self._peers)
        }
        totals, *others = yield from self._endpoint.swapping(self._label(gradient=True), parts)
        for own, total, *more in zip(parts[self._endpoint.rank], totals, *others, strict=True):
            for part in more:
                total.add_(part)
            if total is not own:
                own.copy_(total)

    def _note_gather(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        self._rooms.append((output_tensor, input_tensor))

    def _take_sum(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        output_tensor.copy_(input_tensor.chunk(len(self._peers))[self._position.replica])


def goes_over_replicas(module: nn.Module, position: Position) -> bool:
    """Whether what `fully_shard` spreads of a module, it spreads over the replicas, and over nothing else."""
    ranks = [position.members[rank] for rank in position.ranks_of_row]
    spread = filter(reduces_itself, module.parameters())
    return all(p.device_mesh.mesh.flatten().tolist() == ranks for p in spread)  # type: ignore[attr-defined]


@dataclass
class _Collective:
    """As `fully_shard` asks for one."""

    call: Callable[..., None]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *given: Any, **named: Any) -> None:
        self.call(*given, **named)
