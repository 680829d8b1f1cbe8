"""Networks as sequences of layers: those the GPipe paper trains, and the U-Net of torchgpipe's benchmarks."""

from gpipe.models.amoebanet import amoebanet_b, amoebanet_d
from gpipe.models.transformer import transformer_lm
from gpipe.models.translation import transformer
from gpipe.models.unet import unet

__all__ = [
    "amoebanet_b",
    "amoebanet_d",
    "transformer",
    "transformer_lm",
    "unet",
]
