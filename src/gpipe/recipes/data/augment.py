"""Which images an epoch sees, and what becomes of them: crops, flips, cutouts and small turns.

Every draw is a function of (seed, epoch, row) alone: neither the batch that a row is in nor the process that reads it
makes a difference. Each kind of draw has a key of its own, so leaving one out changes no other.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CROP, FLIP, CUTOUT, SUBSET = 2, 3, 4, 6  # keys of draws; the order of rows has none, which is 0, and jitter has 1
NARROWEST, WIDEST = 3 / 4, 4 / 3  # width of a box by its height
MIDDLE = 0.875  # of each side, what evaluation looks at
SHIFT = 0.05  # of the image's side, at most, each way
ANGLE = 0.15  # radians, at most, each way

T = TypeVar("T")
Box = tuple[float, float, float, float]  # left, top, right, bottom


def batches(rows: int, batch_size: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Returns the row numbers of each mini-batch of an epoch: every row at most once.

    The rows left over after the last whole mini-batch sit this epoch out, others in the next.
    """
    order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(rows))
    return list(order[: rows - rows % batch_size].split(batch_size))


def some_of_each(classes: Mapping[int, Sequence[T]], count: int, seed: int) -> dict[int, list[T]]:
    """Keeps `count` of each numbered class, in their order; fewer are always a part of more."""
    if count > (most := min(map(len, classes.values()))):
        raise ValueError(f"--per-class is {count}: choose 1 to {most}")
    chosen = {}
    for number, own in classes.items():
        order = np.random.default_rng((seed, number, SUBSET)).permutation(len(own))
        chosen[number] = [own[place] for place in sorted(order[:count])]
    return chosen


class Augmentation(NamedTuple):
    """What becomes of an image before a network sees it.

    `size` is pixels a side, always. Training scales a random box of `least_area` of the image or more to it; digits
    are shifted and turned a little if `jitter`. Half are mirrored if `flip`, and `cutout` pixels a side are left out.
    """

    size: int = 224
    least_area: float = 0.1
    flip: bool = True
    cutout: int = 0
    seed: int = 0
    jitter: bool = False


def random_box(width: int, height: int, row: int, *, least_area: float, seed: int, epoch: int) -> Box:
    """Returns a box of whole pixels inside an image, 3:4 to 4:3, of a random share of the image's area.

    The share is `least_area` or more; less only where a long image has no room for a box of that area.
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
    """Returns the middle of an image, seven eighths of each side."""
    left, top = width * (1 - MIDDLE) / 2, height * (1 - MIDDLE) / 2
    return left, top, width - left, height - top


def augment(images: Tensor, rows: Tensor, how: Augmentation, epoch: int) -> Tensor:
    """Jitters images [N, 3, H, W] of mean 0, flips them and cuts out of them, as far as `how` asks for it."""
    if how.jitter:
        images = jitter(images, rows, seed=how.seed, epoch=epoch)
    if how.flip:
        images = flip(images, rows, seed=how.seed, epoch=epoch)
    return cutout(images, rows, how.cutout, seed=how.seed, epoch=epoch) if how.cutout else images


def flip(images: Tensor, rows: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Mirrors half of the images [N, C, H, W], left to right."""
    mirrored = _draw(rows.tolist(), FLIP, 1, seed, epoch) < 0.5
    return torch.where(mirrored[:, :, None, None], images.flip(-1), images)


def cutout(images: Tensor, rows: Tensor, size: int, *, seed: int, epoch: int) -> Tensor:
    """Sets a square of `size` pixels a side to 0 in each image [N, C, H, W], around any pixel, also at an edge."""
    covered = []
    for centers, side in zip(_draw(rows.tolist(), CUTOUT, 2, seed, epoch).T, images.shape[-2:], strict=True):
        first, pixels = (centers * side).floor()[:, None] - size // 2, torch.arange(side)
        covered.append((pixels >= first) & (pixels < first + size))
    down, across = covered
    return images.masked_fill((down[:, :, None] & across[:, None, :])[:, None], 0)


def _draw(rows: list[int], kind: int, count: int, seed: int, epoch: int) -> Tensor:
    """Draws [N, count] numbers from 0 to below 1 in float64, those of a row from a generator of its own."""
    return torch.from_numpy(np.stack([np.random.default_rng((seed, epoch, kind, row)).random(count) for row in rows]))


def jitter(images: Tensor, rows: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Shifts and turns each image [N, C, H, W] a little, so that a network does not learn few by heart."""
    draws = np.random.default_rng((seed, epoch, 1)).uniform(-1, 1, size=(int(rows.max()) + 1, 3))
    angle, across, down = torch.from_numpy(draws.astype(np.float32))[rows].T
    angle, across, down = angle * ANGLE, across * 2 * SHIFT, down * 2 * SHIFT  # an image is 2 wide in a grid's units
    moves = torch.stack([angle.cos(), -angle.sin(), across, angle.sin(), angle.cos(), down], dim=1)
    grid = F.affine_grid(moves.reshape(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
