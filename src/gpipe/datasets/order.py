"""In which order an epoch visits the rows of a data set."""

import numpy as np
import torch
from torch import Tensor


def batches(rows: int, batch_size: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Returns the row numbers of each mini-batch of an epoch: a function of the arguments and of nothing else.

    Every row appears at most once. The rows left over after the last whole mini-batch sit this epoch out, others
    in the next, so that every step has the same shape.

    >>> [batch.tolist() for batch in batches(rows=7, batch_size=3, seed=0, epoch=1)]
    [[1, 3, 6], [0, 4, 2]]

    Raises:
        ValueError: No whole mini-batch fits into `rows`.
    """
    if not 1 <= batch_size <= rows:
        raise ValueError(f"batch_size is {batch_size}; choose one from 1 to {rows}, the number of rows")
    order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(rows))
    whole = rows - rows % batch_size
    return list(torch.tensor_split(order[:whole], whole // batch_size))
