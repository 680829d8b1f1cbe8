"""Values as layers hand them on: trees of tensors, and how these lie in memory.

Finds tensors inside of objects that torch's pytree takes for leaves, so that no boundary loses their gradients.

Kernels choose their arithmetic by strides and alignment of addresses, as by shape and dtype: on AMD processors the
last bit of MKL's small products depends on where operands lie modulo 64 bytes. So whatever is copied, sent,
received or moved keeps both, and all that does so does it by what is here. Fresh memory of torch lies at 0; that of
`bytearray` and `mmap` may lie anywhere.

Tensors of which each process has a shard, as `fully_shard` makes them, beside those that are whole in each.
"""

import gc
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gpipe._torch.autograd import PLAIN, negative_view
from gpipe._torch.trees import map_tensors, tree_leaves

Tree: TypeAlias = object  # a tensor, or tuples, lists and dicts of tensors and other values


def tensors_in(value: Tree) -> list[Tensor]:
    """The tensors in a value, each once, in order."""
    if type(value) is Tensor:
        return [value]
    return list({id(item): item for item in tree_leaves(value) if isinstance(item, Tensor)}.values())


def replace_tensors(value: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """The value with each tensor changed, a tensor that appears twice changed once."""
    if type(value) is Tensor:
        return change(value)
    known: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = change(tensor)
        return known[id(tensor)]

    return map_tensors(value, changed)


def version(tensor: Tensor | None) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


_VERSION = attrgetter("_version")


def versions(tensors: Collection[Tensor]) -> tuple[int, ...]:
    """The `version` of each."""
    return tuple(map(version if any(map(Tensor.is_inference, tensors)) else _VERSION, tensors))


OPAQUE = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, torch.dtype, torch.device)
"""What holds no tensor of its own, however far it leads."""
MOST = 100_000  # objects that are looked at

HIDDEN = (
    "a {name} holds tensors where torch cannot see them (torch.utils._pytree takes it for a single value), so they "
    "would not be cut, split or given gradients; use tensors, tuples, lists or dicts, or register the class with "
    "torch.utils._pytree.register_pytree_node, or turn off what puts it there (a cache: use_cache=False)"
)


def hides_tensors(item: object, kind: type[Tensor] = Tensor) -> bool:
    """Whether a tensor of a kind can be reached from an object: by attributes, slots, items and closures."""
    todo, seen = [item], {id(item)}
    while todo and len(seen) < MOST:
        found = todo.pop()
        if isinstance(found, kind):
            return True
        if isinstance(found, OPAQUE):
            continue
        if isinstance(found, FunctionType):  # but not the module that it stands in
            found = [found.__closure__, found.__defaults__, found.__kwdefaults__, found.__dict__]
        for inner in gc.get_referents(found):
            if id(inner) not in seen:
                seen.add(id(inner))
                todo.append(inner)
    return False


def refuse_hidden_tensors(value: object) -> None:
    """Refuses a value with leaves that hide tensors."""
    for leaf in () if type(value) is Tensor else tree_leaves(value):
        if not isinstance(leaf, (Tensor, *OPAQUE)) and hides_tensors(leaf):
            raise TypeError(HIDDEN.format(name=type(leaf).__name__))


UNITS, LARGEST_UNIT = {"cpu": 64, "meta": 1}, 512
"""Bytes by which torch aligns what it allocates, elsewhere the largest; nothing chooses by more of an address."""


def alignment(tensor: Tensor) -> int:
    """The address of a tensor modulo its device's unit; 0 where there is no address to look at."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return 0
    return tensor.data_ptr() % (64 if tensor.is_cpu else UNITS.get(tensor.device.type, LARGEST_UNIT))


def storage_address(tensor: Tensor) -> int:
    """Where the storage of a tensor begins, the same for all its views; 0 where there is none to share."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_meta:  # nor are lazy ones plain
        return 0
    return tensor.untyped_storage().data_ptr()


def allocate(
    dtype: torch.dtype, size: Sequence[int], strides: Sequence[int], aligned: int, device: torch.device
) -> Tensor:
    """Memory for a tensor that lies like this."""
    if not aligned:
        return torch.empty_strided(size, strides, dtype=dtype, device=device)
    reach = 1 + sum((count - 1) * stride for count, stride in zip(size, strides, strict=True))
    ahead, odd = divmod(aligned, dtype.itemsize)
    if not odd:
        whole = torch.empty(ahead + reach, dtype=dtype, device=device)
        return whole.as_strided(size, strides, ahead).detach()  # no view: autograd need not know the whole
    memory = torch.empty(aligned + reach * dtype.itemsize, dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(memory[aligned:], 0, size, strides)


def allocate_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Memory for another tensor that lies like this one, here or on another device of the kind."""
    return allocate(tensor.dtype, tensor.shape, tensor.stride(), alignment(tensor), device or tensor.device)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that lies like the tensor, in its graph if it has one."""
    if tensor.is_conj():
        return torch.conj(copy_of(torch.conj(tensor)))
    if tensor.is_neg():
        return negative_view(copy_of(negative_view(tensor)))
    return _lying_like(tensor, tensor.clone())


def moved(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """The tensor on a device: itself if it is there, else a copy.

    On a device of the same kind it lies like the tensor. On one of another kind it is what `Tensor.to` makes of it,
    as in everybody's own loop.
    """
    if tensor.device == device:
        return tensor
    copied = tensor.to(device, non_blocking=non_blocking)
    return copied if tensor.device.type != device.type else _lying_like(tensor, copied, non_blocking=non_blocking)


def _lying_like(tensor: Tensor, copied: Tensor, *, non_blocking: bool = False) -> Tensor:
    """A copy of a tensor, or another one if that lies otherwise; what is not plain elements copies itself."""
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or (tensor.stride() == copied.stride() and alignment(tensor) == alignment(copied)):
        return copied
    copied = allocate_like(tensor, copied.device)
    without_repeats(copied).copy_(without_repeats(tensor), non_blocking=non_blocking)
    return copied


def without_repeats(tensor: Tensor) -> Tensor:
    """A tensor without what is only repeated, into which torch does not write."""
    for axis, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def put_back(tensor: Tensor, before: Tensor) -> None:
    """Gives a tensor the values of a copy; not its version, since a later backward may have saved the tensor."""
    if tensor.layout is torch.strided and tensor.shape == before.shape:
        without_repeats(tensor.data).copy_(without_repeats(before))
    elif tensor.layout in COMPRESSED:  # Assigning to .data does not replace what they consist of.
        with torch.no_grad():
            if [part.shape for part in parts_of(tensor)] != [part.shape for part in parts_of(before)]:
                tensor.resize_as_sparse_(before)
            for part, value in zip(parts_of(tensor.data), parts_of(before), strict=True):
                part.copy_(value)
    else:
        tensor.data = before


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor, or the strided ones that a sparse one consists of."""
    match tensor.layout:
        case torch.sparse_coo:
            return tensor._indices(), tensor._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, put together if it is a DTensor; then the processes of its mesh all call it."""
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
