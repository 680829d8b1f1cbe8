"""Synchronizes BatchNorm over replicas: normalizes a micro-batch together with this micro-batch of all replicas.

`torch.nn.SyncBatchNorm` supports only GPUs, and uses collectives, which would hang if a rank fails. In this module,
replicas exchange count, mean and variance as messages of a run, and autograd computes the gradients. Running
statistics are updated with the statistics of all replicas, so running statistics are equal on all replicas.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe._torch.modes import is_compiled
from gpipe._torch.modules import AnyBatchNorm, check_dimensions
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.mesh import Position
from gpipe.features.batch_norm import Statistics, update_running_statistics
from gpipe.schedule.action import Action, Kind
from gpipe.stages.messages import Control, Label
from gpipe.stages.stage import Layer


class SyncBatchNormRun:
    """The synchronized BatchNorm modules of one process in one run.

    Attributes:
        peers: The processes with the same stages, including this process.
        micro_batches: The number of micro-batches.
        kept: Statistics received in a forward pass, for its recomputation.
        recorded: Statistics received for the recorded micro-batches, for their replay.
        recorded_micro_batches: The number of micro-batches to record.
        replayed: The action that is currently replayed with recorded statistics, or None outside a replay.
    """

    def __init__(self, position: Position, micro_batches: int) -> None:
        self.peers = position.dp_ranks
        self.micro_batches = micro_batches
        self.kept: dict[Label, Tensor] = {}
        self.recorded: dict[Label, Tensor] = {}
        self.recorded_micro_batches = 0
        self.replayed: Action | None = None

    @contextmanager
    def installed(
        self, endpoint: Endpoint, norms: Sequence[AnyBatchNorm], current_action: Callable[[], Action]
    ) -> Iterator[None]:
        """Replaces the `forward` of BatchNorm modules in the context."""
        self.endpoint = endpoint  # a backward pass may use other connections than its forward pass
        self._uses: Counter[tuple[int, Action]] = Counter()
        for number, norm in enumerate(norms):
            norm.__dict__["forward"] = partial(self._forward, number, norm, current_action)
        try:
            yield
        finally:
            for norm in norms:
                del norm.__dict__["forward"]

    def exchange(self, label: Label, own: Mapping[int, Tensor], join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Sends a tensor to each replica, and joins the received tensors. A replay returns the recorded result."""
        if self.replayed is not None:
            return self.recorded[label]
        joined = join(self.endpoint.all_to_all(label, own))
        if label.micro_batch % self.micro_batches < self.recorded_micro_batches:
            self.recorded[label] = joined
        return joined

    def replay(self, action: Action) -> None:
        """Begins the replay of an action. The count of uses of each module starts from 0 again."""
        self.replayed = action
        self._uses.clear()

    def _forward(
        self, number: int, norm: AnyBatchNorm, current_action: Callable[[], Action], input: Tensor
    ) -> Tensor:
        if not norm.training:
            return AnyBatchNorm.forward(norm, input)
        check_dimensions(norm, input)
        action = self.replayed or current_action()
        use = self._uses[number, action]
        self._uses[number, action] += 1
        assert action.micro_batch is not None
        label = Label(Control.BATCHNORM - number, use * self.micro_batches + action.micro_batch, gradient=False)
        wide = input.float() if input.dtype.itemsize < 4 else input
        variance, mean = torch.var_mean(wide, [axis for axis in range(input.dim()) if axis != 1], correction=0)
        own = torch.stack([torch.full_like(mean, input.numel() / input.shape[1]), mean, variance]).double()
        recomputes = action.kind is Kind.RECOMPUTE
        gathered = _Exchange.apply(self, label, own, recomputes)  # type: ignore[no-untyped-call]  # untyped in torch
        batch = _merge(gathered, input.size())
        if not recomputes and norm.running_mean is not None:
            update_running_statistics(norm, Statistics(batch.count, batch.mean.detach(), batch.squares.detach()))
        return _normalize(norm, wide, batch).to(input.dtype)


def find_norms(layers: Sequence[Layer]) -> list[AnyBatchNorm]:
    """Returns the BatchNorm modules of layers in order, without duplicates.

    Raises:
        ValueError: If the `forward` of a BatchNorm module cannot be replaced.
    """
    modules = {module: None for layer in layers for module in layer.module.modules()}
    norms = [module for module in modules if isinstance(module, AnyBatchNorm)]
    compiled = {part for whole in modules if is_compiled(whole) for part in whole.modules()}
    for norm in norms:
        if norm in compiled or type(norm).forward not in (AnyBatchNorm.forward, nn.SyncBatchNorm.forward):
            why = "it is inside a compiled module" if norm in compiled else "its class defines a custom forward"
            raise ValueError(
                f"batch_norm='synchronized' cannot replace the forward of a {type(norm).__name__}, because {why}. "
                f"Use batch_norm='deferred' or 'micro'. [batch-norm-not-replaceable]"
            )
    return norms


def _merge(gathered: Tensor, input_size: torch.Size) -> Statistics:
    """Returns the statistics of all replicas. `gathered` is [replicas, (count, mean, variance), channels]."""
    counts, means, variances = gathered.unbind(1)
    count = counts.sum(0)
    if count[0] <= 1:  # torch's own message
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input_size}")
    mean = (counts * means).sum(0) / count
    squares = (counts * (variances + (means - mean) ** 2)).sum(0)
    return Statistics(int(count[0]), mean, squares)


def _normalize(norm: AnyBatchNorm, input: Tensor, batch: Statistics) -> Tensor:
    shape = [1, -1] + [1] * (input.dim() - 2)
    scale = (batch.squares / batch.count + norm.eps).rsqrt().to(input.dtype)
    scale = scale if norm.weight is None else scale * norm.weight
    output = (input - batch.mean.to(input.dtype).view(shape)) * scale.view(shape)
    return output if norm.bias is None else output + norm.bias.view(shape)


class _Exchange(torch.autograd.Function):
    """Gathers the statistics of all replicas. The backward sums the gradients of the statistics of this replica."""

    @staticmethod
    def forward(ctx: Any, run: SyncBatchNormRun, label: Label, own: Tensor, recomputes: bool) -> Tensor:
        ctx.run, ctx.gradient_label = run, label._replace(gradient=True)
        if recomputes:
            return run.kept.pop(label)
        gathered = run.exchange(label, dict.fromkeys(run.peers, own), torch.stack)
        if run.replayed is None:
            run.kept[label] = gathered
        return gathered

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, None, Tensor, None]:
        by_peer = dict(zip(ctx.run.peers, gradients.contiguous(), strict=True))
        return None, None, ctx.run.exchange(ctx.gradient_label, by_peer, _sum), None


def _sum(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], start=parts[0])
