"""Models as lists of layers: the models of the GPipe paper, and the U-Net of torchgpipe's benchmarks."""

from gpipe.recipes.models.amoebanet import DropPath, amoebanet_b, amoebanet_d, drop_path_keep, set_keep
from gpipe.recipes.models.transformer import transformer, transformer_lm
from gpipe.recipes.models.unet import unet

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
