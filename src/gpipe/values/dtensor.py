"""Tensors of which each process has a shard, as `fully_shard` makes them, beside those that are whole in each."""

from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, put together if it is a DTensor; then the processes of its mesh all call it.

    >>> import torch
    >>> whole(torch.ones(2))
    tensor([1., 1.])
    """
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: all, or its shard of a DTensor."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def is_spread_over(tensor: Tensor, dimension: str) -> bool:
    """Whether a tensor is a DTensor over this dimension of a mesh."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and dimension in (mesh.mesh_dim_names or ())


def spread_like(tensor: Tensor, target: Tensor) -> Tensor:
    """This process's shard of a tensor that every process has, spread over a mesh as another is."""
    from torch.distributed.tensor import distribute_tensor  # which takes long to load

    return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)  # type: ignore[attr-defined]  # a DTensor then


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was told of a module: it puts other parameters in their places while layers run."""
    return hasattr(type(module), "set_gradient_divide_factor")
