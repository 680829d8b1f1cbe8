"""Reads and writes checkpoint files in folders and at URLs. fsspec opens the URLs.

A folder on a local or shared file system is a `Path`, and an address such as `s3://bucket/run` is a `Url`.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PosixPath
from typing import Any

from gpipe.checkpoint import files
from gpipe.checkpoint.files import PIECE, File, make_folder, put_file, read_small_file, remove_folder, sync_folder

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)


class Url(PosixPath):
    """An address that fsspec opens. Only the operations on names are available, such as `/`, `name` and `parent`.

    >>> str(Url("s3://bucket/run") / "step_2")
    's3://bucket/run/step_2'
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    __fspath__ = __str__


def to_place(folder: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a folder, or the `Url` of an address. `file://` is the address of a folder."""
    text = os.fspath(folder)
    matched = SCHEME.fullmatch(text)
    if matched is None or matched[1].lower() in ("file", "local"):
        return Path(os.path.abspath(matched[2] if matched else text))
    return Url(text)


def _open_url(path: Path) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path of the URL in this file system."""
    try:
        from fsspec.core import url_to_fs

        system, inside = url_to_fs(str(path))
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"folder: {path} cannot be opened: {error}. Install the fsspec package of this scheme."
        ) from error
    system.invalidate_cache()  # Other processes write, too.
    return system, inside


def sizes_in(path: Path) -> dict[str, int]:
    """Returns the size of each file in a folder, and -1 for anything else. Without a folder, the result is empty."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if isinstance(path, Url):
            system, root = _open_url(path)
            entries = {entry["name"].rstrip("/"): entry["size"] for entry in system.ls(root, detail=True)}
            return {name.rpartition("/")[2]: size or 0 for name, size in entries.items() if name != root.rstrip("/")}
        with os.scandir(path) as entries_here:
            return {entry.name: _size(entry) for entry in entries_here}
    return {}


def _size(entry: "os.DirEntry[str]") -> int:
    return entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else -1


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> File:
    """Writes a new file, and syncs it if it is local. Returns the size and the hash of the file."""
    if not isinstance(path, Url):
        return files.write_file(path, chunks)
    system, name = _open_url(path)
    system.makedirs(os.path.dirname(name), exist_ok=True)
    with system.open(name, "wb") as file:
        return files.write_chunks(chunks, file.write)


def commit_file(path: Path, content: bytes) -> None:
    """Writes a small file atomically, after all earlier files of its folder are durable."""
    temporary = path.with_name(f"{path.name}.tmp")
    if isinstance(path, Url):
        system, name = _open_url(path)
        system.pipe_file(name + ".tmp", content)
        system.mv(name + ".tmp", name)
        return
    sync_folder(path.parent)
    put_file(path, temporary, content)
    sync_folder(path.parent)


def create_folder(path: Path) -> None:
    """Creates a local folder and its parents durably. URLs have no folders."""
    if not isinstance(path, Url):
        make_folder(path)


def remove_files(path: Path, names: Iterable[str]) -> None:
    """Removes files of a folder that may exist, and the folder if it is empty. Ignores errors."""
    system, root = _open_url(path) if isinstance(path, Url) else (None, str(path))
    for name in names:
        with suppress(OSError):
            os.unlink(path / name) if system is None else system.rm_file(f"{root}/{name}")
    with suppress(OSError):
        os.rmdir(path) if system is None else system.rmdir(root)


def remove(path: Path, temporary: Path) -> None:
    """Removes a folder with its files.

    Args:
        path: The folder.
        temporary: A new name for a local folder, because a folder that is partly removed must not have a final name.
    """
    if isinstance(path, Url):
        system, root = _open_url(path)
        for name in system.glob(f"{root}/part_*.json"):  # Without these files, it is not a checkpoint.
            system.rm_file(name)
        system.rm(root, recursive=True)
    else:
        os.rename(path, temporary)
        remove_folder(temporary)


def read_bytes(path: Path, limit: int) -> bytes:
    """Reads a file of at most `limit` bytes. Raises a ValueError if it is larger, missing, or not a regular file."""
    if not isinstance(path, Url):
        return read_small_file(path, limit)
    system, name = _open_url(path)
    try:
        content: bytes = system.cat_file(name, start=0, end=limit + 1)
    except FileNotFoundError:
        raise ValueError("is missing") from None
    if len(content) > limit:
        raise ValueError(f"has more than {limit} bytes")
    return content


def read_pieces(path: Path) -> Iterator[bytes]:
    """Yields the content of a file. Local files must be regular files."""
    if isinstance(path, Url):
        system, name = _open_url(path)
        for start in range(0, system.size(name), PIECE):
            yield system.cat_file(name, start=start, end=start + PIECE)
        return
    with files.open_regular_file(path) as (file, _):
        while piece := file.read(PIECE):
            yield piece
