"""Reads checkpoint files, and writes them durably. Errors contain the path.

All operations call functions of `os`, so that tests can stop a process at any operation. A safetensors file consists
of three parts: the length of the header (8 bytes), the header (JSON with the dtype, shape and offset of each tensor),
and the bytes of the tensors.

This module does not write with the safetensors library. Its `save_file` cannot hash or sync a file during writing,
and its `serialize` needs a second copy of the weights in memory.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpipe._torch.modules import is_wrapper

PIECE = 2**24  # bytes hashed and written at once: small enough for the cache, and other threads can run in between

logger = logging.getLogger("gpipe")


class File(TypedDict):
    """The size and the hash of a file."""

    bytes: int
    sha256: str


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Yields the descriptor of a file or folder. Adds the path to errors of `os.write` and `os.fsync`."""
    try:
        descriptor = os.open(path, flags, 0o666)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_chunks(chunks: Iterable[bytes | memoryview], write: Callable[[memoryview], object]) -> File:
    """Writes all chunks in pieces of at most `PIECE` bytes. Returns the size and the hash of their bytes."""
    digest, size = hashlib.sha256(), 0
    for view in (memoryview(chunk).cast("B") for chunk in chunks):
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            digest.update(piece)
            size += len(piece)
            write(piece)
    return File(bytes=size, sha256=digest.hexdigest())


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> File:
    """Writes and syncs a new file. Returns the size and the hash of the file."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:

        def write(piece: memoryview) -> None:
            while piece:
                piece = piece[os.write(descriptor, piece) :]

        written = write_chunks(chunks, write)
        os.fsync(descriptor)
    return written


def put_file(path: Path, temporary: Path, content: bytes) -> None:
    """Writes or replaces a small file atomically. The caller must sync the folder."""
    write_file(temporary, [content])
    os.replace(temporary, path)


def sync_folder(path: Path) -> None:
    """Syncs a folder, so that new and renamed files in it are durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def make_folder(path: Path) -> None:
    """Creates a folder and its parents durably, unless they exist."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Removes a folder with its files. Logs a warning if files remain. Remaining files are harmless."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be removed. Delete it: it is no longer needed. [leftover-files]", path)


@contextmanager
def open_regular_file(path: Path, *, follow: bool = False) -> Iterator[tuple[BufferedReader, int]]:
    """Opens a file that may come from an untrusted source. Yields the file and its size.

    Raises:
        ValueError: If the path is missing or not a regular file. A symbolic link could point to any file, and reading
            a named pipe could block.
    """
    try:
        with opened(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("is not a file")
            with open(descriptor, "rb", closefd=False) as file:
                yield file, status.st_size
    except OSError as error:
        if error.errno not in FILE_ERRORS:
            raise
        raise ValueError(FILE_ERRORS[error.errno]) from error


FILE_ERRORS = {
    errno.ENOENT: "is missing",
    errno.ELOOP: "is a symbolic link. Replace it by the file itself",
    errno.ENXIO: "is not a file",
}


def read_small_file(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """Reads a file of at most `limit` bytes.

    Raises:
        ValueError: If the file is larger than `limit`, is missing, or is not a regular file.
    """
    with open_regular_file(path, follow=follow) as (file, size):
        if size > limit:
            raise ValueError(f"has {size} bytes, but at most {limit} are allowed")
        return file.read(size)


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def why_not_storable(tensor: Tensor) -> str | None:
    """Returns the reason why a tensor cannot be stored in a file, or None if it can be stored."""
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet. Run a step first"
    if tensor.is_meta:
        return "is on the meta device and has no values. Initialize the layer first"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is {str(tensor.layout).removeprefix('torch.')} or quantized. Convert it to a plain dense tensor"
    if tensor.dtype not in DTYPE_NAMES:
        return f"is of {tensor.dtype}, which safetensors does not support. Convert it"
    if is_wrapper(tensor) and not hasattr(tensor, "full_tensor"):
        return f"is a {type(tensor).__name__}, not a plain tensor. Convert it"
    return None


def encode_file(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the content of a safetensors file. Larger dtypes come first, so that all tensors are aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        plain = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.numel():
            yield plain.reshape(-1).view(torch.uint8).numpy().data


class TensorFiles:
    """Provides the tensors of several safetensors files by name, and reads each tensor on access."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.findings: list[str] = []
        self.file_of: dict[str, str] = {}  # the file name of each tensor
        self._open: dict[str, safe_open] = {}
        for path in paths:
            try:
                with open_regular_file(path, follow=True) as (file, _):  # safetensors opens any kind of file, twice,
                    os.close(os.dup(file.fileno()))  # and reports it as missing without permission.
                opened = self._open[path.name] = safe_open(path, framework="pt")
                self.file_of |= dict.fromkeys(opened.keys(), path.name)  # type: ignore[no-untyped-call]  # untyped in safetensors
            except SafetensorError as error:
                self.findings.append(f"{path.name} is not a valid safetensors file: {error}.")
            except ValueError as error:
                self.findings.append(f"{path.name} {error}.")

    def map(self, name: str) -> Tensor:
        """Returns a tensor that is memory-mapped from its file, without reading its values."""
        mapped: Tensor = self._open[self.file_of[name]].get_tensor(name)  # type: ignore[no-untyped-call]  # untyped in safetensors
        return mapped

    def read(self, name: str) -> Tensor:
        """Returns a copy of a tensor in memory."""
        return self.map(name).clone()
