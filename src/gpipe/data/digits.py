"""Scikit-learn's handwritten digits: 1797 real images of 8x8 pixels, here at 64x64 in three channels."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CLASSES = 10
HELD_OUT_EVERY = 5  # of each class, in the order of the file, every fifth image is held out


@dataclass(frozen=True, eq=False)
class Images:
    """Images [N, 3, H, W] in float32 with their classes [N] in int64."""

    images: Tensor
    classes: Tensor

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, rows: Tensor | slice) -> "Images":
        return Images(self.images[rows], self.classes[rows])


@dataclass(frozen=True, eq=False)
class Digits:
    """Handwritten digits, split once and for all into images to train on and images held out."""

    train: Images
    held_out: Images


def load_digits(size: int = 64) -> Digits:
    """Reads the digits and scales them to `size` pixels a side.

    The pixels of the training images have mean 0 and standard deviation 1. The split is stratified: the held-out
    images are a fifth of each class.

    Raises:
        ImportError: scikit-learn, which carries the images, is not installed.
    """
    pixels, classes = _read()
    held_out = _every_fifth_of_each(classes)
    pixels = (pixels - pixels[~held_out].mean()) / pixels[~held_out].std()
    images = F.interpolate(pixels[:, None], size=(size, size), mode="bilinear", align_corners=False)
    every = Images(images.repeat(1, 3, 1, 1), classes)
    return Digits(train=every[~held_out], held_out=every[held_out])


def _read() -> tuple[Tensor, Tensor]:
    """Returns pixels [1797, 8, 8] and classes [1797]."""
    try:
        from sklearn.datasets import load_digits as read_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'gpipe[digits]'") from error
    bunch = read_digits()
    return (
        torch.from_numpy(np.asarray(bunch.images, dtype=np.float32)),
        torch.from_numpy(np.asarray(bunch.target, dtype=np.int64)),
    )


def _every_fifth_of_each(classes: Tensor) -> Tensor:
    held_out = torch.zeros(len(classes), dtype=torch.bool)
    for digit in range(CLASSES):
        held_out[(classes == digit).nonzero()[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY, 0]] = True
    return held_out
