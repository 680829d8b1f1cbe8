"""Files of checkpoints: durable operations, each of which says where it failed, and tensors as safetensors files.

They call functions of `os` and nothing else, so that a test can stop a process at any one of them.

The format of safetensors: the length of a header (8 bytes), the header (JSON: type, shape and place of each tensor),
the bytes. The library reads it.

Note "By hand". The library's `save_file` opens and writes by itself: the file would have to be read again for its
hash, nobody could sync it, a full disk would be a SafetensorError and no OSError, and no test could stop a process
between two writes. Its `serialize` gives all bytes at once, a second copy of the weights in memory. What is here is a
header and the bytes of each tensor in turn, for `write_file`, which hashes, writes and syncs them.
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
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpipe._torch.modules import is_wrapper

PIECE = 2**24  # bytes hashed and written at once: they stay in the cache, and other threads run meanwhile
AT_ONCE = 2**20  # bytes of a small file: a read has memory for all that it asks for

logger = logging.getLogger("gpipe")


@dataclass(frozen=True, slots=True)
class File:
    """The content of a file, as far as one can tell it from another."""

    bytes: int
    sha256: str


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has an OSError name the path, as those of `os.write` and `os.fsync` do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> File:
    """Writes a new file, durably."""
    digest, size = hashlib.sha256(), 0
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for chunk in chunks:
                for piece in _pieces(memoryview(chunk).cast("B")):
                    digest.update(piece)
                    size += _write_all(descriptor, piece)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return File(size, digest.hexdigest())


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), PIECE):
        yield view[start : start + PIECE]


def _write_all(descriptor: int, piece: memoryview) -> int:
    done = 0
    while done < len(piece):
        done += os.write(descriptor, piece[done:])
    return done


def put_file(path: Path, temporary: Path, content: bytes) -> None:
    """Writes a small file, or puts it in place of another, at one moment; its folder is still to be synced."""
    write_file(temporary, [content])
    os.replace(temporary, path)


def sync_folder(path: Path) -> None:
    """Makes durable which names a folder holds."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


def why_not_plain(path: Path) -> str | None:
    """Why something is no file of its own, if so: a link might lead anywhere, and a pipe would block."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return "is missing"
    if stat.S_ISLNK(mode):
        return "is a symbolic link; put the file itself there"
    return None if stat.S_ISREG(mode) else "is not a file"


@contextmanager
def opened(path: Path, *, follow: bool = False) -> Iterator[FileIO]:
    """Opens a file that somebody else may have put there, to read it: it waits for nobody, whatever that is.

    Raises:
        ValueError: It is no file of its own; says what it is.
        OSError: It cannot be read.
    """
    with naming(path):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise ValueError(why_not_plain(path) or "is not a file") from error
            raise
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise ValueError("is not a file")
        with open(handle, "rb", buffering=0) as file:
            yield file


def size_of(path: Path) -> int:
    """The size of a plain file, for what it says itself."""
    return path.lstat().st_size


def read_small(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Reads a file that is small if it is what it should be.

    Raises:
        ValueError: It is larger, or no file; says what is wrong.
    """
    with opened(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"has {size} bytes, and {most} are the most that it can have")
        data = bytearray()
        while len(data) <= most and (piece := file.read(min(most + 1 - len(data), AT_ONCE))):
            data += piece
        return bytes(data)


def hash_file(path: Path) -> File:
    """Reads a file through."""
    with opened(path) as file, naming(path):
        return File(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
LONGEST_HEADER = 10**8  # bytes, as safetensors itself has it
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
        if tensors[name].numel():
            yield _bytes_of(tensors[name])


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


class Shelf:
    """The tensors of some files, found by name; values are read when asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.findings: list[str] = []
        self.home: dict[str, str] = {}  # the file of each tensor
        self._open: dict[str, safe_open] = {}
        for path in paths:
            if wrong := self._why_unreadable(path):
                self.findings.append(f"{path.name} {wrong}")
                continue
            try:
                opened = self._open[path.name] = safe_open(path, framework="pt")
                names: list[str] = list(opened.keys())  # type: ignore[no-untyped-call]  # untyped in safetensors
            except (SafetensorError, OSError, RuntimeError) as error:
                self.findings.append(f"{path.name} is no safetensors file: {error}")
                continue
            for name in names:
                other = self.home.setdefault(name, path.name)
                if other != path.name:
                    self.findings.append(f"{path.name} and {other} both hold {name!r}; they are of different runs")

    @staticmethod
    def _why_unreadable(path: Path) -> str | None:
        """What is wrong with a file, if it cannot be opened without harm: safetensors opens whatever is there."""
        try:
            with opened(path, follow=True) as file:
                size, head = os.fstat(file.fileno()).st_size, file.read(8)
        except (ValueError, OSError) as error:
            return str(error)
        if len(head) < 8 or struct.unpack("<Q", head)[0] > min(size - 8, LONGEST_HEADER):
            return "is no safetensors file: its header would be larger than the file, or than any"
        return None

    def look(self, name: str) -> Tensor:
        """A tensor as it lies in its file: nothing of it is read yet."""
        mapped: Tensor = self._open[self.home[name]].get_tensor(name)  # type: ignore[no-untyped-call]  # untyped in safetensors
        return mapped

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        return self.look(name).clone()
