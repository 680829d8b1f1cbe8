"""Builds the U-Net of torchgpipe's benchmarks (Kim et al., arXiv 2004.09910), with long skips and hundreds of layers.

The model has five levels. Each level has half the height and width of the level above:

    e0 ------------------------> e0        e: B convolutions, stash the result, halve the size
      e1 ----------------> e1              bottom: B convolutions
        ...   bottom   ...                 and back: double the size, join the stashed result, B convolutions

Each module is a separate layer, so that the model can be split anywhere. There are 44 B + 21 layers.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LEVELS = 5


class Stash(nn.Module):
    """Returns its input, and stashes the input under a name for a later layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.stash = (name,)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {self.stash[0]: x}


class Join(nn.Module):
    """Concatenates the tensor stashed under a name, (N, C, H, W), and its input along the channels.

    If halving an odd size has made the input smaller, the input is padded with zeros at the right and the bottom.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.pop = (name,)

    def forward(self, x: Tensor, **stashed: Tensor) -> Tensor:
        skip = stashed[self.pop[0]]
        down, right = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        return torch.cat([skip, F.pad(x, (0, right, 0, down))], dim=1)


def _convolutions(count: int, inputs: int, inner: int, outputs: int, dropout: float) -> Iterator[nn.Module]:
    """Yields convolution, dropout, norm and ReLU `count` times.

    The channels are inputs -> inner -> ... -> outputs.
    """
    for before, after in pairwise([inputs, *[inner] * (count - 1), outputs]):
        yield nn.Conv2d(before, after, 3, padding=1, bias=False)
        yield nn.Dropout2d(dropout)
        yield nn.InstanceNorm2d(after)
        yield nn.LeakyReLU(0.01)


def unet(b: int, c: int, *, inputs: int = 3, outputs: int = 1, dropout: float = 0.1) -> list[nn.Module]:
    """Builds U-Net (B, C) as a list of 44 B + 21 layers: images (N, inputs, H, W) -> logits (N, outputs, H, W).

    Images must have at least 64x64 pixels.

    Args:
        b: B, the number of convolutions between two changes of the image size.
        c: C, the number of channels at the top level.
        inputs: Number of channels of the images.
        outputs: Number of channels of the logits.
        dropout: Dropout probability after each convolution.

    Returns:
        44 B + 21 layers. The layers compute logits (N, outputs, H, W) from images (N, inputs, H, W). Some layers
        stash and pop tensors. To run the layers without a pipe, use `gpipe.Sequential(*layers)`.

    Raises:
        ValueError: If `b` is less than 1, or `c` is odd or less than 2.

    >>> with torch.device("meta"):
    ...     network = unet(6, 72)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (285, 362157516)
    """
    if b < 1 or c < 2 or c % 2:
        raise ValueError(f"b={b}, c={c} are out of range. Pass b of at least 1, and an even c of at least 2.")
    widths, layers = [c * 2**level for level in range(_LEVELS)], list[nn.Module]()
    for level, width in enumerate(widths):
        layers += [*_convolutions(b, inputs, width, width, dropout), Stash(f"e{level}"), nn.MaxPool2d(2)]
        inputs = width
    layers += _convolutions(b, inputs, 2 * inputs, inputs, dropout)
    for level, width in reversed([*enumerate(widths)]):
        layers += [nn.Upsample(scale_factor=2), Join(f"e{level}")]
        layers += _convolutions(b, 2 * width, width // 2, width // 2, dropout)
    return [*layers, nn.Conv2d(c // 2, outputs, 1, bias=False)]
