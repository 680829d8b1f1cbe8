"""Sums gradients over processes in a fixed order, so that results are bitwise identical on all ranks.

gpipe sends gradients as messages of a run, and does not use the collectives of torch.distributed. The next run can
therefore drop the messages of a failed run, which would be impossible with collectives.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from gpipe._torch.autograd import copy_each
from gpipe._torch.modules import break_off, carry_gradients, end_backwards, gradients_of, settings_of
from gpipe.distributed.codec import corrupt_message_error
from gpipe.distributed.endpoint import Endpoint, Exchange
from gpipe.distributed.mesh import DATA, Position
from gpipe.stages.boundary import BoundaryValue, Gradients
from gpipe.stages.dtensor import is_distributed_over, local_tensor
from gpipe.stages.messages import Control, Label
from gpipe.stages.shared_weights import WeightAliases

BUCKET = 2**22  # bytes of gradients per message between replicas; the fastest of 2**19 to 2**23 on two cores
SMALL = 2**16  # gradients up to this size are copied into a common bucket, which is cheaper than a message
MESSAGES_PER_STAGE = 2**20  # one for each bucket; the last one says which gradients exist


def add_over_stages(
    endpoint: Endpoint, position: Position, placement: Sequence[int], stage_of: Sequence[int], aliases: WeightAliases
) -> None:
    """Sums the gradients of shared weights over the stages that use these weights.

    Every process with such a stage must call this function, and receives the sums.

    Args:
        endpoint: The connections of this process.
        position: The position of this process in the mesh.
        placement: The pipeline rank of each stage.
        stage_of: The stage of each layer.
        aliases: The shared weights of this process.
    """
    label = Label(Control.TIED_GRADIENTS, 0, gradient=True)
    rank_of_layer = [placement[stage] for stage in stage_of]
    gradients = {index: dict(aliases.gradients(index)) for index in sorted(aliases.shared)}
    common: dict[int, list[int]] = {}  # for each other pipeline rank, the shared parameters that it also uses
    for index in gradients:
        for pp_rank in {rank_of_layer[layer] for layer in aliases.users[index]} - {position.pp_rank}:
            common.setdefault(pp_rank, []).append(index)
    for pp_rank, shared in sorted(common.items()):
        own: Gradients = [gradient for index in shared for gradient in aliases.gradients(index).values()]
        endpoint.send(position.rank_of(pp_rank), label, own)
    for pp_rank, shared in sorted(common.items()):
        peer = position.rank_of(pp_rank)
        message, _ = endpoint.receive(peer, label)
        if not isinstance(message, list):
            raise corrupt_message_error(peer, "a value instead of gradients")
        remote = (one if isinstance(one, Tensor) else None for one in message)  # never UNDEFINED for a weight
        for index in shared:
            layers = [layer for layer in sorted(aliases.users[index]) if rank_of_layer[layer] == pp_rank]
            gradients[index] |= {layer: next(remote) for layer in layers}
    aliases.add_up(gradients)


def add_over_replicas(
    endpoint: Endpoint, position: Position, stage: int, parameters: Sequence[Tensor]
) -> Exchange[None]:
    """Sums the `.grad` of parameters over the replicas of a stage, in the order of the replicas.

    Each replica sums some of the buckets and sends the sums to the other replicas, so that all replicas send and
    receive about the same number of bytes. A parameter with a gradient on any replica has a gradient on all replicas
    afterwards.

    A replica sends the buckets of the next round before it completes the current round, so that communication and
    additions overlap. Even if a replica does not receive, at most four messages are in flight to it, and a connection
    has room for four messages.
    """
    peers, first = position.dp_ranks, stage * MESSAGES_PER_STAGE
    gradients = yield from _all_gradients(endpoint, position, first + MESSAGES_PER_STAGE - 1, parameters)
    staged = [gradient.contiguous() for gradient in gradients]  # usually the same tensors
    buckets = _buckets(staged)
    rounds = [range(start, min(start + len(peers), len(buckets))) for start in range(0, len(buckets), len(peers))]
    flat: dict[int, Tensor] = {}  # buckets in flight; one tensor is sent much faster than many
    for next_round, this_round in zip([*rounds, ()], [(), *rounds], strict=True):
        for bucket, owner in zip(next_round, peers, strict=False):
            flat[bucket] = buckets[bucket][0] if len(buckets[bucket]) == 1 else torch.cat(buckets[bucket])
            if owner != endpoint.rank:
                label = Label(Control.GRADIENTS, first + bucket, gradient=True)
                yield from endpoint.sending(owner, label, BoundaryValue(flat[bucket], []))
        for bucket, owner in zip(this_round, peers, strict=False):
            if owner == endpoint.rank:
                flat[bucket] = yield from _sum_bucket(endpoint, peers, first + bucket, flat[bucket])
        for bucket, owner in zip(this_round, peers, strict=False):
            total = flat.pop(bucket)
            if owner != endpoint.rank:
                label = Label(Control.SUMMED_GRADIENTS, first + bucket, gradient=True)
                total = yield from endpoint.receiving_value(owner, label)
            if total is not buckets[bucket][0]:
                copy_each(buckets[bucket], total.split([piece.numel() for piece in buckets[bucket]]))
    for gradient, total in zip(gradients, staged, strict=True):
        if total is not gradient:
            gradient.copy_(total)


def _sum_bucket(endpoint: Endpoint, peers: Sequence[int], number: int, own: Tensor) -> Exchange[Tensor]:
    parts = dict.fromkeys(peers, own)
    others = [peer for peer in peers if peer != endpoint.rank]
    for peer in others:
        parts[peer] = yield from endpoint.receiving_value(peer, Label(Control.GRADIENTS, number, gradient=True))
    total, *rest = parts.values()
    for part in rest:
        total.add_(part)
    for peer in others:
        label = Label(Control.SUMMED_GRADIENTS, number, gradient=True)
        yield from endpoint.sending(peer, label, BoundaryValue(total, []))
    return total


def _all_gradients(
    endpoint: Endpoint, position: Position, number: int, parameters: Sequence[Tensor]
) -> Exchange[list[Tensor]]:
    """Returns the gradients of the parameters that have a gradient on any replica.

    If a gradient is missing on this replica, it is set to zeros.
    """
    own = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.bool, device="cpu")
    label = Label(Control.GRADIENTS, number, gradient=True)
    gathered = yield from endpoint.exchanging(label, dict.fromkeys(position.dp_ranks, own))
    present = [parameter for parameter, has in zip(parameters, torch.stack(gathered).any(0), strict=True) if has]
    for parameter in present:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.layout is not torch.strided:
            raise ValueError(
                f"The gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and cannot be summed over "
                f"replicas. Use sparse=False. [sparse-gradient]"
            )
    return [local_tensor(parameter.grad) for parameter in present if parameter.grad is not None]


def _buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Splits gradients into one-dimensional pieces, in order. Small pieces with the same dtype share a bucket."""
    buckets: list[list[Tensor]] = []
    room = 0
    for piece in (p for gradient in gradients for p in gradient.view(-1).split(BUCKET // gradient.element_size())):
        if not buckets or piece.nbytes > min(room, SMALL) or piece.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = BUCKET if piece.nbytes <= SMALL else piece.nbytes
        buckets[-1].append(piece)
        room -= piece.nbytes
    return buckets


def is_sharded_over_replicas(parameter: Tensor) -> bool:
    """Returns whether `fully_shard` has sharded a parameter over the replicas. Then `Shards` sums its gradient."""
    return is_distributed_over(parameter, DATA)


class Shards:
    """Performs the communication of layers under `fully_shard` in a run, through the connections of gpipe.

    Recordings therefore contain this communication, and sums have a fixed order. For each stage, the action UNSHARD
    gathers the weights, REDUCE sums the gradients of all micro-batches, and RESHARD frees the gathered weights.

    There are two exceptions:

    - torch gathers weights on first use if they are not sharded over exactly the replicas.
    - With a single replica, torch gathers all weights at the beginning of a run, and reduces gradients at the end.

    Args:
        endpoint: The connections of this process.
        position: The position of this process in the mesh.
        sharded: The modules under `fully_shard`, by stage.
        trains: Whether the run computes gradients.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        position: Position,
        sharded: Mapping[int, Sequence[nn.Module]],
        *,
        trains: bool = False,
    ) -> None:
        self._endpoint, self._position, self._sharded = endpoint, position, sharded
        self._peers = position.dp_ranks
        self._numbers = count()
        self._over_replicas = {
            stage: [module for module in modules if shards_over_replicas(module, position)]
            for stage, modules in sharded.items()
        }
        self._gathers: list[tuple[Tensor, Tensor]] = []  # pairs of an output buffer and the shard of this process
        self._restore_settings = list(map(settings_of, self.modules))
        self._by_torch, self._trains, self._carried = position.replicas == 1, trains, list[Tensor]()
        for module in self.modules:
            module.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
        for module in () if self._by_torch else self.modules:
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # losses are weighted already
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has no other
        for module in () if self._by_torch else chain.from_iterable(self._over_replicas.values()):
            module.set_custom_all_gather(_Collective(self._record_gather))  # type: ignore[operator]
            module.set_custom_reduce_scatter(_Collective(self._take_sum))  # type: ignore[operator]
        self._sync(self.modules, False)
        for module in self.modules if self._by_torch else ():
            module.unshard()  # type: ignore[operator]
            self._carried += carry_gradients(module) if trains else []

    @property
    def modules(self) -> list[nn.Module]:
        """All modules under `fully_shard`."""
        return [module for modules in self._sharded.values() for module in modules]

    @property
    def uses_torch(self) -> bool:
        """Whether torch gathers some modules, because they are not sharded over exactly the replicas."""
        return self._over_replicas != self._sharded

    def gather(self, stage: int) -> Exchange[None]:
        """Gathers the weights of a stage, one module after the other."""
        for module in self._over_replicas[stage]:
            gathering = module.unshard(async_op=True)  # type: ignore[operator]
            while self._gathers:
                output, own = self._gathers.pop()
                label = self._label(gradient=False)
                parts = yield from self._endpoint.exchanging(label, dict.fromkeys(self._peers, own))
                for chunk, part in zip(output.chunk(len(parts)), parts, strict=True):
                    if part is not own:  # this process's shard is in the output already
                        chunk.copy_(part)
            gathering.wait()

    def free(self, stage: int) -> None:
        """Frees the gathered weights of a stage."""
        for module in self._over_replicas[stage]:
            module.reshard()  # type: ignore[operator]

    def reduce(self, stage: int) -> Exchange[None]:
        """Sums the gradients of a stage. Each process sums its own shards.

        Raises:
            ValueError: If replicas have gradients for different weights, because torch would then add gradients of
                different weights.
        """
        if not self.modules:
            return
        modules = self._sharded.get(stage, ())
        exist = [[gradient is not None for gradient, _ in gradients_of(module)] for module in modules]
        gathered = yield from self._endpoint.exchanging(self._label(gradient=True), dict.fromkeys(self._peers, exist))
        if any(remote != exist for remote in gathered):
            raise ValueError(
                f"Stage {stage} has layers under fully_shard, but replicas used different weights in this step. Use "
                f"the same weights in all replicas, or do not apply fully_shard to these layers. "
                f"[sharded-weights-unused]"
            )
        for module in self._over_replicas.get(stage, ()):
            yield from self._sum_shards(
                [g.chunk(len(self._peers), axis) for g, axis in gradients_of(module) if g is not None]
            )
        self._settle(modules)

    def end(self, *, well: bool) -> None:
        """Ends the run, frees gathered weights, and restores the settings of the modules.

        Args:
            well: Whether the run succeeded. If False, the gradients of the run are discarded.
        """
        if well and self._by_torch and self._trains:
            for parameter in self._carried:
                parameter.grad = None
            self._settle(self.modules)
        for module in self.modules:
            if not well:
                break_off(module)
            module.reshard()  # type: ignore[operator]
        for restore in self._restore_settings:
            restore()

    def _label(self, *, gradient: bool) -> Label:
        return Label(Control.SHARDS, next(self._numbers), gradient)

    def _settle(self, modules: Iterable[nn.Module]) -> None:
        """Makes torch move the gradients of gathered weights to the shards of this process."""
        self._sync(modules, True)
        for module in modules:
            end_backwards(module)

    def _sync(self, modules: Iterable[nn.Module], now: bool) -> None:
        for module in modules:
            module.set_requires_gradient_sync(now, recurse=False)  # type: ignore[operator]
            module.set_reshard_after_backward(now, recurse=False)  # type: ignore[operator]

    def _sum_shards(self, gradients: Sequence[Sequence[Tensor]]) -> Exchange[None]:
        """Sums the shards of this process in place, in the order of the replicas.

        Args:
            gradients: A list of shards for each gradient, one shard per replica.
        """
        parts = {
            peer: [
                shards[index] for shards in gradients if index < len(shards)
            ]  # tensors with few rows: fewer shards
            for index, peer in enumerate(self._peers)
        }
        totals, *others = yield from self._endpoint.exchanging(self._label(gradient=True), parts)
        for own, total, *more in zip(parts[self._endpoint.rank], totals, *others, strict=True):
            for part in more:
                total.add_(part)
            if total is not own:
                own.copy_(total)

    def _record_gather(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        self._gathers.append((output_tensor, input_tensor))

    def _take_sum(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        output_tensor.copy_(input_tensor.chunk(len(self._peers))[self._position.replica])


def shards_over_replicas(module: nn.Module, position: Position) -> bool:
    """Whether the mesh of each sharded parameter of a module consists of the replicas and no other processes."""
    ranks = [position.members[rank] for rank in position.dp_ranks]
    sharded = filter(is_sharded_over_replicas, module.parameters())
    return all(p.device_mesh.mesh.flatten().tolist() == ranks for p in sharded)  # type: ignore[attr-defined]


@dataclass
class _Collective:
    """A custom collective with the interface that `fully_shard` requires."""

    call: Callable[..., None]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.call(*args, **kwargs)
