"""Memory of the host for tensors that a device or a CPU rank does not need at the moment.

On a CPU, this is a temporary file without a name, mapped into memory. The file does not count as memory of the
process, and the operating system can evict its pages. For an accelerator, it is pinned memory.
"""

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
give_back: Callable[[int], object] = getattr(LIBC, "malloc_trim", int)
"""Returns free memory of glibc to the operating system. Does nothing with other allocators."""
DONTNEED = 4
"""The `madvise` option to unmap pages. The contents stay in the file."""


def is_in_file(tensor: Tensor) -> bool:
    """Whether a tensor is in a file that is mapped into memory."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.untyped_storage().filename is not None


def in_file(tensor: Tensor, address: int = 0) -> Tensor:
    """Copies a tensor of the CPU to a new file. `address` is the address of the copy modulo the page size."""
    return allocate_in_file(tensor, address).copy_(tensor)


def allocate_in_file(like: Tensor, address: int = 0) -> Tensor:
    """Creates a tensor in a temporary file without a name, with the dtype, shape and memory format of `like`."""
    size = address + like.nbytes
    with tempfile.NamedTemporaryFile() as file, room_for(size):
        if hasattr(os, "posix_fallocate"):  # Otherwise writing to the mapping on a full disk kills the process.
            os.posix_fallocate(file.fileno(), 0, size)
        storage = UntypedStorage.from_file(file.name, True, size)
    assert isinstance(storage, UntypedStorage)
    strides = torch.empty_like(like, device="meta").stride()  # the densest strides for this layout
    return like.new_empty(0).set_(storage, address // like.itemsize, like.shape, strides)


def release_pages(tensor: Tensor | None) -> None:
    """Lets the operating system use the memory of a tensor in a file. Its contents stay in the file."""
    if tensor is not None and is_in_file(tensor):
        storage = tensor.untyped_storage()
        LIBC.madvise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), DONTNEED)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Adds a note to an OSError raised inside the context, with the number of bytes, the folder, and a fix."""
    try:
        yield
    except OSError as error:
        remedy = "Set TMPDIR to a folder on a disk with enough space."
        if error.errno == errno.EMFILE:
            remedy = "Each micro-batch in flight has an open file. Raise the limit with `ulimit -n`."
        error.add_note(f"TMPDIR: {size:,} bytes could not be written to {tempfile.gettempdir()}. {remedy}")
        raise
