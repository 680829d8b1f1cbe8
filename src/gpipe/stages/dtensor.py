"""Handles tensors that may be DTensors, which `fully_shard` spreads over the processes of a device mesh."""

from collections.abc import Iterable

from torch import Tensor, nn


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor. For a DTensor, this is a collective call of all processes in its mesh."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this process's shard of a DTensor. Returns any other tensor unchanged."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def is_distributed_over(tensor: Tensor, dimension: str) -> bool:
    """Whether a tensor is a DTensor on a mesh with this dimension."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and dimension in (mesh.mesh_dim_names or ())


def distribute_like(tensor: Tensor, target: Tensor) -> Tensor:
    """Distributes `tensor`, which every process holds, over the mesh of `target`, with the placements of `target`."""
    from torch.distributed.tensor import distribute_tensor  # This import is slow.

    return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)  # type: ignore[attr-defined]  # a DTensor


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module. `fully_shard` replaces its parameters in forwards."""
    return hasattr(type(module), "set_gradient_divide_factor")


def any_sharded(modules: Iterable[nn.Module]) -> bool:
    """Returns whether `fully_shard` was applied to any of these modules. `fully_shard` changes their classes."""
    return any(map(is_sharded, {type(module): module for module in modules}.values()))
