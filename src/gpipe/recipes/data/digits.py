"""Scikit-learn's handwritten digits: 1797 real images of 8x8 pixels, here at 64x64 in three channels."""

from collections.abc import Sequence
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
SUBSET = 6  # key of draws, beside those of augment.py


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


def load_digits(
    size: int = 64, classes: Sequence[int] | None = None, per_class: int | None = None, seed: int = 0
) -> Digits:
    """Reads the digits and scales them to `size` pixels a side.

    The pixels of all training images together have mean 0 and standard deviation 1. The split is stratified: the
    held-out images are a fifth of each class.

    `classes` keeps only these digits, numbered from 0 in the order given. `per_class` keeps only so many training
    images of each, chosen by `seed`, of which fewer are always a part of more; no held-out image is left out by it.

    Raises:
        ImportError: scikit-learn, which carries the images, is not installed.
        ValueError: `classes` has what is no digit or has it twice, or `per_class` is more than there are.
    """
    pixels, digits = _read()
    held_out = _every_fifth_of_each(digits)
    kept = range(CLASSES) if classes is None else classes
    _check(kept, per_class, digits[~held_out])
    pixels = (pixels - pixels[~held_out].mean()) / pixels[~held_out].std()
    images = F.interpolate(pixels[:, None], size=(size, size), mode="bilinear", align_corners=False)
    both = Images(images.repeat(1, 3, 1, 1), digits)
    train = both[~held_out]
    if per_class is not None:
        train = train[_some_of_each(train.classes, per_class, seed)]
    return Digits(train=_only(train, kept), held_out=_only(both[held_out], kept))


def _check(kept: Sequence[int], per_class: int | None, train: Tensor) -> None:
    digits = [digit for digit in dict.fromkeys(kept) if digit in range(CLASSES)]
    mistakes = []
    if not kept or len(digits) < len(kept):
        mistakes.append(f"classes is {[*kept]}; give different digits from 0 to {CLASSES - 1}, at least one")
    most = min((int((train == digit).sum()) for digit in digits), default=1)
    if per_class is not None and not 1 <= per_class <= most:
        mistakes.append(f"per_class is {per_class}; give a number from 1 to {most}, or None for all")
    if mistakes:
        raise ValueError("; ".join(mistakes))


def _some_of_each(classes: Tensor, count: int, seed: int) -> Tensor:
    """Returns the rows of `count` images of each class, in the order of the file."""
    chosen = []
    for digit in range(CLASSES):
        rows = (classes == digit).nonzero()[:, 0]
        chosen.append(rows[np.random.default_rng((seed, digit, SUBSET)).permutation(len(rows))[:count]])
    return torch.cat(chosen).sort().values


def _only(images: Images, kept: Sequence[int]) -> Images:
    """Returns the images of some digits, numbered by their places in `kept`."""
    number = torch.full((CLASSES,), -1)
    number[list(kept)] = torch.arange(len(kept))
    classes = number[images.classes]
    return Images(images.images, classes)[classes >= 0]


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
