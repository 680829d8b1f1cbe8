"""Counts what each layer costs without running it for real: floating-point operations, or parameters."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from gpipe._torch.modes import (
    ATTENTION_ON_CPU,
    ATTENTION_ON_CPU_BACKWARD,
    BILINEAR,
    LSTM_ON_CPU,
    LSTM_ON_CPU_BACKWARD,
    flop_counter,
)
from gpipe.planner.measure import LayerRun, measure_each
from gpipe.stages.tree import Tree, replace_tensors


def count_parameters(layers: Sequence[nn.Module]) -> list[float]:
    """The parameters of each layer, at least 1.

    >>> count_parameters([nn.Linear(3, 2), nn.Tanh()])
    [8, 1]
    """
    return [max(1, sum(p.numel() for p in layer.parameters() if not is_lazy(p))) for layer in layers]


def count_flops(layers: Sequence[nn.Module], sample: Tree) -> list[float]:
    """Floating-point operations of forward and backward of each layer, at least 1, counted on the meta device.

    What counts is matrix products, convolutions, attention and LSTMs, a multiplication and an addition as two.
    """

    def flops(run: LayerRun) -> float:
        run.call = _on_meta(run.layer)
        with torch.device("meta"), counting() as counter:
            run.warm_up()
        return float(max(1, counter.get_total_flops()))

    on_meta = replace_tensors(sample, lambda tensor: tensor.to("meta"))
    return measure_each(layers, on_meta, flops, " on the meta device; if it cannot run there, use costs='time'")


def counting() -> FlopCounterMode:
    """Counts the floating-point operations of matrix products, convolutions, attention and LSTMs inside it."""
    formulas: dict[object, Callable[..., int]] = {
        torch.ops.aten.convolution_backward: _flops_of_convolution_backward,
        ATTENTION_ON_CPU: _flops_of_attention,
        ATTENTION_ON_CPU_BACKWARD: _flops_of_attention_backward,
        LSTM_ON_CPU: _flops_of_lstm,
        LSTM_ON_CPU_BACKWARD: _flops_of_lstm_backward,
        torch.ops.aten.mv: _flops_of_matrix_by_vector,
        torch.ops.aten.addmv: _flops_of_sum_with_matrix_by_vector,
        BILINEAR: _flops_of_bilinear,
    }
    return flop_counter(formulas)


def _flops_of_attention(query: list[int], key: list[int], value: list[int], *others: Any, **more: Any) -> int:
    """Of scores, and of the values that they weigh."""
    rows, heads, length, width = query
    return 2 * rows * heads * length * key[-2] * (width + value[-1])


def _flops_of_attention_backward(
    gradient: list[int], query: list[int], key: list[int], value: list[int], *others: Any, **more: Any
) -> int:
    """Of the scores once more, of their gradient, and of those of the queries, keys and values."""
    rows, heads, length, width = query
    return 2 * rows * heads * length * key[-2] * (3 * width + 2 * value[-1])


def _flops_of_lstm(x: list[int], weight: list[int], recurrent: list[int], *others: Any, **more: Any) -> int:
    """Of each weight for each row of each time step."""
    return 2 * prod(x[:-1]) * (prod(weight) + prod(recurrent))


def _flops_of_lstm_backward(*shapes: Any, **more: Any) -> int:
    """As often for the gradients of what the weights multiply, and again for those of the weights."""
    return 2 * _flops_of_lstm(*shapes)


def _flops_of_matrix_by_vector(matrix: list[int], *others: Any, **more: Any) -> int:
    return 2 * prod(matrix)


def _flops_of_sum_with_matrix_by_vector(summand: list[int], matrix: list[int], *others: Any, **more: Any) -> int:
    return 2 * prod(matrix)


def _flops_of_bilinear(*shapes_and_new: Any, **more: Any) -> int:
    """Of all three factors, as they are broadcast: shapes, and where each has a dimension of one put in."""
    shapes = [list(shape) for shape in shapes_and_new[:3]]
    for shape, new in zip(shapes, shapes_and_new[3:6], strict=True):
        for at in sorted(new):
            shape.insert(at, 1)
    sizes: list[int] = [max(each) for each in zip(*shapes, strict=True)]
    return 2 * prod(sizes)


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
