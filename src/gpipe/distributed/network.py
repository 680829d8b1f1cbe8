"""Where the other hosts reach this process: by which of its interfaces, and at which ports.

`GPIPE_INTERFACE` names the interface, or else `GLOO_SOCKET_IFNAME`; without either it is the one by which this host
reaches the first, `MASTER_ADDR`. `GPIPE_PORTS`, as `5000-5100`, are those that a firewall leaves open.
"""

import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

INTERFACES = ("GPIPE_INTERFACE", "GLOO_SOCKET_IFNAME")
PORTS = "GPIPE_PORTS"
SIOCGIFADDR = 0x8915  # Linux's question for the address of an interface
IPV6 = Path("/proc/thread-self/net/if_inet6")


def own_host() -> str:
    """The address of this host by which the others of the world reach it."""
    first, here = os.environ.get("MASTER_ADDR", ""), dict(interfaces())
    for name in INTERFACES:
        if named := os.environ.get(name):
            found = [address for one in named.split(",") for address in here.get(one, [])]
            if found:
                return min(found, key=lambda address: (":" in address) != (":" in first))  # of the first's kind
            raise ValueError(_refusal(f"{name}={named} is no interface by which they reach this one", here))
    if not first:
        raise ValueError(_refusal("MASTER_ADDR is not set, which would tell this one how it is reached", here))
    try:
        ways = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ValueError(_refusal(f"this one finds no address of MASTER_ADDR={first} ({error})", here)) from error
    own = [address for kind, _, _, _, target in ways if (address := _own_end(kind, target))]
    if found := [address for address in own if _is_reached(address)]:
        return found[0]
    known = ", ".join(sorted({str(target[0]) for *_, target in ways}))
    if not own:
        raise ValueError(_refusal(f"this one knows no way to MASTER_ADDR={first} ({known})", here))
    if first == known:
        raise ValueError(_refusal(f"MASTER_ADDR={first} is the loopback address, on each host its own", here))
    raise ValueError(
        _refusal(
            f"this one takes MASTER_ADDR={first} for itself ({known}), as a line of /etc/hosts may say of localhost "
            f"and of a host's own name",
            here,
        )
    )


def interfaces() -> Iterator[tuple[str, list[str]]]:
    """The interfaces of this host, as far as Linux tells, each with the addresses by which other hosts reach it."""
    for name, found in _addresses():
        if usable := [address for address in found if _is_reached(address)]:
            yield name, usable


def interface_of(address: str) -> str | None:
    """The interface by which an address is reached; gloo takes that of the host's name, which is often another."""
    kind, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    own = _own_end(kind, target).partition("%")[0]
    return next((name for name, found in _addresses() if own in found), None)


def _addresses() -> Iterator[tuple[str, list[str]]]:
    lines = [line.split() for line in IPV6.read_text().splitlines()] if IPV6.exists() else []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            found = [str(ip_address(bytes.fromhex(line[0]))) for line in lines if line[5] == name]
            with suppress(OSError):  # it has none, or this is not Linux
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.insert(0, socket.inet_ntoa(answer[20:24]))
            yield name, found


def _own_end(kind: int, target: tuple[Any, ...]) -> str:
    with socket.socket(kind, socket.SOCK_DGRAM) as probe, suppress(OSError):  # there is no way
        probe.connect(target)  # sends nothing, but chooses the way
        return str(probe.getsockname()[0])
    return ""


def _is_reached(address: str) -> bool:
    """Whether other hosts can reach this address: one of IPv6 that holds for a link alone means nothing to them."""
    parsed = ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_unspecified or (parsed.version == 6 and parsed.is_link_local))


def _refusal(why: str, here: dict[str, list[str]]) -> str:
    has = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in here.items()) or "none"
    return (
        f"the processes are on several hosts, and {why}. Give torchrun the first host's address in their network, "
        f"--rdzv-endpoint=ADDRESS:PORT, or set GPIPE_INTERFACE to the interface in it on each host; this one, "
        f"{socket.gethostname()}, has {has}"
    )


def listen(host: str) -> socket.socket:
    """Listens at an address of this host, at the first of its ports that is free."""
    given = os.environ.get(PORTS, "")
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", given)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if given and not 0 < low <= high < 2**16:
        raise ValueError(f"{PORTS}={given} are no ports: give a range as 5000-5100, within 1-65535")
    for port in range(low, high + 1):
        try:
            return socket.create_server((host, port), family=family(host), backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ValueError(
        f"all ports of {PORTS}={given} are taken at {host}: give as many as there are processes on a host, and more "
        f"where several pipes are made at once"
    )


def family(host: str) -> int:
    """Of which kind an address is."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
