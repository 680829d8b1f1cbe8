"""The cells of AmoebaNet-B and AmoebaNet-D: what evolution found, as data, and the class that builds them.

The search and its cells: Real et al., "Regularized Evolution for Image Classifier Architecture Search" (AAAI
2019). Where the figures printed there and the TPU reference model differ, the reference is followed: its
parameter counts are those of the GPipe paper. It pads a strided window at one side only; here padding is
symmetric, which gives the same shapes, seen one pixel apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.drop_path import DropPath

State = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Genotype:
    """A cell as evolution found it: which operation reads which state, in pairs that are added.

    State 0 is the projected output of the previous cell, state 1 the adapted output of the one before it;
    each pair adds one state. The output is the concatenation of the states in `outputs`.
    """

    pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    outputs: tuple[int, ...]


D_NORMAL = Genotype(
    pairs=(
        (("conv1x1", 1), ("max3x3", 1)),
        (("none", 1), ("conv1x7_7x1", 0)),
        (("conv1x1", 0), ("conv1x7_7x1", 0)),
        (("max3x3", 2), ("none", 2)),
        (("avg3x3", 1), ("conv1x1", 5)),
    ),
    outputs=(0, 3, 4, 6),
)
D_REDUCTION = Genotype(
    pairs=(
        (("max2x2", 0), ("max3x3", 0)),
        (("none", 2), ("conv3x3", 1)),
        (("conv1x7_7x1", 2), ("max3x3", 2)),
        (("none", 3), ("max2x2", 1)),
        (("avg3x3", 2), ("conv1x1", 3)),
    ),
    outputs=(4, 5, 6),
)
B_NORMAL = Genotype(
    pairs=(
        (("conv1x1", 1), ("max3x3", 1)),
        (("none", 1), ("separable3x3", 0)),
        (("conv1x1", 1), ("separable3x3", 0)),
        (("conv1x1", 2), ("none", 2)),
        (("avg3x3", 1), ("conv1x1", 5)),
    ),
    outputs=(0, 3, 4, 6),
)
B_REDUCTION = Genotype(
    pairs=(
        (("max2x2", 0), ("max3x3", 0)),
        (("none", 2), ("conv3x3", 1)),
        (("separable5x5", 2), ("max3x3", 2)),
        (("none", 3), ("separable3x3", 1)),
        (("avg3x3", 4), ("conv1x1", 3)),
    ),
    outputs=(5, 6),
)


Size = tuple[int, int]


def conv(
    inputs: int,
    outputs: int,
    kernel: Size = (1, 1),
    stride: Size = (1, 1),
    *,
    groups: int = 1,
    pad: bool = True,
) -> nn.Conv2d:
    """Makes a bias-free convolution; padded, it keeps the size, and rounds it up when strided.

    Weights are drawn with variance 2 / fan-out. torch's own fan-out forgets `groups`, hence by hand.
    """
    height, width = kernel
    padding = (height // 2, width // 2) if pad else (0, 0)
    made = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    nn.init.normal_(made.weight, std=(2 * groups / (outputs * height * width)) ** 0.5)
    return made


def norm(channels: int) -> nn.BatchNorm2d:
    """Makes a BatchNorm with torch's momentum of 0.1 and epsilon of 1e-5.

    They are what the reference runs with (decay 0.9). The alternative it also states, decay 0.9997 and
    epsilon 1e-3, leaves the running statistics useless for the first ten thousand steps.
    """
    return nn.BatchNorm2d(channels, eps=1e-5, momentum=0.1)


def relu_conv_norm(inputs: int, outputs: int, kernel: Size = (1, 1), stride: Size = (1, 1)) -> nn.Sequential:
    """Makes ReLU, convolution, BatchNorm. The ReLU is not in place: other operations read the same input."""
    return nn.Sequential(nn.ReLU(), conv(inputs, outputs, kernel, stride), norm(outputs))


Operation = Callable[[int, int, int], nn.Module]  # (input channels, filters, stride) -> module


def _conv1x1(inputs: int, filters: int, stride: int) -> nn.Module:
    return relu_conv_norm(inputs, filters, stride=(stride, stride))


def _conv3x3(inputs: int, filters: int, stride: int) -> nn.Module:
    narrow = filters // 4
    return nn.Sequential(
        relu_conv_norm(inputs, narrow),
        relu_conv_norm(narrow, narrow, (3, 3), (stride, stride)),
        relu_conv_norm(narrow, filters),
    )


def _conv1x7_7x1(inputs: int, filters: int, stride: int) -> nn.Module:
    narrow = filters // 4
    return nn.Sequential(
        relu_conv_norm(inputs, narrow),
        relu_conv_norm(narrow, narrow, (1, 7), (1, stride)),
        relu_conv_norm(narrow, narrow, (7, 1), (stride, 1)),
        relu_conv_norm(narrow, filters),
    )


def _separable(size: int) -> Operation:
    """Makes an operation of two depthwise-separable convolutions in turn, the first one strided."""

    def build(inputs: int, filters: int, stride: int) -> nn.Module:
        stages: list[nn.Module] = []
        for channels, step in ((inputs, stride), (filters, 1)):
            depthwise = conv(channels, channels, (size, size), (step, step), groups=channels)
            stages += [nn.ReLU(), depthwise, conv(channels, filters), norm(filters)]
        return nn.Sequential(*stages)

    return build


def _pool(pool: Callable[[int], nn.Module]) -> Operation:
    """Makes an operation of a pooling, followed by a 1x1 convolution where the channels differ."""

    def build(inputs: int, filters: int, stride: int) -> nn.Module:
        if inputs == filters:
            return pool(stride)
        return nn.Sequential(pool(stride), conv(inputs, filters), norm(filters))

    return build


OPERATIONS: dict[str, Operation] = {
    "none": lambda inputs, filters, stride: nn.Identity(),
    "avg3x3": _pool(lambda stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)),
    "max2x2": _pool(lambda stride: nn.MaxPool2d(2, stride, ceil_mode=True)),
    "max3x3": _pool(lambda stride: nn.MaxPool2d(3, stride, padding=1)),
    "conv1x1": _conv1x1,
    "conv3x3": _conv3x3,
    "conv1x7_7x1": _conv1x7_7x1,
    "separable3x3": _separable(3),
    "separable5x5": _separable(5),
}


class FactorizedReduction(nn.Module):
    """Halves height and width: (N, inputs, H, W) -> (N, filters, ceil(H/2), ceil(W/2)).

    Half of the filters see the even pixels, the other half the odd ones, so that no pixel is lost.
    """

    def __init__(self, inputs: int, filters: int) -> None:
        super().__init__()
        self.even = conv(inputs, (filters + 1) // 2, stride=(2, 2))
        self.odd = conv(inputs, filters // 2, stride=(2, 2))
        self.norm = norm(filters)

    def forward(self, x: Tensor) -> Tensor:
        """Halves height and width."""
        x = F.relu(x)
        shifted = F.pad(x, (-1, 1, -1, 1))  # one pixel up and left; zeros come in at the far sides
        halved: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return halved


def _adapt(channels: int, filters: int, larger: bool) -> nn.Module:
    """Makes what brings a skip input of `channels`, perhaps still of twice the size, to `filters`."""
    if larger:
        return FactorizedReduction(channels, filters)
    return nn.Identity() if channels == filters else relu_conv_norm(channels, filters)


class Cell(nn.Module):
    """One cell: (x, skip) -> (output, x), its input being the next cell's skip.

    The first cell of a network gets its input alone, `skip=None`, and reads it, unadapted, as the skip too.
    What comes behind the pair is handed on. An `auxiliary` classifier adds its logits there in training mode.
    `drop_path` falls on what each operation gives but `none`, each time anew.
    """

    def __init__(
        self,
        genotype: Genotype,
        inputs: int,
        skip: int | None,
        filters: int,
        *,
        stride: int = 1,
        larger: bool = False,
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.auxiliary: nn.Module | None = None
        self.project = relu_conv_norm(inputs, filters)
        self.drop_path = DropPath()
        self.adapt = nn.Identity() if skip is None else _adapt(skip, filters, larger)
        self.operations = nn.ModuleList()
        for name, source in (term for pair in genotype.pairs for term in pair):
            channels = inputs if source == 1 and skip is None else filters
            self.operations.append(OPERATIONS[name](channels, filters, stride if source < 2 else 1))

    def forward(self, state: Tensor | State) -> State:
        """Gives (output, x) and whatever came behind (x, skip)."""
        x, skip, *rest = (state, state) if isinstance(state, Tensor) else state
        states = [self.project(x), self.adapt(skip)]
        operations = iter(self.operations)
        for pair in self.genotype.pairs:
            left, right = (self._operate(name, next(operations), states[source]) for name, source in pair)
            states.append(left + right)
        output = torch.cat([states[i] for i in self.genotype.outputs], dim=1)
        if self.auxiliary is not None and self.training:
            rest.append(self.auxiliary(output))
        return (output, x, *rest)

    def _operate(self, name: str, operation: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = operation(x)
        return out if name == "none" else self.drop_path(out)
