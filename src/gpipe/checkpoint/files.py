"""Files of checkpoints: durable operations, each of which says where it failed, and tensors as safetensors files.

They call functions of `os` and nothing else, so that a test can stop a process at any one of them. A safetensors file
is the length of a header (8 bytes), the header (JSON: type, shape and place of each tensor), and the bytes.
The library's `save_file` opens and writes by itself: nobody could hash or sync on the way, or stop it between two
writes; its `serialize` is a second copy of the weights in memory. So the header is made here, and the bytes of each
tensor in turn are handed to `write_file`.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpipe._torch.modules import is_wrapper

PIECE = 2**24  # bytes hashed and written at once: they stay in the cache, and other threads run meanwhile

logger = logging.getLogger("gpipe")


class File(TypedDict):
    """The content of a file, as far as one can tell it from another."""

    bytes: int
    sha256: str


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of a file or folder; an OSError names the path, as those of `os.write` and `os.fsync` do not."""
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


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> File:
    """Writes a new file, durably."""
    digest, size = hashlib.sha256(), 0
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                digest.update(piece)
                size += len(piece)
                while piece:
                    piece = piece[os.write(descriptor, piece) :]
        os.fsync(descriptor)
    return File(bytes=size, sha256=digest.hexdigest())


def put_file(path: Path, temporary: Path, content: bytes) -> None:
    """Writes a small file, or puts it in place of another, at one moment; its folder is still to be synced."""
    write_file(temporary, [content])
    os.replace(temporary, path)


def sync_folder(path: Path) -> None:
    """Makes durable which names a folder holds."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder that may be there already, with those above it, durably."""
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
    """Removes a folder with all in it, as far as that goes; what stays is no harm, and is logged."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be removed; it is not needed any more", path)


@contextmanager
def reading(path: Path, *, follow: bool = False) -> Iterator[tuple[BufferedReader, int]]:
    """Opens a file that somebody else may have put there, and says its size.

    A ValueError: it is missing, or no file of its own: a link might lead anywhere, and a pipe would block.
    """
    try:
        with opened(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)) as descriptor:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("is not a file")
            with open(descriptor, "rb", closefd=False) as file:
                yield file, found.st_size
    except OSError as error:
        if error.errno not in WHY_NO_FILE:
            raise
        raise ValueError(WHY_NO_FILE[error.errno]) from error


WHY_NO_FILE = {
    errno.ENOENT: "is missing",
    errno.ELOOP: "is a symbolic link; put the file itself there",
    errno.ENXIO: "is not a file",
}


def read_small(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Reads a file that is small if it is what it should be; a ValueError says what is wrong."""
    with reading(path, follow=follow) as (file, size):
        if size > most:
            raise ValueError(f"has {size} bytes, and {most} are the most that it can have")
        return file.read(size)


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def why_not_storable(tensor: Tensor) -> str | None:
    """Why a tensor cannot be put into a file, if so."""
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet; run a step first"
    if tensor.is_meta:
        return "is on the meta device and has no values; build the layer for real first"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is {str(tensor.layout).removeprefix('torch.')} or quantized; only plain dense tensors can be stored"
    if tensor.dtype not in DTYPE_NAMES:
        return f"is of {tensor.dtype}, which safetensors has no name for; convert it"
    if is_wrapper(tensor) and not hasattr(tensor, "full_tensor"):
        return f"is a {type(tensor).__name__}, which is no plain tensor; convert it"
    return None


def encoded(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in pieces; widest types first, so that each tensor is aligned."""
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


class Shelf:
    """The tensors of some files, found by name; values are read when asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.findings: list[str] = []
        self.home: dict[str, str] = {}  # the file of each tensor
        self._open: dict[str, safe_open] = {}
        for path in paths:
            try:
                with reading(path, follow=True) as (file, _):  # safetensors opens whatever is there, twice,
                    os.close(os.dup(file.fileno()))  # and calls it missing if it may not
                opened = self._open[path.name] = safe_open(path, framework="pt")
                self.home |= dict.fromkeys(opened.keys(), path.name)  # type: ignore[no-untyped-call]  # untyped in safetensors
            except SafetensorError as error:
                self.findings.append(f"{path.name} is no safetensors file: {error}")
            except ValueError as error:
                self.findings.append(f"{path.name} {error}")

    def look(self, name: str) -> Tensor:
        """A tensor as it lies in its file: nothing of it is read yet."""
        mapped: Tensor = self._open[self.home[name]].get_tensor(name)  # type: ignore[no-untyped-call]  # untyped in safetensors
        return mapped

    def read(self, name: str) -> Tensor:
        return self.look(name).clone()
