"""Under torchrun: no process outlives the launcher that started it."""

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

NAME = "gpipe-launcher"
POLL_SECONDS = 0.5  # between two looks
GRACE_SECONDS = 3.0  # between the two signals
WORKER_VARIABLES = ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT")  # which torchrun's workers and theirs have alone
ADOPTERS = frozenset({"init", "systemd", "tini", "dumb-init", "docker-init", "catatonit", "runit", "s6-svscan"})
"""Who becomes the parent of processes whose own is gone, by name."""
ANSWER_SECONDS = 2.0  # for the launcher's store to answer


def end_with_launcher() -> None:
    """Under torchrun, has this process end within four seconds after torchrun is gone, even if it was killed before.

    Else who starts again would have two runs write into one folder and share each GPU. It gets SIGTERM, so that a run
    which catches that may save, and then SIGKILL. A thread looks who the launcher is: the kernel would tell too, but
    on Linux alone, and already when the thread ends that started this process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and all(thread.name != NAME for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=[find_launcher()], name=NAME, daemon=True).start()


def _watch(launcher: int) -> None:
    parent, gone = os.getppid(), was_gone(launcher)
    while not gone:
        time.sleep(POLL_SECONDS)
        gone = os.getppid() != parent or not _exists(launcher)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _exists(process: int) -> bool:
    """Whether a process exists; this needs no file descriptor, of which there may be none."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def find_launcher() -> int:
    """The nearest process above this one that is no worker itself, as a script around this one is.

    If the launcher is gone, it is whoever takes in what such processes leave.
    """
    own = {f"{name}={os.environ.get(name, '')}".encode() for name in WORKER_VARIABLES}
    above = os.getppid()
    with suppress(OSError, ValueError, IndexError):  # not Linux, or not ours to see: then the parent it is
        while above > 1 and own <= set(Path(f"/proc/{above}/environ").read_bytes().split(b"\0")):
            stat = Path(f"/proc/{above}/stat").read_text()
            above = int(stat.rpartition(")")[2].split()[1])
    return above


def was_gone(launcher: int) -> bool:
    """Whether the launcher was gone before anybody looked, as far as that can be told for sure.

    Then something else has taken this process in, and where the launcher of a single host kept its store nobody is.
    """
    with suppress(OSError):  # not Linux, or there is no descriptor left
        if Path(f"/proc/{launcher}/comm").read_text().strip() in ADOPTERS:
            return True
    known = os.environ
    if known.get("GROUP_WORLD_SIZE") == "1" and known.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((known["MASTER_ADDR"], int(known["MASTER_PORT"])), ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError, KeyError):
            pass
    return False
