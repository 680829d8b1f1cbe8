"""Scikit-learn's handwritten digits: 1797 real images of 8x8 pixels, here at 64x64 in three channels."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from gpipe.recipes.data import imported
from gpipe.recipes.data.augment import augment, some_of_each
from gpipe.recipes.data.folder import Order
from gpipe.recipes.recipe import Batch

CLASSES = 10
FIFTHS = np.s_[4::5]  # of each class, in the order of the file, every fifth image is held out


class Digits(TensorDataset):
    """Images and their classes, as tensors; reads whole batches, as `ImageFolder` does."""

    @property
    def labels(self) -> Tensor:
        """The classes."""
        return self.tensors[1]

    def __getitem__(self, order: Order) -> Batch:
        rows, how, epoch = order
        images, classes = (tensor[rows] for tensor in self.tensors)
        return Batch(images if epoch is None else augment(images, torch.tensor(rows), how, epoch), classes)


def load_digits(
    size: int = 64, classes: Sequence[int] = range(CLASSES), per_class: int | None = None, seed: int = 0
) -> tuple[Digits, Digits]:
    """Reads the digits to train on and those held out, images [N, 3, size, size] in float32 and their classes [N].

    The pixels of all training images together have mean 0 and standard deviation 1. Held out is a fifth of each
    class. `classes` keeps only these digits, numbered in the order given, and `per_class` only so many training
    images of each, chosen by `seed`.
    """
    found = imported("sklearn.datasets", "the digits come with scikit-learn", "digits").load_digits()
    pixels = torch.from_numpy(found.images.astype(np.float32))[:, None]
    digits = torch.from_numpy(found.target)
    rows = [np.flatnonzero(found.target == digit) for digit in range(CLASSES)]
    to_train_on = np.sort(np.concatenate([np.delete(own, FIFTHS) for own in rows]))
    pixels = (pixels - pixels[to_train_on].mean()) / pixels[to_train_on].std()
    images = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    number = torch.full((CLASSES,), -1)
    number[list(classes)] = torch.arange(len(classes))

    def part(chosen: Sequence[Sequence[int]]) -> Digits:
        places = sorted(place for own in chosen for place in own)
        return Digits(images[places], number[digits[places]])

    train = {digit: np.delete(rows[digit], FIFTHS).tolist() for digit in classes}
    if per_class is not None:
        train = some_of_each(train, per_class, seed)
    return part([*train.values()]), part([rows[digit][FIFTHS].tolist() for digit in classes])
