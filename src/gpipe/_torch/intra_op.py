"""How many CPU threads an operation of torch uses inside: for the calling thread, and put back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Lets an operation use so many CPU threads inside.

    >>> with intra_op_threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
