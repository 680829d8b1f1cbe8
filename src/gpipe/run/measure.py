"""What each layer costs, found out on a sample: seconds, or floating-point operations.

A measurement leaves nothing behind: gradients, buffers and torch's generators are as they were.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from gpipe.run.boundary import cut, replace_tensors, run_backward, tensors_in
from gpipe.run.microbatch import Tree
from gpipe.run.skips import names, unpack
from gpipe.run.visit import visit

ROUNDS = 3  # timed runs of each layer, behind one that warms up; the median counts


def measure_seconds(
    layers: Sequence[nn.Module], sample: Tree, device: torch.device, *, recomputes: bool
) -> list[float]:
    """Seconds of forward, recompute and backward of each layer on a sample micro-batch, as in training.

    On CUDA each layer is moved to `device` for it.
    """

    def time_layer(run: "LayerRun") -> float:
        run.layer.to(device)
        rounds = [run.time(device, recomputes=recomputes) for _ in range(1 + ROUNDS)]
        return statistics.median(rounds[1:])

    sample = replace_tensors(sample, lambda tensor: tensor.to(device))
    return [time_layer(run) for run in runs_of(layers, sample)]


def measure_by(layers: Sequence[nn.Module], sample: Tree, cost: Callable[[nn.Module, Tree], float]) -> list[float]:
    """The user's cost of each layer, given the layer and what it takes of a sample micro-batch."""
    return [float(cost(run.layer, run.value)) for run in runs_of(layers, sample)]


def count_flops(layers: Sequence[nn.Module], sample: Tree) -> list[float]:
    """Floating-point operations of forward and backward of each layer, at least 1, counted on the meta device."""
    sample = replace_tensors(sample, lambda tensor: tensor.to("meta"))
    return [max(1.0, float(run.count_flops())) for run in runs_of(layers, sample, on_meta=True)]


def runs_of(layers: Sequence[nn.Module], sample: Tree, *, on_meta: bool = False) -> Iterator["LayerRun"]:
    """Each layer with what it takes; moves on when the caller is done with it."""
    value: Tree = sample
    held: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        run = LayerRun(index, layer, value, {name: held[name] for name in names(layer, "pop")}, on_meta)
        yield run
        with untouched(layer):
            value, stashed = run.forward()
        value = cut(value)[0].value
        held |= {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in stashed.items()}


class LayerRun:
    """One layer on one sample input."""

    def __init__(self, index: int, layer: nn.Module, value: Tree, popped: dict[str, Tensor], on_meta: bool) -> None:
        self.index = index
        self.layer = layer
        self.value = value
        self.popped = popped
        self.on_meta = on_meta

    def forward(self) -> tuple[Tree, dict[str, Tensor]]:
        """Runs the layer on copies of its inputs, its randomness keyed."""
        value = replace_tensors(self.value, torch.clone)
        popped = {name: tensor.clone() for name, tensor in self.popped.items()}
        with torch.enable_grad(), visit(0, 0, self.index, 0):
            if self.on_meta:
                state = dict(self.layer.named_parameters()) | dict(self.layer.named_buffers())
                meta = {name: t.detach().to("meta").requires_grad_(t.requires_grad) for name, t in state.items()}
                result = functional_call(self.layer, meta, (value,), popped)
            else:
                result = self.layer(value, **popped)
        stash = names(self.layer, "stash")
        if not stash:
            return result, {}
        out, tensors = unpack(result, stash)
        return out, dict(tensors)

    def backward(self, made: tuple[Tree, dict[str, Tensor]]) -> None:
        """Runs the backward from all outputs."""
        roots = [t for t in (*tensors_in(made[0]), *made[1].values()) if t.requires_grad]
        run_backward(roots, [torch.ones_like(root) for root in roots])

    def time(self, device: torch.device, *, recomputes: bool) -> float:
        """Seconds of a forward, a recompute if there will be one, and a backward."""
        with untouched(self.layer):
            start = _now(device)
            made = self.forward()
            forward = _now(device)
            self.backward(made)
            return _now(device) - start + (forward - start if recomputes else 0.0)

    def count_flops(self) -> int:
        """Floating-point operations of a forward and a backward."""
        with FlopCounterMode(display=False) as counter:
            self.backward(self.forward())
        return int(counter.get_total_flops())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def untouched(layer: nn.Module) -> Iterator[None]:
    """Puts gradients and buffers of a layer back as they were."""
    gradients = [(parameter, parameter.grad) for parameter in layer.parameters()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in layer.modules()
        for name, buffer in module._buffers.items()
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                if buffer is not None and before is not None:
                    buffer.copy_(before)
                module._buffers[name] = buffer
