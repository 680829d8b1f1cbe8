"""Small shifts and rotations of images, so that a network does not learn the few it has by heart."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

SHIFT = 0.05  # of the image's side, at most, each way
ANGLE = 0.15  # radians, at most, each way


def jitter(images: Tensor, rows: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Shifts and turns each image [N, C, H, W]; how is a function of (seed, epoch, its row) and of nothing else.

    >>> image = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> bool((jitter(image, torch.tensor([5]), seed=0, epoch=1) == image).all())
    False
    """
    draws = np.random.default_rng((seed, epoch, 1)).uniform(-1, 1, size=(int(rows.max()) + 1, 3))
    angle, across, down = torch.from_numpy(draws.astype(np.float32))[rows].T
    angle, across, down = angle * ANGLE, across * 2 * SHIFT, down * 2 * SHIFT  # an image is 2 wide in a grid's units
    moves = torch.stack([angle.cos(), -angle.sin(), across, angle.sin(), angle.cos(), down], dim=1)
    grid = F.affine_grid(moves.reshape(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
