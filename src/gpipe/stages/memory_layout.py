"""Copies, moves and restores tensors with their memory layout: strides and alignment.

Kernels choose their arithmetic by strides and address alignment, as well as by shape and dtype. For example, on AMD
processors the last bit of MKL's small matrix products depends on the operands' addresses modulo 64 bytes. Bitwise
identical results therefore require that each copied, sent, received or moved tensor keeps its strides and alignment.

Memory that torch allocates has alignment 0. The memory of a `bytearray` or an `mmap` can have any alignment.
"""

from collections.abc import Collection, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from gpipe._torch.autograd import PLAIN, negative_view


def version(tensor: Tensor | None) -> int:
    """Returns torch's count of in-place changes of a tensor, or 0 for None and for inference tensors."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


_VERSION = attrgetter("_version")


def versions(tensors: Collection[Tensor]) -> tuple[int, ...]:
    """Returns the `version` of each tensor."""
    try:
        return tuple(map(_VERSION, tensors))
    except RuntimeError:  # An inference tensor has no version.
        return tuple(map(version, tensors))


UNITS, LARGEST_UNIT = {"cpu": 64, "meta": 1}, 512
"""Alignment in bytes of memory that torch allocates, by device type. Other types have `LARGEST_UNIT`.

No kernel depends on an address modulo a larger number.
"""


def alignment(tensor: Tensor) -> int:
    """Returns the address of a tensor modulo its device's unit, or 0 for a tensor without plain strided memory."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return 0
    return tensor.data_ptr() % (64 if tensor.is_cpu else UNITS.get(tensor.device.type, LARGEST_UNIT))


def storage_address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage, which its views share. Returns 0 if it has no plain memory."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_meta:  # Lazy ones are not PLAIN.
        return 0
    return tensor.untyped_storage().data_ptr()


def allocate(
    dtype: torch.dtype, size: Sequence[int], strides: Sequence[int], aligned: int, device: torch.device
) -> Tensor:
    """Allocates a tensor with the given strides. Its address modulo the device's unit is `aligned`."""
    if not aligned:
        return torch.empty_strided(size, strides, dtype=dtype, device=device)
    extent = 1 + sum((count - 1) * stride for count, stride in zip(size, strides, strict=True))
    offset, remainder = divmod(aligned, dtype.itemsize)
    if not remainder:
        padded = torch.empty(offset + extent, dtype=dtype, device=device)
        return padded.as_strided(size, strides, offset).detach()  # Autograd must not treat it as a view of `padded`.
    memory = torch.empty(aligned + extent * dtype.itemsize, dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(memory[aligned:], 0, size, strides)


def allocate_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Allocates a tensor with the memory layout of `tensor`, by default on the same device.

    Args:
        tensor: The tensor whose dtype, shape, strides and alignment to use.
        device: The device of the new tensor, of the same type as the device of `tensor`.
    """
    return allocate(tensor.dtype, tensor.shape, tensor.stride(), alignment(tensor), device or tensor.device)


def copy_of(tensor: Tensor) -> Tensor:
    """Clones a tensor with its strides and alignment. Like `Tensor.clone`, the copy is part of the autograd graph."""
    if tensor.is_conj():
        return torch.conj(copy_of(torch.conj(tensor)))
    if tensor.is_neg():
        return negative_view(copy_of(negative_view(tensor)))
    return _with_layout_of(tensor, tensor.clone())


def moved(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """Returns the tensor if it is already on the device, else a copy on the device.

    The copy has the tensor's layout if both devices have the same type. Otherwise the copy is the result of
    `Tensor.to`, as in a loop without a pipeline.
    """
    if tensor.device == device:
        return tensor
    copied = tensor.to(device, non_blocking=non_blocking)
    return copied if tensor.device.type != device.type else _with_layout_of(tensor, copied, non_blocking=non_blocking)


def _with_layout_of(tensor: Tensor, copied: Tensor, *, non_blocking: bool = False) -> Tensor:
    """Returns `copied` if it has the layout of `tensor`, else a new copy with this layout.

    Tensors without plain strided elements are not copied again: their own `clone` or `to` determines the layout.
    """
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or (tensor.stride() == copied.stride() and alignment(tensor) == alignment(copied)):
        return copied
    copied = allocate_like(tensor, copied.device)
    unexpanded(copied).copy_(unexpanded(tensor), non_blocking=non_blocking)
    return copied


def unexpanded(tensor: Tensor) -> Tensor:
    """Returns a view with size 1 in each expanded dimension. Torch does not write to expanded tensors."""
    for axis, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def restore_values(tensor: Tensor, saved: Tensor) -> None:
    """Writes the values of a saved copy into a tensor without increasing its version.

    If autograd has saved the tensor for a later backward, a new version would make this backward fail.
    """
    if tensor.layout is torch.strided and tensor.shape == saved.shape:
        unexpanded(tensor.data).copy_(unexpanded(saved))
    elif tensor.layout in COMPRESSED:  # Assigning to .data does not replace their index and value tensors.
        with torch.no_grad():
            if [part.shape for part in strided_parts(tensor)] != [part.shape for part in strided_parts(saved)]:
                tensor.resize_as_sparse_(saved)
            for part, value in zip(strided_parts(tensor.data), strided_parts(saved), strict=True):
                part.copy_(value)
    else:
        tensor.data = saved


def strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns a strided tensor itself, or the index and value tensors of a sparse tensor."""
    match tensor.layout:
        case torch.sparse_coo:
            return tensor._indices(), tensor._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
