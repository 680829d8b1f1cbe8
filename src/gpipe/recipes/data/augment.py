"""Orders the images of an epoch and augments them: crops, flips, cutouts, small shifts and rotations.

Random numbers depend only on (seed, epoch, row), not on the batch of a row or on the process that reads it. Each kind
of augmentation has its own random numbers, so disabling one kind does not change the other kinds.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CROP, FLIP, CUTOUT, SUBSET = 2, 3, 4, 6  # Keys of random numbers. Jitter has key 1, and the order of rows has none.
NARROWEST, WIDEST = 3 / 4, 4 / 3  # Ratio of width to height of a random crop.
MIDDLE = 0.875  # Share of each side that an evaluation keeps.
SHIFT = 0.05  # Maximum shift, as a share of the image's side.
ANGLE = 0.15  # Maximum rotation, in radians.

T = TypeVar("T")
Box = tuple[float, float, float, float]  # Left, top, right and bottom.


def batches(rows: int, batch_size: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Returns the row numbers of each mini-batch of an epoch, in random order.

    Rows that do not fill a mini-batch are skipped. Each epoch skips different rows.
    """
    order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(rows))
    return list(order[: rows - rows % batch_size].split(batch_size))


def some_of_each(classes: Mapping[int, Sequence[T]], count: int, seed: int) -> dict[int, list[T]]:
    """Returns `count` random items of each class, in their original order.

    If you reduce `count`, the result is a subset of the earlier result.
    """
    if count > (most := min(map(len, classes.values()))):
        raise ValueError(f"--per-class: {count} is out of range. Choose 1 to {most}, the size of the smallest class.")
    chosen = {}
    for number, items in classes.items():
        order = np.random.default_rng((seed, number, SUBSET)).permutation(len(items))
        chosen[number] = [items[index] for index in sorted(order[:count])]
    return chosen


class Augmentation(NamedTuple):
    """The settings of the augmentation. An evaluation uses only `size`.

    Attributes:
        size: Height and width of the images in pixels.
        least_area: Minimum share of an image's area that a random crop keeps.
        flip: Whether to mirror half of the images.
        cutout: Size of a random blank square in pixels. With 0, there is no square.
        seed: Random seed.
        jitter: Whether to shift and rotate images slightly.
    """

    size: int = 224
    least_area: float = 0.1
    flip: bool = True
    cutout: int = 0
    seed: int = 0
    jitter: bool = False


def random_box(width: int, height: int, row: int, *, least_area: float, seed: int, epoch: int) -> Box:
    """Returns a random crop of an image in whole pixels, with an aspect ratio from 3:4 to 4:3.

    The crop covers at least `least_area` of the image's area. Very long images, in which no such crop fits, are the
    exception.
    """
    shape, share, across, down = _draw([row], CROP, 4, seed, epoch)[0].tolist()
    aspect = NARROWEST + shape * (WIDEST - NARROWEST)
    most = min(width / (height * aspect), height * aspect / width)
    least = min(least_area, most)
    area = (least + share * (most - least)) * width * height
    wide = min(max(round(sqrt(area * aspect)), 1), width)
    high = min(max(round(sqrt(area / aspect)), 1), height)
    left, top = int(across * (width - wide + 1)), int(down * (height - high + 1))
    return left, top, left + wide, top + high


def central_box(width: int, height: int) -> Box:
    """Returns the center crop of an image, with 7/8 of each side."""
    left, top = width * (1 - MIDDLE) / 2, height * (1 - MIDDLE) / 2
    return left, top, width - left, height - top


def augment(images: Tensor, rows: Tensor, how: Augmentation, epoch: int) -> Tensor:
    """Applies jitter, flip and cutout to images [N, 3, H, W] with mean 0, according to the settings."""
    if how.jitter:
        images = jitter(images, rows, seed=how.seed, epoch=epoch)
    if how.flip:
        images = flip(images, rows, seed=how.seed, epoch=epoch)
    return cutout(images, rows, how.cutout, seed=how.seed, epoch=epoch) if how.cutout else images


def flip(images: Tensor, rows: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Mirrors each of the images [N, C, H, W] horizontally with probability 1/2."""
    mirrored = _draw(rows.tolist(), FLIP, 1, seed, epoch) < 0.5
    return torch.where(mirrored[:, :, None, None], images.flip(-1), images)


def cutout(images: Tensor, rows: Tensor, size: int, *, seed: int, epoch: int) -> Tensor:
    """Sets a square around a random pixel to 0 in each image [N, C, H, W]. The square is cropped at the edges."""
    covered = []
    for centers, side in zip(_draw(rows.tolist(), CUTOUT, 2, seed, epoch).T, images.shape[-2:], strict=True):
        first, pixels = (centers * side).floor()[:, None] - size // 2, torch.arange(side)
        covered.append((pixels >= first) & (pixels < first + size))
    down, across = covered
    return images.masked_fill((down[:, :, None] & across[:, None, :])[:, None], 0)


def _draw(rows: list[int], kind: int, count: int, seed: int, epoch: int) -> Tensor:
    """Draws uniform random numbers in [0, 1), [N, count] in float64. Each row has its own generator."""
    return torch.from_numpy(np.stack([np.random.default_rng((seed, epoch, kind, row)).random(count) for row in rows]))


def jitter(images: Tensor, rows: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Shifts and rotates each image [N, C, H, W] slightly, so that a model does not memorize a small data set."""
    draws = np.random.default_rng((seed, epoch, 1)).uniform(-1, 1, size=(int(rows.max()) + 1, 3))
    angle, across, down = torch.from_numpy(draws.astype(np.float32))[rows].T
    angle, across, down = angle * ANGLE, across * 2 * SHIFT, down * 2 * SHIFT  # In a grid, an image has width 2.
    moves = torch.stack([angle.cos(), -angle.sin(), across, angle.sin(), angle.cos(), down], dim=1)
    grid = F.affine_grid(moves.reshape(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
