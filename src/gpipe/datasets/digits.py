"""Scikit-learn's handwritten digits: 1797 real images of 8x8 pixels, here at 64x64 in three channels."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
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
    table = _read_table()
    return (
        torch.from_numpy(table[:, :-1].astype(np.float32).reshape(-1, 8, 8)),
        torch.from_numpy(table[:, -1].astype(np.int64)),
    )


def _read_table() -> NDArray[np.float64]:
    """Returns a row of 64 pixels and the class for each image.

    Scikit-learn takes most of a second to import, in every process; its file of digits is enough.
    """
    found = find_spec("sklearn")
    file = Path(found.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if found else None
    if file is not None and file.is_file():
        return np.loadtxt(file, delimiter=",")
    try:
        from sklearn.datasets import load_digits as read_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'gpipe[digits]'") from error
    bunch = read_digits()
    return np.column_stack([bunch.data, bunch.target])


def _every_fifth_of_each(classes: Tensor) -> Tensor:
    held_out = torch.zeros(len(classes), dtype=torch.bool)
    for digit in range(CLASSES):
        held_out[(classes == digit).nonzero()[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY, 0]] = True
    return held_out
