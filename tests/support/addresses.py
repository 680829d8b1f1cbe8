"""Layers for tests that show on any machine whether a tensor lies where it lay in the plain loop.

Kernels may choose their arithmetic by addresses modulo 64; `ByAddress` always does. The others have what comes behind
them, or what comes back to those before them, begin in the middle of some memory.
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tests.support.plain_loop import copied

Layers = TypeVar("Layers", bound=Sequence[nn.Module])


def factor_of(tensor: Tensor) -> float:
    """What `ByAddress` scales a tensor by: 1 for float32 at a multiple of 64, and for all that has no address."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and not torch.compiler.is_compiling()
    return 1 + tensor.data_ptr() % 64 / 4096 if plain and tensor.dtype is torch.float32 else 1.0


class _ByAddress(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * factor_of(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * factor_of(gradient)


def by_address(tensor: Tensor) -> Tensor:
    """The tensor, and backward its gradient, scaled by where they lie."""
    if tensor.dtype is not torch.float32 or torch.compiler.is_compiling():
        return tensor
    return _ByAddress.apply(tensor)


class ByAddress(nn.Module):
    """Scales what it is given, and the gradient that comes back to it, by where they lie."""

    def forward(self, x: Tensor) -> Tensor:
        return by_address(x)


class ByAddressInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(factor_of(x))


class Third(nn.Module):
    """Gives a view that begins in the middle of its memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(3, len(x), -1)[1]


class Behind(nn.Module):
    """Gives a view that begins in the middle, and gives back a gradient that does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.row, x])[1:]


class AddressedBuffer(nn.Module):
    """Has a buffer in the middle of some memory, which its forward changes and looks at."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width + 3)[3:])

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean * factor_of(self.mean)


def misplaced(module: nn.Module, elements: int = 3) -> nn.Module:
    """The module with its parameters so many elements into their memory."""
    for parameter in module.parameters():
        parameter.data = in_the_middle(parameter.data, elements)
    return module


def in_the_middle(tensor: Tensor, elements: int) -> Tensor:
    """A copy that begins so many elements into its memory, as a slice of a data set does."""
    return torch.empty(elements + tensor.numel(), dtype=tensor.dtype)[elements:].view(tensor.shape).copy_(tensor)


def twins(layers: Layers) -> Layers:
    """Copies of layers whose parameters lie as theirs do: `copy.deepcopy` copies a parameter to fresh memory."""
    made = copy.deepcopy(layers)
    pairs = zip(nn.ModuleList(layers).parameters(), nn.ModuleList(made).parameters(), strict=True)
    for parameter, twin in pairs:
        if isinstance(parameter, nn.Parameter):
            twin.data = copied(parameter.detach())
    return made
