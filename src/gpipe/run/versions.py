"""How often tensors were changed in place."""

from torch import Tensor


def version(tensor: Tensor | None) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
