"""Builds AmoebaNet-D and AmoebaNet-B, the image classifiers of the GPipe paper, as lists of layers.

A model with L normal cells has L + 6 layers:

    stem | reduction reduction | normal ... | reduction | normal ... | reduction | normal ... | head

A cell reads the outputs of the two cells before it, so each layer returns the pair (output, previous output). The
stem returns only its output. Each reduction halves the height and width of the image and doubles the filters, from
D/4 in the first reduction to 4D in the last stack.

The architecture of the cells is from Real et al. (AAAI 2019). If figures in that paper differ from the public TPU
reference model, this module follows the reference model. The GPipe paper states the parameter counts of the reference
model. This module differs from the reference model in two points:

- The reference pads strided windows on one side. This module pads on both sides: shapes are the same, but windows are
  shifted by one pixel.
- The reference uses a BatchNorm decay of 0.9997 and an epsilon of 1e-3. Running statistics would then be useless for
  the first ten thousand steps. This module uses torch's defaults.

ScheduledDropPath (Zoph et al., 2018, section 3) drops outputs of operations with increasing probability in training.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DropPath(nn.Module):
    """Sets the values of random samples to zero in training, and scales the other samples by 1 / keep.

    Each sample of the input (N, ...) is kept with probability `keep`. With `keep` 1, the initial value, the input is
    returned unchanged and no random numbers are drawn.

    >>> drop_path = DropPath()
    >>> drop_path.keep = 0.5
    >>> drop_path(torch.ones(1000, 3)).unique().tolist()
    [0.0, 2.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.keep = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep == 1:
            return x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(self.keep)
        return x * kept.div_(self.keep)


def set_keep(model: nn.Module, keep: float) -> None:
    """Sets the attribute `keep` of every `DropPath` in a model or pipe.

    Call this function between steps. Between a forward and its backward pass, a call would change recomputed
    activations.

    Args:
        model: The model or pipe. With several processes, call this function in all of them.
        keep: The probability that a sample is kept, greater than 0 and at most 1.

    Raises:
        ValueError: If `keep` is not greater than 0 and at most 1.

    >>> from gpipe.models import amoebanet_d
    >>> network = nn.Sequential(*amoebanet_d(layers=3, filters=16, classes=10))
    >>> set_keep(network, drop_path_keep(step=50, steps=100))
    >>> network[1].drop_path.keep
    0.85
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} is out of range. Pass a number greater than 0 and at most 1.")
    for module in model.modules():
        if isinstance(module, DropPath):
            module.keep = keep


def drop_path_keep(step: int, steps: int, final: float = 0.7) -> float:
    """Returns the `keep` probability of a step, counted from 0. The probability decreases linearly from 1 to `final`.

    >>> [drop_path_keep(step, steps=2) for step in range(4)]
    [1.0, 0.85, 0.7, 0.7]
    """
    done = min(step / steps, 1.0)
    return (1 - done) + done * final


State = tuple[Tensor, ...]


class Genotype(NamedTuple):
    """The architecture of a cell.

    State 0 is the projected output of the previous cell, and state 1 the adapted output of the cell before it. Each
    pair of operations adds one state: the sum of their outputs.

    Attributes:
        pairs: Pairs of operations. Each operation has a name and the number of the state that it reads.
        outputs: The states that are concatenated to the output of the cell.
        stride: Stride of operations on states 0 and 1.
    """

    pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    outputs: tuple[int, ...]
    stride: int = 1


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
    stride=2,
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
    stride=2,
)

Size = tuple[int, int]


def conv(
    inputs: int, outputs: int, kernel: Size = (1, 1), stride: Size = (1, 1), *, groups: int = 1, pad: bool = True
) -> nn.Conv2d:
    """Builds a convolution without bias. With `pad`, the output has the size of the image, divided by the stride.

    The variance of the initial weights is 2 / fan-out. The function computes the fan-out itself, because torch's
    fan-out ignores groups.
    """
    height, width = kernel
    padding = (height // 2, width // 2) if pad else (0, 0)
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    nn.init.normal_(layer.weight, std=(2 * groups / (outputs * height * width)) ** 0.5)
    return layer


def relu_conv_norm(inputs: int, outputs: int, kernel: Size = (1, 1), stride: Size = (1, 1)) -> nn.Sequential:
    """Builds ReLU, convolution and BatchNorm. The ReLU is not in-place, because other operations read its input."""
    return nn.Sequential(nn.ReLU(), conv(inputs, outputs, kernel, stride), nn.BatchNorm2d(outputs))


def _narrow(kernels: Sequence[Size], inputs: int, filters: int, stride: int) -> nn.Module:
    """Builds convolutions with a quarter of the filters, between two 1x1 convolutions. Large kernels are strided."""
    narrow = filters // 4
    stages = [relu_conv_norm(inputs, narrow)]
    for height, width in kernels:
        strides = stride if height > 1 else 1, stride if width > 1 else 1
        stages.append(relu_conv_norm(narrow, narrow, (height, width), strides))
    return nn.Sequential(*stages, relu_conv_norm(narrow, filters))


def _separable(size: int, inputs: int, filters: int, stride: int) -> nn.Module:
    """Builds two depthwise-separable convolutions. The first is strided."""
    stages: list[nn.Module] = []
    for channels, step in ((inputs, stride), (filters, 1)):
        depthwise = conv(channels, channels, (size, size), (step, step), groups=channels)
        stages += [nn.ReLU(), depthwise, conv(channels, filters), nn.BatchNorm2d(filters)]
    return nn.Sequential(*stages)


def _pool(pool: Callable[[int], nn.Module], inputs: int, filters: int, stride: int) -> nn.Module:
    """Builds a pooling layer, followed by a 1x1 convolution if the numbers of channels differ."""
    if inputs == filters:
        return pool(stride)
    return nn.Sequential(pool(stride), conv(inputs, filters), nn.BatchNorm2d(filters))


OPERATIONS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "none": lambda inputs, filters, stride: nn.Identity(),
    "avg3x3": partial(_pool, lambda stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)),
    "max2x2": partial(_pool, lambda stride: nn.MaxPool2d(2, stride, ceil_mode=True)),
    "max3x3": partial(_pool, lambda stride: nn.MaxPool2d(3, stride, padding=1)),
    "conv1x1": lambda inputs, filters, stride: relu_conv_norm(inputs, filters, stride=(stride, stride)),
    "conv3x3": partial(_narrow, [(3, 3)]),
    "conv1x7_7x1": partial(_narrow, [(1, 7), (7, 1)]),
    "separable3x3": partial(_separable, 3),
    "separable5x5": partial(_separable, 5),
}
"""Functions that build the module of an operation from input channels, filters and stride."""


class FactorizedReduction(nn.Module):
    """Halves height and width: (N, inputs, H, W) -> (N, filters, ceil(H/2), ceil(W/2)).

    Half of the filters read the even pixels and the other half the odd pixels, so that no pixel is lost.
    """

    def __init__(self, inputs: int, filters: int) -> None:
        super().__init__()
        self.even = conv(inputs, (filters + 1) // 2, stride=(2, 2))
        self.odd = conv(inputs, filters // 2, stride=(2, 2))
        self.norm = nn.BatchNorm2d(filters)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (-1, 1, -1, 1))  # Shifts the image up and left by one pixel and fills it with zeros.
        output: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return output


class Cell(nn.Module):
    """Computes a cell: (x, skip) -> (output, x). The cell passes its input x on as the skip input of the next cell.

    The first cell receives only x, and also uses x as the skip input. Additional elements of the input tuple are
    passed on. In training, an auxiliary classifier appends its logits to these elements. DropPath is applied to the
    output of each operation except `none`.
    """

    def __init__(self, genotype: Genotype, inputs: int, skip: int | None, filters: int, *, larger: bool) -> None:
        super().__init__()
        self.genotype = genotype
        self.auxiliary: nn.Module | None = None
        self.project = relu_conv_norm(inputs, filters)
        self.drop_path = DropPath()
        self.adapt: nn.Module = nn.Identity()
        if skip is not None and larger:  # The skip input is from before a reduction.
            self.adapt = FactorizedReduction(skip, filters)
        elif skip is not None and skip != filters:
            self.adapt = relu_conv_norm(skip, filters)
        self.operations = nn.ModuleList()
        for name, source in (term for pair in genotype.pairs for term in pair):
            channels = inputs if source == 1 and skip is None else filters
            self.operations.append(OPERATIONS[name](channels, filters, genotype.stride if source < 2 else 1))

    def forward(self, state: Tensor | State) -> State:
        x, skip, *rest = (state, state) if isinstance(state, Tensor) else state
        states = [self.project(x), self.adapt(skip)]
        operations = iter(self.operations)
        for pair in self.genotype.pairs:
            outputs = ((name, next(operations)(states[source])) for name, source in pair)
            left, right = (x if name == "none" else self.drop_path(x) for name, x in outputs)
            states.append(left + right)
        output = torch.cat([states[i] for i in self.genotype.outputs], dim=1)
        if self.auxiliary is not None and self.training:
            rest.append(self.auxiliary(output))
        return (output, x, *rest)


_STEM_CHANNELS = 32
_AUXILIARY_CHANNELS = (51, 307)  # 0.4 times 128 and 768.


class Head(nn.Module):
    """Classifies images: (x, skip) -> logits (N, classes). With auxiliary logits in the input, returns both."""

    def __init__(self, inputs: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, state: State) -> Tensor | State:
        x, _, *auxiliary = state
        logits: Tensor = self.linear(self.dropout(F.relu(x).mean(dim=(2, 3))))
        return (logits, *auxiliary) if auxiliary else logits


def _auxiliary_head(inputs: int, classes: int, image_size: int) -> nn.Module:
    """Builds the auxiliary classifier of a cell after four reductions of the image: (N, inputs, S, S) -> logits."""
    size = -(-((image_size - 1) // 2) // 8)  # The stem is not padded. The three reductions are, and round up.
    if size < 5:
        raise ValueError(
            f"image_size={image_size} is too small for aux_head=True, because the auxiliary classifier pools windows "
            f"of 5x5, and its input would have only {size}x{size} pixels. Use at least 67, or aux_head=False."
        )
    narrow, wide = _AUXILIARY_CHANNELS
    pooled = (size - 5) // 3 + 1
    return nn.Sequential(
        *(nn.ReLU(), nn.AvgPool2d(5, stride=3)),
        *(conv(inputs, narrow), nn.BatchNorm2d(narrow), nn.ReLU()),
        *(conv(narrow, wide, (pooled, pooled), pad=False), nn.BatchNorm2d(wide), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(wide, classes)),
    )


def _amoebanet(
    normal: Genotype, reduction: Genotype, layers: int, filters: int, classes: int, dropout: float, aux: int | None
) -> list[nn.Module]:
    """Builds the layers. If `aux` is not None, adds an auxiliary classifier for images of `aux` pixels."""
    if layers < 3 or filters < 16:
        raise ValueError(
            f"layers={layers}, filters={filters} are too small. Pass at least 3 layers (one normal cell per stack), "
            "and at least 16 filters (4 in the first reduction)."
        )
    cells = [(reduction, filters // 4), (reduction, filters // 2)]
    for i in range(layers):
        if i in (layers // 3, 2 * layers // 3):
            filters *= 2
            cells.append((reduction, filters))
        cells.append((normal, filters))
    stem = nn.Sequential(conv(3, _STEM_CHANNELS, (3, 3), (2, 2), pad=False), nn.BatchNorm2d(_STEM_CHANNELS))
    network: list[nn.Module] = [stem]
    inputs, larger = _STEM_CHANNELS, False
    skip: int | None = None
    for genotype, width in cells:
        cell = Cell(genotype, inputs, skip, width, larger=larger)
        network.append(cell)
        inputs, skip, larger = width * len(genotype.outputs), inputs, genotype is reduction
        if aux is not None and len(network) == 2 * layers // 3 + 4:  # This is the last cell of the second stack.
            cell.auxiliary = _auxiliary_head(inputs, classes, aux)
    return [*network, Head(inputs, classes, dropout)]


def amoebanet_d(
    layers: int = 18,
    filters: int = 256,
    classes: int = 1000,
    aux_head: bool = False,
    *,
    dropout: float = 0.5,
    image_size: int = 224,
) -> list[nn.Module]:
    """Builds AmoebaNet-D (L, D) for images (N, 3, H, W) as a list of L + 6 layers.

    The default arguments are the model of the paper's Table 2. For ScheduledDropPath, see `gpipe.models.set_keep`.

    Args:
        layers: L, the number of normal cells.
        filters: D, the number of filters in the first stack of normal cells.
        classes: Number of classes.
        aux_head: Whether to add an auxiliary classifier after the second stack. In training, the last layer then
            returns (logits, auxiliary logits), both (N, classes). The auxiliary loss usually has weight 0.4.
        dropout: Dropout probability before the softmax layer.
        image_size: Height and width in pixels. Only the auxiliary classifier depends on this size.

    Returns:
        L + 6 layers: the stem, L normal cells and 4 reduction cells, and the classifier. The layers compute logits
        (N, classes) from images (N, 3, H, W).

    Raises:
        ValueError: If there are fewer than 3 layers or 16 filters, or images are too small for the auxiliary
            classifier.

    >>> with torch.device("meta"):
    ...     network = amoebanet_d(layers=3, filters=16, classes=10)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (9, 99503)
    """
    return _amoebanet(D_NORMAL, D_REDUCTION, layers, filters, classes, dropout, image_size if aux_head else None)


def amoebanet_b(
    layers: int = 18,
    filters: int = 512,
    classes: int = 1000,
    aux_head: bool = False,
    *,
    dropout: float = 0.5,
    image_size: int = 224,
) -> list[nn.Module]:
    """Builds AmoebaNet-B (L, D) for images (N, 3, H, W) as a list of L + 6 layers.

    The default arguments are the paper's model for ImageNet.

    Args:
        layers: L, the number of normal cells.
        filters: D, the number of filters in the first stack of normal cells.
        classes: Number of classes.
        aux_head: Whether to add an auxiliary classifier, as for `amoebanet_d`.
        dropout: Dropout probability before the softmax layer.
        image_size: Height and width in pixels. Only the auxiliary classifier depends on this size.

    Returns:
        L + 6 layers: the stem, L normal cells and 4 reduction cells, and the classifier. The layers compute logits
        (N, classes) from images (N, 3, H, W).

    Raises:
        ValueError: If there are fewer than 3 layers or 16 filters, or images are too small for the auxiliary
            classifier.

    >>> with torch.device("meta"):
    ...     network = amoebanet_b(layers=3, filters=16, classes=10)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (9, 125803)
    """
    return _amoebanet(B_NORMAL, B_REDUCTION, layers, filters, classes, dropout, image_size if aux_head else None)
