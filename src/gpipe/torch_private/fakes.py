"""Tensors without values that say to be where values would be."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What an operation raises that cannot tell its output, or its layout, without values."""


class Fakes:
    """Makes tensors without values, and has operations do without."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, operations do without values, also those of tensors that have some.

        What cannot is raised, and not logged beside.
        """
        logger = logging.getLogger(FakeTensor.__module__)
        before, logger.disabled = logger.disabled, True
        try:
            with self._mode:
                yield
        finally:
            logger.disabled = before

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of this layout that says to be on the CPU; a parameter if this is one."""
        with self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def empty_on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the meta device; no fake, though this thread makes fakes of what it makes."""
    if not torch._C._len_torch_dispatch_stack():
        return torch.empty(shape, dtype=dtype, device="meta")
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.empty(shape, dtype=dtype, device="meta")


def is_fake(tensor: object) -> bool:
    """Whether a tensor has no values, though it says to be somewhere."""
    return isinstance(tensor, FakeTensor)
