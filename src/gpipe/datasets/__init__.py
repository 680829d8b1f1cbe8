"""Data sets of the example jobs, as tensors, and batch orders that depend on (seed, epoch) alone."""

from gpipe.datasets.augment import Augmentation, cutout, flip
from gpipe.datasets.digits import Digits, Images, load_digits
from gpipe.datasets.folder import ImageFolder, SplitFolder, load_folder
from gpipe.datasets.jitter import jitter
from gpipe.datasets.order import batches
from gpipe.datasets.reading import Reader, read_batches

__all__ = [
    "Augmentation",
    "Digits",
    "ImageFolder",
    "Images",
    "Reader",
    "SplitFolder",
    "batches",
    "cutout",
    "flip",
    "jitter",
    "load_digits",
    "load_folder",
    "read_batches",
]
