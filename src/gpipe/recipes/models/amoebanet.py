"""AmoebaNet-D and AmoebaNet-B, the image classifiers of the GPipe paper, as sequences of layers.

For L normal cells the layers are L + 6:

    stem | reduction reduction | normal ... | reduction | normal ... | reduction | normal ... | head

A cell reads the output of the cell before it and that of the cell before that one, so what flows from layer
to layer is the pair (output, previous output); the stem has only the first to give. Each reduction halves the
image, and the filters double with each, from D/4 in the first one to 4D in the last stack.

Cells are data, as evolution found them: Real et al. (AAAI 2019). Where the figures printed there and the TPU
reference model differ, the reference is followed: its parameter counts are those of the GPipe paper. It pads a
strided window at one side only; here padding is symmetric, which gives the same shapes, seen one pixel apart.
It runs BatchNorm with torch's defaults; with the other constants that it states, decay 0.9997 and epsilon 1e-3, the
running statistics would be useless for the first ten thousand steps.
ScheduledDropPath is of Zoph et al. (2018), section 3: in training, more and more samples go without an output.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DropPath(nn.Module):
    """Keeps what each sample has with probability `keep`, times 1 / keep, and else gives it zeros: any (N, ...).

    In training mode only. A `keep` of 1, as it starts, hands x on and draws nothing.

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
    """Sets `keep` of every `DropPath` in a model or a pipe; call it before a step, never between its halves.

    >>> from gpipe.models import amoebanet_d
    >>> network = nn.Sequential(*amoebanet_d(layers=3, filters=16, classes=10))
    >>> set_keep(network, drop_path_keep(step=50, steps=100))
    >>> network[1].drop_path.keep
    0.85

    Raises:
        ValueError: A probability that is 0 or less, or more than 1.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} is no share of the samples to keep: give more than 0, and at most 1")
    for module in model.modules():
        if isinstance(module, DropPath):
            module.keep = keep


def drop_path_keep(step: int, steps: int, final: float = 0.7) -> float:
    """Says what share to keep in a step, counted from 0: it falls linearly from 1 to `final`, and stays there.

    >>> [drop_path_keep(step, steps=2) for step in range(4)]
    [1.0, 0.85, 0.7, 0.7]
    """
    done = min(step / steps, 1.0)
    return (1 - done) + done * final


State = tuple[Tensor, ...]


class Genotype(NamedTuple):
    """A cell as evolution found it: which operation reads which state, in pairs that are added.

    State 0 is the projected output of the previous cell, state 1 the adapted output of the one before it; each pair
    adds one state. Operations on the first two have a `stride`. The states in `outputs`, in a row, are the output.
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
    """Makes a bias-free convolution; padded, it keeps the size, and rounds it up when strided.

    Weights are drawn with variance 2 / fan-out. torch's own fan-out forgets `groups`, hence by hand.
    """
    height, width = kernel
    padding = (height // 2, width // 2) if pad else (0, 0)
    made = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    nn.init.normal_(made.weight, std=(2 * groups / (outputs * height * width)) ** 0.5)
    return made


def relu_conv_norm(inputs: int, outputs: int, kernel: Size = (1, 1), stride: Size = (1, 1)) -> nn.Sequential:
    """Makes ReLU, convolution, BatchNorm. The ReLU is not in place: other operations read the same input."""
    return nn.Sequential(nn.ReLU(), conv(inputs, outputs, kernel, stride), nn.BatchNorm2d(outputs))


def _narrow(kernels: Sequence[Size], inputs: int, filters: int, stride: int) -> nn.Module:
    """Makes convolutions of a fourth of the filters, between two of 1x1; wide ones are strided."""
    narrow = filters // 4
    stages = [relu_conv_norm(inputs, narrow)]
    for height, width in kernels:
        strides = stride if height > 1 else 1, stride if width > 1 else 1
        stages.append(relu_conv_norm(narrow, narrow, (height, width), strides))
    return nn.Sequential(*stages, relu_conv_norm(narrow, filters))


def _separable(size: int, inputs: int, filters: int, stride: int) -> nn.Module:
    """Makes two depthwise-separable convolutions in turn, the first one strided."""
    stages: list[nn.Module] = []
    for channels, step in ((inputs, stride), (filters, 1)):
        depthwise = conv(channels, channels, (size, size), (step, step), groups=channels)
        stages += [nn.ReLU(), depthwise, conv(channels, filters), nn.BatchNorm2d(filters)]
    return nn.Sequential(*stages)


def _pool(pool: Callable[[int], nn.Module], inputs: int, filters: int, stride: int) -> nn.Module:
    """Makes a pooling, followed by a 1x1 convolution where the channels differ."""
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
"""Each makes a module from input channels, filters and stride."""


class FactorizedReduction(nn.Module):
    """Halves height and width: (N, inputs, H, W) -> (N, filters, ceil(H/2), ceil(W/2)).

    Half of the filters see the even pixels, the other half the odd ones, so that no pixel is lost.
    """

    def __init__(self, inputs: int, filters: int) -> None:
        super().__init__()
        self.even = conv(inputs, (filters + 1) // 2, stride=(2, 2))
        self.odd = conv(inputs, filters // 2, stride=(2, 2))
        self.norm = nn.BatchNorm2d(filters)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (-1, 1, -1, 1))  # one pixel up and left; zeros come in at the far sides
        halved: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return halved


class Cell(nn.Module):
    """One cell: (x, skip) -> (output, x), its input being the next cell's skip.

    The first cell of a network gets its input alone, `skip=None`, and reads it, unadapted, as the skip too.
    What comes behind the pair is handed on. An `auxiliary` classifier adds its logits there in training mode.
    `drop_path` falls on what each operation gives but `none`, each time anew.
    """

    def __init__(self, genotype: Genotype, inputs: int, skip: int | None, filters: int, *, larger: bool) -> None:
        super().__init__()
        self.genotype = genotype
        self.auxiliary: nn.Module | None = None
        self.project = relu_conv_norm(inputs, filters)
        self.drop_path = DropPath()
        self.adapt: nn.Module = nn.Identity()
        if skip is not None and larger:  # the skip input is still of twice the size
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
            made = ((name, next(operations)(states[source])) for name, source in pair)
            left, right = (out if name == "none" else self.drop_path(out) for name, out in made)
            states.append(left + right)
        output = torch.cat([states[i] for i in self.genotype.outputs], dim=1)
        if self.auxiliary is not None and self.training:
            rest.append(self.auxiliary(output))
        return (output, x, *rest)


_STEM_CHANNELS = 32
_AUXILIARY_CHANNELS = (51, 307)  # 0.4 of 128 and 768


class Head(nn.Module):
    """The classifier: (x, skip) -> logits (N, classes), beside the auxiliary logits if the state has them."""

    def __init__(self, inputs: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, state: State) -> Tensor | State:
        x, _, *auxiliary = state
        logits: Tensor = self.linear(self.dropout(F.relu(x).mean(dim=(2, 3))))
        return (logits, *auxiliary) if auxiliary else logits


def _auxiliary_head(inputs: int, classes: int, image_size: int) -> nn.Module:
    """Makes the classifier of a cell behind four halvings of the image: (N, inputs, S, S) -> (N, classes)."""
    size = -(-((image_size - 1) // 2) // 8)  # the stem is not padded; the three reductions are, and round up
    if size < 5:
        raise ValueError(
            f"the auxiliary head pools windows of 5x5, but images of {image_size}x{image_size} pixels are "
            f"{size}x{size} when they come there: use at least 67x67, or aux_head=False"
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
    """Builds the layers, with an auxiliary head for images of `aux` pixels a side unless it is None."""
    if layers < 3 or filters < 16:
        raise ValueError(
            "AmoebaNet needs at least 3 layers (a normal cell for each stack) and 16 filters (4 in the first "
            f"reduction): got layers={layers}, filters={filters}"
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
        if aux is not None and len(network) == 2 * layers // 3 + 4:  # the last cell of the second stack
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
    """Builds AmoebaNet-D (L, D) for images (N, 3, H, W): a list of L + 6 layers.

    The last layer gives logits (N, classes). With `aux_head`, the last cell of the second stack is classified
    too, and in training mode the last layer gives (logits, auxiliary logits), both (N, classes); the loss of
    the second is commonly weighted by 0.4. Only that head depends on `image_size`, height and width in pixels.
    The defaults are the network of the paper's Table 2. For ScheduledDropPath, see `gpipe.models.set_keep`.

    >>> with torch.device("meta"):
    ...     network = amoebanet_d(layers=3, filters=16, classes=10)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (9, 99503)

    Raises:
        ValueError: Fewer than 3 layers or 16 filters, or an image too small for the auxiliary head.
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
    """Builds AmoebaNet-B (L, D) as `amoebanet_d` builds D; the defaults are the paper's ImageNet network.

    >>> with torch.device("meta"):
    ...     network = amoebanet_b(layers=3, filters=16, classes=10)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (9, 125803)
    """
    return _amoebanet(B_NORMAL, B_REDUCTION, layers, filters, classes, dropout, image_size if aux_head else None)
