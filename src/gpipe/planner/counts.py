"""What is counted: parameters, and the floating-point operations of what torch does."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
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


def count_parameters(layers: Sequence[nn.Module]) -> list[float]:
    """The parameters of each layer, at least 1.

    >>> count_parameters([nn.Linear(3, 2), nn.Tanh()])
    [8, 1]
    """
    return [max(1, sum(p.numel() for p in layer.parameters() if not is_lazy(p))) for layer in layers]


def counting() -> FlopCounterMode:
    """Counts the floating-point operations of matrix products, convolutions, attention and LSTMs inside it."""
    formulas: dict[object, Callable[..., int]] = {
        torch.ops.aten.convolution_backward: _flops_of_convolution_backward,
        ATTENTION_ON_CPU: _flops_of_attention,
        ATTENTION_ON_CPU_BACKWARD: _flops_of_attention_backward,
        LSTM_ON_CPU: _flops_of_lstm,
        LSTM_ON_CPU_BACKWARD: lambda *shapes, **more: 2 * _flops_of_lstm(*shapes),  # of inputs, and of weights
        torch.ops.aten.mv: lambda matrix, *others, **more: 2 * prod(matrix),
        torch.ops.aten.addmv: lambda summand, matrix, *others, **more: 2 * prod(matrix),
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
