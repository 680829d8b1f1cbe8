"""A wire that takes its time: what leaves one network namespace arrives in the other so much later, or is lost.

`tc` has netem for this, which many small kernels lack. Here a process stands between two TUN devices, one in each
namespace, both named `wire`. Packets come as the sender's TCP made them, up to 64 KiB, so that even fast links cost
little: at 1 Gbit/s some 2000 reads and writes a second.

Run as a program by `hosts.two_hosts`; ends when its standard input does.
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
    """Moves this thread, and all it will start, into the network namespace at this path.

    Raises:
        OSError: There is none, or this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(network, os.O_RDONLY)
    try:
        if libc.setns(namespace, CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter {network}: {os.strerror(error)}; this needs root")
    finally:
        os.close(namespace)


def open_end(network: str) -> int:
    """Makes the device in this namespace; what is read from the file has left there, what is written arrives."""
    enter(network)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", WIRE.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(end, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return end


def relay(ends: Sequence[int], stop: int, delay: float, loss: float) -> None:
    """Hands packets on, each `delay` seconds after it came, but for a share `loss` of them, until `stop` ends."""
    draw = Random(0)
    under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        busy = any(under_way)  # then look at all ends at every tick: cheaper than to wake for each packet
        ended, _, _ = select.select([stop] if busy else [stop, *ends], [], [], TICK_SECONDS if busy else None)
        if stop in ended:
            return
        now = time.monotonic()
        for end, packets in zip(ends, under_way, strict=True):
            while packet := _read(end):
                if draw.random() >= loss:
                    packets.append((now + delay, packet))
        for other, packets in zip(reversed(ends), under_way, strict=True):
            while packets and packets[0][0] <= now:
                _write(other, packets.popleft()[1])


def _write(end: int, packet: bytes) -> None:
    with suppress(OSError):  # the device is down: nobody hears it
        os.write(end, packet)


def _read(end: int) -> bytes:
    try:
        return os.read(end, LARGEST)
    except OSError:  # nothing more, or the device is down
        return b""


def main() -> None:
    first, second, delay, loss = sys.argv[1:]
    with suppress(PermissionError):  # a wire does not wait for a core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ends = [open_end(first), open_end(second)]
    enter(f"/proc/{os.getppid()}/ns/net")  # back: it belongs to neither
    print("ready", flush=True)
    relay(ends, sys.stdin.fileno(), float(delay), float(loss))


if __name__ == "__main__":
    main()
