"""Networks as sequences of layers: those the GPipe paper trains, and the U-Net of torchgpipe's benchmarks."""

from gpipe.models.amoebanet import amoebanet_b, amoebanet_d
from gpipe.models.drop_path import DropPath, drop_path_keep, set_keep
from gpipe.models.transformer import transformer_lm
from gpipe.models.translation import transformer
from gpipe.models.unet import unet

__all__ = [
    "DropPath",
    "amoebanet_b",
    "amoebanet_d",
    "drop_path_keep",
    "set_keep",
    "transformer",
    "transformer_lm",
    "unet",
]
