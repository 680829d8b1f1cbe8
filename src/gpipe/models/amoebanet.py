"""AmoebaNet-D and AmoebaNet-B, the image classifiers of the GPipe paper, as sequences of layers.

For L normal cells the layers are L + 6:

    stem | reduction reduction | normal ... | reduction | normal ... | reduction | normal ... | head

A cell reads the output of the cell before it and that of the cell before that one, so what flows from layer
to layer is the pair (output, previous output); the stem has only the first to give. Each reduction halves the
image, and the filters double with each, from D/4 in the first one to 4D in the last stack.
"""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.cells import (
    B_NORMAL,
    B_REDUCTION,
    D_NORMAL,
    D_REDUCTION,
    Cell,
    Genotype,
    State,
    conv,
    norm,
)

_STEM_CHANNELS = 32
_AUXILIARY_CHANNELS = (51, 307)  # 0.4 of 128 and 768


class Head(nn.Module):
    """The classifier: (x, skip) -> logits (N, classes), beside the auxiliary logits if the state has them."""

    def __init__(self, inputs: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, state: State) -> Tensor | State:
        """Averages over the image, drops out, classifies."""
        x, _, *auxiliary = state
        logits: Tensor = self.linear(self.dropout(F.relu(x).mean(dim=(2, 3))))
        return (logits, *auxiliary) if auxiliary else logits


def _auxiliary_head(inputs: int, classes: int, image_size: int) -> nn.Module:
    """Makes the classifier of a cell behind four halvings of the image: (N, inputs, S, S) -> (N, classes)."""
    size = (image_size - 1) // 2  # the stem is not padded
    for _ in range(3):
        size = (size + 1) // 2
    if size < 5:
        raise ValueError(
            f"the auxiliary head pools windows of 5x5, but images of {image_size}x{image_size} pixels are "
            f"{size}x{size} when they come there: use at least 67x67, or aux_head=False"
        )
    narrow, wide = _AUXILIARY_CHANNELS
    pooled = (size - 5) // 3 + 1
    return nn.Sequential(
        *(nn.ReLU(), nn.AvgPool2d(5, stride=3)),
        *(conv(inputs, narrow), norm(narrow), nn.ReLU()),
        *(conv(narrow, wide, (pooled, pooled), pad=False), norm(wide), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(wide, classes)),
    )


def _blueprint(normal: Genotype, reduction: Genotype, layers: int, filters: int) -> Iterator[tuple[Genotype, int]]:
    """Yields the genotype and the filters of each cell."""
    yield reduction, filters // 4
    yield reduction, filters // 2
    for i in range(layers):
        if i in (layers // 3, 2 * layers // 3):
            filters *= 2
            yield reduction, filters
        yield normal, filters


def _amoebanet(
    genotypes: tuple[Genotype, Genotype],
    layers: int,
    filters: int,
    classes: int,
    dropout: float,
    aux_size: int | None,
) -> list[nn.Module]:
    """Builds the layers, with an auxiliary head where the size of the image is given for it."""
    if layers < 3 or filters < 16:
        raise ValueError(
            "AmoebaNet needs at least 3 layers (a normal cell for each stack) and 16 filters (4 in the first "
            f"reduction): got layers={layers}, filters={filters}"
        )
    _, reduction = genotypes
    stem = nn.Sequential(conv(3, _STEM_CHANNELS, (3, 3), (2, 2), pad=False), norm(_STEM_CHANNELS))
    network: list[nn.Module] = [stem]
    inputs, larger = _STEM_CHANNELS, False
    skip: int | None = None
    for genotype, width in _blueprint(*genotypes, layers, filters):
        reduces = genotype is reduction
        cell = Cell(genotype, inputs, skip, width, stride=2 if reduces else 1, larger=larger)
        network.append(cell)
        inputs, skip, larger = width * len(genotype.outputs), inputs, reduces
        if aux_size is not None and len(network) == 2 * layers // 3 + 4:  # the last cell of the second stack
            cell.auxiliary = _auxiliary_head(inputs, classes, aux_size)
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

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = amoebanet_d(layers=3, filters=16, classes=10)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (9, 99503)

    Raises:
        ValueError: Fewer than 3 layers or 16 filters, or an image too small for the auxiliary head.
    """
    return _amoebanet((D_NORMAL, D_REDUCTION), layers, filters, classes, dropout, image_size if aux_head else None)


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

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = amoebanet_b(layers=3, filters=16, classes=10)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (9, 125803)

    Raises:
        ValueError: Fewer than 3 layers or 16 filters, or an image too small for the auxiliary head.
    """
    return _amoebanet((B_NORMAL, B_REDUCTION), layers, filters, classes, dropout, image_size if aux_head else None)
