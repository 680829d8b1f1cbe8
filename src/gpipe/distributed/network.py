"""Finds the address and the port at which other hosts can reach this process.

- The interface is the first in this list that exists:
  1. `GPIPE_INTERFACE`,
  2. `GLOO_SOCKET_IFNAME`,
  3. the interface of the route to the first host, which is `MASTER_ADDR`, or the host of
     `init_process_group(init_method="tcp://...")`,
  4. the only interface of this host.
- `GPIPE_PORTS` is the range of ports that a firewall leaves open, for example `5000-5100`. Default: any free port.
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

from gpipe._torch.modules import store_host

INTERFACES = ("GPIPE_INTERFACE", "GLOO_SOCKET_IFNAME")
PORTS = "GPIPE_PORTS"
SIOCGIFADDR = 0x8915  # Linux's ioctl that returns the IPv4 address of an interface
IPV6 = Path("/proc/thread-self/net/if_inet6")


def own_host() -> str:
    """Returns the address at which the other hosts of the process group reach this host.

    Raises:
        ValueError: If this host has no such address.
    """
    variable, here = os.environ.get("MASTER_ADDR", ""), dict(interfaces())
    first, name_of_first = variable or store_host(), "MASTER_ADDR" if variable else "init_method"
    for name in INTERFACES:
        if named := os.environ.get(name):
            addresses = [address for interface in named.split(",") for address in here.get(interface, [])]
            if addresses:
                return min(addresses, key=lambda address: (":" in address) != (":" in first))  # IPv6 if `first` is
            raise ValueError(_no_address(f"{name}={named} is not an interface that other hosts can reach", here))
    if not first and len(here) == 1:
        return next(iter(here.values()))[0]
    if not first:
        raise ValueError(_no_address("MASTER_ADDR is not set, and it does not have exactly one interface", here))
    try:
        targets = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ValueError(_no_address(f"{name_of_first}={first} cannot be resolved ({error})", here)) from error
    own = [address for kind, _, _, _, target in targets if (address := _source_address(kind, target))]
    if reachable := [address for address in own if _is_reachable(address)]:
        return reachable[0]
    resolved = ", ".join(sorted({str(target[0]) for *_, target in targets}))
    if not own:
        raise ValueError(_no_address(f"it has no route to {name_of_first}={first} ({resolved})", here))
    if first == resolved:
        raise ValueError(_no_address(f"{name_of_first}={first} is the loopback address", here))
    raise ValueError(
        _no_address(f"{name_of_first}={first} resolves to this host itself ({resolved}), perhaps by /etc/hosts", here)
    )


def interfaces() -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the addresses of each interface that other hosts can reach. Complete only on Linux."""
    for name, addresses in _addresses():
        if reachable := [address for address in addresses if _is_reachable(address)]:
            yield name, reachable


def interface_of(address: str) -> str | None:
    """Returns the interface of the route to an address, or None without a route.

    The default of gloo is different. gloo uses the interface of the host name.
    """
    kind, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    own = _source_address(kind, target).partition("%")[0]
    return next((name for name, addresses in _addresses() if own in addresses), None)


def _addresses() -> Iterator[tuple[str, list[str]]]:
    lines = [line.split() for line in IPV6.read_text().splitlines()] if IPV6.exists() else []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            addresses = [str(ip_address(bytes.fromhex(line[0]))) for line in lines if line[5] == name]
            with suppress(OSError):  # it has no IPv4 address, or this is not Linux
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                addresses.insert(0, socket.inet_ntoa(answer[20:24]))
            yield name, addresses


def _source_address(kind: int, target: tuple[Any, ...]) -> str:
    with socket.socket(kind, socket.SOCK_DGRAM) as probe, suppress(OSError):  # there is no route
        probe.connect(target)  # sends nothing, but selects the route
        return str(probe.getsockname()[0])
    return ""


def _is_reachable(address: str) -> bool:
    """Returns whether other hosts can reach this address. Link-local IPv6 addresses cannot be routed."""
    parsed = ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_unspecified or (parsed.version == 6 and parsed.is_link_local))


def _no_address(why: str, here: dict[str, list[str]]) -> str:
    interfaces = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in here.items()) or "none"
    return (
        f"Host {socket.gethostname()} finds no address at which the other hosts reach it: {why}. Set GPIPE_INTERFACE "
        f"on each host to one of its interfaces (here: {interfaces}), or pass the address of the first host to "
        f"torchrun, --rdzv-endpoint=ADDRESS:PORT. [no-host-address]"
    )


def listen(host: str) -> socket.socket:
    """Listens at an address of this host, at the first free port of `GPIPE_PORTS`.

    Raises:
        ValueError: If `GPIPE_PORTS` is invalid, or has no free port.
    """
    ports = os.environ.get(PORTS, "")
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", ports)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if ports and not 0 < low <= high < 2**16:
        raise ValueError(f"{PORTS}={ports} is not a range of ports. Set it to a range, as 5000-5100. [no-free-port]")
    for port in range(low, high + 1):
        try:
            return socket.create_server((host, port), family=family(host), backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ValueError(
        f"{PORTS}={ports} has no free port at {host}. Set it to a range with one port for each process on a host, "
        f"times the number of pipes that are created at the same time. [no-free-port]"
    )


def family(host: str) -> int:
    """Returns the socket family of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
