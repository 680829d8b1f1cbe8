"""Program that holds a network namespace until its standard input ends, and then kills all processes in it."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def processes_in(network: int) -> list[int]:
    """Returns the processes in the network namespace with this inode number."""
    return [
        pid
        for path in Path("/proc").iterdir()
        if path.name.isdecimal() and _network(pid := int(path.name)) == network
    ]


def _network(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:  # it has ended
        return 0


def main() -> None:
    print("ready", flush=True)
    sys.stdin.read()
    me = os.getpid()
    while found := [
        pid for pid in processes_in(_network(me)) if pid != me
    ]:  # repeated, because they may start others
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
