"""The operations on files, durable, each of which says where it failed.

They call functions of `os` and nothing else, so that a test can stop a process at any one of them.
"""

import errno
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

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
