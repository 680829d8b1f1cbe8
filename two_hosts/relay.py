"""Program that forwards packets between two network namespaces, with a delay and with losses.

It replaces `tc netem`, which many small kernels lack. It connects two TUN devices, one in each namespace, both named
`wire`. Packets are as large as the sender's TCP makes them, up to 64 KiB. Fast links therefore cost little: 2000
reads and writes per second at 1 Gbit/s.

`hosts.two_hosts` runs it. It ends when its standard input ends.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from random import Random

WIRE = "wire"
CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
TICK_SECONDS = 0.00025
LARGEST = 10 + 65535  # bytes: the header of an offloaded packet, and the packet


def enter(network: str) -> None:
    """Moves this thread, and the threads and processes it starts later, into the network namespace at this path.

    Raises:
        OSError: If there is none, or if this process lacks the permission.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(network, os.O_RDONLY)
    try:
        if libc.setns(namespace, CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter {network}: {os.strerror(error)}. Run as root.")
    finally:
        os.close(namespace)


def open_end(network: str) -> int:
    """Creates the device in a namespace. Reading the file returns packets sent there; writing delivers packets."""
    enter(network)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", WIRE.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(end, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return end


def relay(ends: Sequence[int], stop: int, delay: float, loss: float) -> None:
    """Forwards each packet after `delay` seconds, except a share of `loss`, until the file `stop` ends."""
    draw = Random(0)
    in_flight: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        busy = any(in_flight)  # while packets are in flight, poll at every tick: cheaper than a wake-up per packet
        ended, _, _ = select.select([stop] if busy else [stop, *ends], [], [], TICK_SECONDS if busy else None)
        if stop in ended:
            return
        now = time.monotonic()
        for end, packets in zip(ends, in_flight, strict=True):
            while packet := _read(end):
                if draw.random() >= loss:
                    packets.append((now + delay, packet))
        for other, packets in zip(reversed(ends), in_flight, strict=True):
            while packets and packets[0][0] <= now:
                _write(other, packets.popleft()[1])


def _write(end: int, packet: bytes) -> None:
    with suppress(OSError):  # the device is down: the packet is lost
        os.write(end, packet)


def _read(end: int) -> bytes:
    try:
        return os.read(end, LARGEST)
    except OSError:  # no more packets, or the device is down
        return b""


def main() -> None:
    first, second, delay, loss = sys.argv[1:]
    with suppress(PermissionError):  # a wire has no scheduling delay
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ends = [open_end(first), open_end(second)]
    enter(f"/proc/{os.getppid()}/ns/net")  # leave both namespaces
    print("ready", flush=True)
    relay(ends, sys.stdin.fileno(), float(delay), float(loss))


if __name__ == "__main__":
    main()
