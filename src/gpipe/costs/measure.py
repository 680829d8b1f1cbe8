"""What each layer costs, found out on a sample: seconds, floating-point operations, or what the user's function says.

The layers run one after another in the calling thread, as they do in training. Nothing of it remains: gradients,
buffers and other attributes of the layers, the devices they are on, and torch's generators are as they were.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from gpipe.layers.skips import names, unpack
from gpipe.rng.visit import visit
from gpipe.values.boundary import cut, run_backward
from gpipe.values.layout import copy_of, moved
from gpipe.values.tree import Tree, replace_tensors, tensors_in

Made: TypeAlias = tuple[Tree, Mapping[str, Tensor | None]]
"""What a layer returns, and what it stashes."""

FEWEST, MOST, PATIENCE = 2, 7, 0.1
"""Timed runs of a layer, behind one that warms up, and seconds after which no more are begun; the median counts."""


@contextmanager
def as_in_training(device: torch.device, intra_op_threads: int) -> Iterator[None]:
    """Around measurements: grad mode, so many threads an operation, and torch's generators put back afterwards."""
    before = torch.get_num_threads()
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with generators, torch.inference_mode(False), torch.enable_grad():
        torch.set_num_threads(intra_op_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def measure_seconds(
    layers: Sequence[nn.Module], sample: Tree, device: torch.device, *, recomputes: bool
) -> list[float]:
    """Seconds of forward, recompute and backward of each layer on a sample micro-batch.

    Each layer is on `device` while it is measured.
    """

    def seconds(run: "LayerRun") -> float:
        run.layer.to(device)
        run.warm_up()
        rounds: list[float] = []
        end = time.perf_counter() + PATIENCE
        while len(rounds) < FEWEST or (len(rounds) < MOST and time.perf_counter() < end):
            rounds.append(run.seconds(device, recomputes=recomputes))
        return sorted(rounds)[(len(rounds) - 1) // 2]

    return _each(layers, replace_tensors(sample, lambda tensor: moved(tensor, device)), seconds)


def measure_by(layers: Sequence[nn.Module], sample: Tree, cost: Callable[[nn.Module, Tree], float]) -> list[float]:
    """The user's cost of each layer, given the layer and what it takes of a sample micro-batch."""
    return _each(layers, sample, lambda run: float(cost(run.layer, run.given()[0])))


def count_flops(layers: Sequence[nn.Module], sample: Tree) -> list[float]:
    """Floating-point operations of forward and backward of each layer, at least 1, counted on the meta device.

    What counts is matrix products, convolutions and attention, a multiplication and an addition as two.
    """

    def flops(run: "LayerRun") -> float:
        run.call = _on_meta(run.layer)
        formulas = {torch.ops.aten.convolution_backward: _flops_of_convolution_backward}
        with torch.device("meta"), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            run.warm_up()
        return float(max(1, counter.get_total_flops()))

    on_meta = replace_tensors(sample, lambda tensor: tensor.to("meta"))
    return _each(layers, on_meta, flops, " on the meta device; if it cannot run there, use costs='time'")


def _flops_of_convolution_backward(
    gradient: list[int], x: list[int], weight: list[int], *others: Any, out_shape: object
) -> int:
    """From shapes; torch's own formula takes the gradient of the weight as if there were one group."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, wanted = others
    return int(sum(wanted[:2])) * conv_flop_count(x, weight, gradient, transposed=transposed)


def _on_meta(layer: nn.Module) -> Callable[..., object]:
    """Runs a layer as if its parameters and buffers were on the meta device."""
    state = dict(layer.named_parameters()) | dict(layer.named_buffers())
    meta = {name: t.detach().to("meta").requires_grad_(t.requires_grad) for name, t in state.items()}
    return lambda value, **popped: functional_call(layer, meta, (value,), popped)


def _each(
    layers: Sequence[nn.Module], sample: Tree, measure: Callable[["LayerRun"], float], where: str = ""
) -> list[float]:
    """Measures each layer on what the layers before it make of the sample."""
    numbers: list[float] = []
    value: Tree = sample
    held: dict[str, Tensor | None] = {}
    for index, layer in enumerate(layers):
        run = LayerRun(index, layer, value, {name: held[name] for name in names(layer, "pop")})
        try:
            with untouched(layer):
                numbers.append(measure(run))
                value, stashed = run.make()
        except Exception as error:
            error.add_note(f"while layer {index} ({type(layer).__name__}) was run on the sample, for its cost{where}")
            raise
        held |= stashed
    return numbers


class LayerRun:
    """One layer, and what it takes: of the main line, and what it pops."""

    def __init__(self, index: int, layer: nn.Module, value: Tree, popped: Mapping[str, Tensor | None]) -> None:
        self.index = index
        self.layer = layer
        self.value = value
        self.popped = popped
        self.call: Callable[..., object] = layer
        self._made: Made | None = None

    def given(self) -> tuple[Tree, dict[str, Tensor | None]]:
        """What the layer takes, for it to keep: it may work in place."""
        return replace_tensors(self.value, _copy), {
            name: None if tensor is None else _copy(tensor) for name, tensor in self.popped.items()
        }

    def keyed(self) -> visit:
        """The randomness of the layer, the same in every run."""
        return visit(0, 0, self.index, 0)

    def forward(self, given: tuple[Tree, dict[str, Tensor | None]]) -> Made:
        """Runs the layer; gives what it returns, and what it stashes."""
        result = self.call(given[0], **given[1])
        stash = names(self.layer, "stash")
        return unpack(result, stash) if stash else (result, {})

    def warm_up(self) -> None:
        """Runs the layer for the first time."""
        with self.keyed():
            made = self.forward(self.given())
        self._made = cut(made[0])[0].value, {name: cut(tensor)[0].stashed for name, tensor in made[1].items()}
        _backward_of(made)()

    def make(self) -> Made:
        """What later layers take, cut from its graph."""
        if self._made is None:
            self.warm_up()
        assert self._made is not None
        return self._made

    def seconds(self, device: torch.device, *, recomputes: bool) -> float:
        """Seconds of a forward, a recompute if there will be one, and a backward."""
        given = self.given()
        start = _now(device)
        with self.keyed():
            made = self.forward(given)
        forward = _now(device) - start
        backward = _backward_of(made)
        start = _now(device)
        backward()
        return (2 * forward if recomputes else forward) + _now(device) - start


def _backward_of(made: Made) -> Callable[[], None]:
    roots = [t for t in (*tensors_in(made[0]), *made[1].values()) if t is not None and t.requires_grad]
    return partial(run_backward, roots, [torch.ones_like(root) for root in roots])


def _copy(tensor: Tensor) -> Tensor:
    """A tensor that wants a gradient if the other does, and is no leaf, so that it may be changed in place."""
    return copy_of(tensor.detach().requires_grad_(tensor.requires_grad))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def untouched(layer: nn.Module) -> Iterator[None]:
    """Puts back what running a layer may change: attributes of its modules, gradients, buffers, and its device."""
    attributes = [(module, dict(vars(module))) for module in layer.modules()]
    insides = [(inside, dict(inside)) for _, own in attributes for inside in own.values() if isinstance(inside, dict)]
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in layer.parameters()]
    buffers = [(buffer, copy_of(buffer)) for buffer in layer.buffers()]
    for parameter, _, _ in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for module, own in attributes:
            _refill(vars(module), own)
        for inside, items in insides:
            _refill(inside, items)
        for parameter, data, gradient in parameters:
            parameter.grad = None  # it may be on another device than the parameter will be
            if parameter.device != data.device:
                parameter.data = data
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _refill(dictionary: dict[str, Any], items: Mapping[str, object]) -> None:
    dictionary.clear()
    dictionary.update(items)
