"""Which ports processes listen on, read from /proc, as `ss -ltnp` would show them."""

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from tests.support.progress import all_stats

LISTEN = "0A"


class Listening(NamedTuple):
    pid: int
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        address = ip_address(self.address)
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return (mapped or address).is_loopback


def listening_sockets(pids: Iterable[int]) -> list[Listening]:
    """The listening sockets of processes, which must be the caller's to look into; those that are gone have none."""
    found = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            held = set(_sockets_held(pid))
            tables = [path for name in ("tcp", "tcp6") if (path := Path(f"/proc/{pid}/net/{name}")).exists()]
            rows = [row for table in tables for row in _rows(table.read_text())]
            found += [Listening(pid, address, port) for inode, address, port in rows if inode in held]
    return sorted(found)


def family(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for process, words in all_stats().items():  # not every kernel lists children
        children.setdefault(int(words[1]), []).append(process)
    found = [pid]
    for one in found:
        found += sorted(children.get(one, []))
    return found


def _sockets_held(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                yield target.removeprefix("socket:[").removesuffix("]")


def _rows(table: str) -> Iterator[tuple[str, str, int]]:
    """Inode, address and port of what listens."""
    for line in table.splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == LISTEN:
            address, _, port = local.partition(":")
            yield inode, _address(address), int(port, 16)


def _address(text: str) -> str:
    """The kernel writes 32 bits at a time, as the machine holds them."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return str(IPv4Address(packed) if len(words) == 1 else IPv6Address(packed))
