"""Measures the peak memory of each rank.

The memory of weights, gradients and optimizers is computed from their sizes. Activations are tracked when they are
allocated and freed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe._torch.trees import tree_leaves
from gpipe.features.offload import Offload
from gpipe.features.split_backward import SplitBackward
from gpipe.planner.watch import Watch
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.run import Rank, Run
from gpipe.schedule.action import STREAMS, Kind
from gpipe.schedule.rules import BACKWARD_PARTS
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.dtensor import is_sharded, local_tensor
from gpipe.stages.host_weights import is_on_host
from gpipe.stages.memory_layout import storage_address
from gpipe.stages.quantized import is_quantized, pieces_of, stored_in
from gpipe.stages.tree import tensors_in


@dataclass(frozen=True)
class Held:
    """The peak memory of a rank in bytes, by purpose.

    Tensors that the caller of the pipe created, such as inputs, do not count.

    Attributes:
        weights: Parameters and buffers.
        gradients: Gradients of parameters.
        optimizer: States of optimizers whose `step` was called during the recording.
        boundary: Tensors from other ranks: boundary tensors, their gradients, and gathered weights. If two ranks
            keep the same tensor, it counts on both, as if each rank had its own device. With `weights="host"`, also
            loaded weights. None if activations were not recorded.
        inside: All other tensors that operations create: activations kept for the backward pass, tensors sent to
            other ranks, temporary tensors, and gradients of loaded weights. None if activations were not recorded.

    >>> Held(weights=100, gradients=100, optimizer=200, boundary=20, inside=30).total
    450
    """

    weights: int
    gradients: int
    optimizer: int
    boundary: int | None = None
    inside: int | None = None

    @property
    def activations(self) -> int | None:
        """The memory of activations, or None if activations were not recorded."""
        return None if self.boundary is None or self.inside is None else self.boundary + self.inside

    @property
    def state(self) -> int:
        """The memory of weights, gradients and optimizer, which does not depend on the mini-batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The sum of all purposes, without activations if they were not recorded."""
        return self.state + (self.activations or 0)


class Watches:
    """Tracks the activation memory of each rank as if each rank had its own device.

    In one process, the sender and the receiver of a tensor share one storage. On two devices, each would have a copy.
    The tensor therefore counts on the receiver until the receiver's backward pass is done, and on the sender while
    the sender's autograd graph keeps the tensor.
    """

    def __init__(self) -> None:
        self.by_rank = defaultdict[int, Watch](lambda: Watch(_address))
        self._arrived: dict[tuple[int, int, int | None], list[Tensor]] = {}

    def after_receive(self, rank: Rank, step: CompiledAction) -> None:
        """Counts received tensors on this rank. The sender counts a tensor only while its graph keeps it."""
        values = [message.value if isinstance(message, BoundaryValue) else message for message in rank.inbox]
        tensors = tensors_in(values)
        others = [watch for other, watch in list(self.by_rank.items()) if other != step.rank]
        for tensor in tensors:
            for watch in others:
                watch.give_up(tensor, only_loose=True)
            self.by_rank[step.rank].add(tensor)
        if step.action.kind is Kind.FORWARD:
            self._arrived[step.rank, step.stage, step.micro_batch] = tensors

    def before_action(self, rank: Rank, step: CompiledAction) -> None:
        """Stops counting gathered weights that the action will free."""
        for weight in _under_fully_shard(rank, step) if step.action.kind is Kind.RESHARD else ():
            self.by_rank[step.rank].give_up(weight)

    def after_action(self, run: Run, rank: Rank, step: CompiledAction) -> None:
        """Updates which tensors count on a rank. For example, activations that will be recomputed stop counting."""
        watch, kind = self.by_rank[step.rank], step.action.kind
        keeps = kind is Kind.FORWARD and step.micro_batch not in run.routes[step.stage].micro_batches[Kind.RECOMPUTE]
        watch.mark(loose=not keeps)
        if kind is Kind.UNSHARD:
            for weight in _under_fully_shard(rank, step):
                watch.add(weight)
        for tensor in _copied_from_host(run, rank, step) if kind in STREAMS else ():
            if kind is Kind.LOAD:
                watch.add(tensor)
            else:
                watch.give_up(tensor)
        if kind is Kind.FETCH and (offload := run.feature(Offload)) is not None:
            moved = offload.activations[step.stage, step.micro_batch].moved
            watch.see((), [storage.saved[0].tensor for storage in moved])
        if kind in BACKWARD_PARTS:
            key = rank.rank, step.stage, step.micro_batch
            split = run.feature(SplitBackward)
            pending = split.pending[step.stage].get(step.micro_batch) if split is not None else None
            used = {_address(weight.product.x) for weight in pending.products} if pending else ()
            arrived = self._arrived.pop(key, [])
            for tensor in arrived:
                if _address(tensor) in used:
                    self._arrived.setdefault(key, []).append(tensor)
                else:
                    watch.give_up(tensor)

    def end(self, layers: Mapping[int, Sequence[nn.Module]]) -> None:
        self._arrived.clear()
        for rank, watch in self.by_rank.items():
            parameters = (p for module in layers[rank] for p in module.parameters())
            watch.end([p.grad for p in parameters if p.grad is not None])

    def peaks(self) -> dict[int, tuple[int, int]]:
        """Returns the peak activation memory of each rank: the bytes from other ranks, and all other bytes."""
        return {rank: (watch.crossed, watch.peak - watch.crossed) for rank, watch in self.by_rank.items()}


def _under_fully_shard(rank: Rank, step: CompiledAction) -> Iterable[Tensor]:
    sharded = filter(is_sharded, rank.stages[step.stage].stage.modules)
    return dict.fromkeys(p for module in sharded for p in module.parameters())


def _copied_from_host(run: Run, rank: Rank, step: CompiledAction) -> Iterator[Tensor]:
    """Yields the tensors on the host that a LOAD copies. They have the same size as the copies."""
    stage = rank.stages[step.stage].stage
    uses = run.compiled.program.uses_of[step.action._replace(kind=Kind.LOAD)]
    for weight in run.aliases.weights_of(stage):
        if is_on_host(weight, stage.device):
            yield weight
            if weight.grad is not None and any(use.kind in BACKWARD_PARTS for use in uses):
                yield weight.grad


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage. For a quantized weight, returns the address of its first tensor."""
    return storage_address(pieces_of(tensor)[0] if is_quantized(tensor) else tensor)


