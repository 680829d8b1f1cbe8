"""BatchNorm over replicas: a micro-batch is normalized together with the same micro-batch of the other replicas.

`torch.nn.SyncBatchNorm` does that on GPUs only, and by collectives, in which the others would hang when a rank fails.
Here count, mean and variance of each replica travel as the messages of a run do; the rest is left to autograd.
Running statistics are those of the micro-batch of all replicas, so all replicas have the same.
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

LOCKSTEP = "batch_norm='synchronized' normalizes each micro-batch together with that of the other replicas"


class Synced:
    """The BatchNorms of one stage in one run."""

    def __init__(self, position: Position, micro_batches: int) -> None:
        self.peers = position.ranks_of_row
        self.micro_batches = micro_batches
        self.kept: dict[Label, Tensor] = {}  # what the replicas sent in a forward, for its recompute
        self.recorded: dict[Label, Tensor] = {}  # what they sent in the recorded micro-batches, for a replay
        self.recorded_micro_batches = 0
        self.replayed: Action | None = None  # in a replay, in which exchanges are played back, what is replayed

    @contextmanager
    def in_place(
        self, endpoint: Endpoint, norms: Sequence[AnyBatchNorm], now: Callable[[], Action]
    ) -> Iterator[None]:
        """Has these normalize over replicas; `now` is the action that is being done."""
        self.endpoint = endpoint  # the connections of a backward may be others
        self._uses: Counter[tuple[int, Action]] = Counter()
        for number, norm in enumerate(norms):
            norm.__dict__["forward"] = partial(self._forward, number, norm, now)
        try:
            yield
        finally:
            for norm in norms:
                del norm.__dict__["forward"]

    def exchange(self, label: Label, own: Mapping[int, Tensor], join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Sends a tensor to each replica and joins those that they send; a replay gets what was recorded."""
        if self.replayed is not None:
            return self.recorded[label]
        joined = join(self.endpoint.swap(label, own))
        if label.micro_batch % self.micro_batches < self.recorded_micro_batches:
            self.recorded[label] = joined
        return joined

    def replay(self, action: Action) -> None:
        """Begins to replay an action: each use of a module counts from the first again."""
        self.replayed = action
        self._uses.clear()

    def _forward(self, number: int, norm: AnyBatchNorm, now: Callable[[], Action], input: Tensor) -> Tensor:
        if not norm.training:
            return AnyBatchNorm.forward(norm, input)
        check_dimensions(norm, input)
        action = self.replayed or now()
        use = self._uses[number, action]
        self._uses[number, action] += 1
        assert action.micro_batch is not None
        label = Label(Control.BATCHNORM - number, use * self.micro_batches + action.micro_batch, gradient=False)
        wide = input.float() if input.dtype.itemsize < 4 else input
        variance, mean = torch.var_mean(wide, [at for at in range(input.dim()) if at != 1], correction=0)
        own = torch.stack([torch.full_like(mean, input.numel() / input.shape[1]), mean, variance]).double()
        again = action.kind is Kind.RECOMPUTE
        gathered = _Exchange.apply(self, label, own, again)  # type: ignore[no-untyped-call]  # untyped in torch
        batch = _merge(gathered, input)
        if not again and norm.running_mean is not None:
            update_running_statistics(norm, Statistics(batch.count, batch.mean.detach(), batch.squares.detach()))
        return _normalize(norm, wide, batch).to(input.dtype)


def find_norms(layers: Sequence[Layer]) -> list[AnyBatchNorm]:
    """The BatchNorms that some layers run, each once, in order; refused where one cannot be reached."""
    modules = {module: None for layer in layers for module in layer.module.modules()}
    norms = [module for module in modules if isinstance(module, AnyBatchNorm)]
    inside = {part for whole in modules if is_compiled(whole) for part in whole.modules()}
    for norm in norms:
        if norm in inside or type(norm).forward not in (AnyBatchNorm.forward, nn.SyncBatchNorm.forward):
            why = "is inside of a compiled module" if norm in inside else "has a forward of its own"
            raise ValueError(
                f"batch_norm='synchronized' cannot replace the forward of a {type(norm).__name__}: it {why}"
            )
    return norms


def _merge(gathered: Tensor, given: Tensor) -> Statistics:
    """The statistics of all replicas together; `gathered` is [replicas, (count, mean, variance), channels]."""
    counts, means, variances = gathered.unbind(1)
    count = counts.sum(0)
    if count[0] <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {given.size()}")
    mean = (counts * means).sum(0) / count
    squares = (counts * (variances + (means - mean) ** 2)).sum(0)
    return Statistics(int(count[0]), mean, squares)


def _normalize(norm: AnyBatchNorm, given: Tensor, batch: Statistics) -> Tensor:
    shape = [1, -1] + [1] * (given.dim() - 2)
    scale = (batch.squares / batch.count + norm.eps).rsqrt().to(given.dtype)
    scale = scale if norm.weight is None else scale * norm.weight
    made = (given - batch.mean.to(given.dtype).view(shape)) * scale.view(shape)
    return made if norm.bias is None else made + norm.bias.view(shape)


class _Exchange(torch.autograd.Function):
    """Own statistics to those of each replica; back, what all replicas have for the own ones, added up."""

    @staticmethod
    def forward(ctx: Any, synced: Synced, label: Label, own: Tensor, again: bool) -> Tensor:
        ctx.synced, ctx.back = synced, label._replace(gradient=True)
        if again:
            return synced.kept.pop(label)
        gathered = synced.exchange(label, dict.fromkeys(synced.peers, own), torch.stack)
        if synced.replayed is None:
            synced.kept[label] = gathered
        return gathered

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, None, Tensor, None]:
        each = dict(zip(ctx.synced.peers, gradients.contiguous(), strict=True))
        return None, None, ctx.synced.exchange(ctx.back, each, _sum), None


def _sum(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], start=parts[0])