def measure_held(
    modules: Iterable[nn.Module],
    states: Iterable[Mapping[Tensor, Any]],
    peak: tuple[int, int] | None,
    streaming: torch.device | None = None,
) -> Held:
    """Returns the peak memory of a rank.

    Args:
        modules: The layers of the rank.
        states: The states of optimizers, by parameter.
        peak: The peak activation memory of the rank from `Watches.peaks`, or None if unknown. This includes loaded
            weights and their gradients.
        streaming: The device of the rank, if its weights are on the host and do not count. Default: None.
    """
    modules = list(modules)

    def counts(tensor: Tensor) -> bool:
        return streaming is None or not is_on_host(tensor, streaming)

    parameters = dict.fromkeys(filter(counts, (p for module in modules for p in module.parameters())))
    # The peak of activations includes the unsharded gradients of sharded parameters.
    unsharded = [p for p in parameters if peak is None or not hasattr(p, "to_local")]
    gradients = [p.grad for p in unsharded if p.grad is not None]
    optimizer = [state.get(p) for state in states for p in parameters]
    return Held(
        _bytes(filter(counts, stored_in(modules))),
        _bytes(gradients) or _bytes([p for p in unsharded if p.requires_grad]),
        _bytes(leaf for leaf in tree_leaves(optimizer) if isinstance(leaf, Tensor)),
        *(peak or (None, None)),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({storage_address(t): t.untyped_storage().nbytes() for t in map(local_tensor, tensors)}.values())
