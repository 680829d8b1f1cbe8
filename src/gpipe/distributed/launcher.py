"""Ends workers of torchrun after torchrun has ended, even if torchrun was killed. Warns if restarts would fail."""

import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import torch.distributed as dist

NAME = "gpipe-launcher"
POLL_SECONDS = 0.5
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
WORKER_VARIABLES = ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT")  # set in workers of torchrun and their children
ADOPTERS = frozenset({"init", "systemd", "tini", "dumb-init", "docker-init", "catatonit", "runit", "s6-svscan"})
"""Names of programs that adopt orphaned processes."""
ANSWER_SECONDS = 2.0  # for the launcher's store to answer
SEPARATE_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
RESTARTS = (
    f"torchrun can restart this script, but restarts fail by chance, because new processes find the addresses of the "
    f"old ones in torchrun's store. Set {SEPARATE_STORES}=1 before torchrun, and pass --rdzv-backend c10d instead of "
    "--master-addr or --master-port. [torchrun-restarts]"
)

logger = logging.getLogger("gpipe")

_checked: "WeakSet[dist.ProcessGroup]" = WeakSet()  # groups that need no warning


def accept_store() -> None:
    """Records that the store of the default process group contains no addresses of earlier processes."""
    assert dist.group.WORLD is not None
    _checked.add(dist.group.WORLD)


def warn_of_restarts() -> None:
    """Logs one warning, on rank 0, if torchrun can restart the processes and all restarts share a store."""
    known, group = os.environ, dist.group.WORLD
    if group is None or group in _checked:
        return
    _checked.add(group)
    counts = [known.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    shares = known.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shares and dist.get_rank() == 0 and any(count != "0" for count in counts):
        logger.warning(RESTARTS)


def end_with_launcher() -> None:
    """Starts a thread that ends this process at most four seconds after torchrun has ended. No-op without torchrun.

    Without this thread, a restarted job could share folders and GPUs with workers of the killed job. The process
    receives SIGTERM, so that it can save a checkpoint, and then SIGKILL.

    The thread polls, because PR_SET_PDEATHSIG exists only on Linux, and because this signal is also sent when only
    the parent's thread ends.
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
    """Returns whether a process exists. Does not use a file descriptor, because the limit may be reached."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to a different user
        pass
    return True


def find_launcher() -> int:
    """Returns the nearest ancestor process that is not a worker. Skips, for example, a shell script in a worker.

    If the launcher has ended, the result is the process that adopted this orphaned process.
    """
    variables = {f"{name}={os.environ.get(name, '')}".encode() for name in WORKER_VARIABLES}
    above = os.getppid()
    with suppress(OSError, ValueError, IndexError):  # not Linux, or not readable: return the nearest known ancestor
        while above > 1 and variables <= set(Path(f"/proc/{above}/environ").read_bytes().split(b"\0")):
            stat = Path(f"/proc/{above}/stat").read_text()
            above = int(stat.rpartition(")")[2].split()[1])
    return above


def was_gone(launcher: int) -> bool:
    """Returns whether the launcher is known to have ended before the thread started.

    The launcher has ended if an init process has adopted this process, or if the store of a single-host launcher
    rejects connections.
    """
    with suppress(OSError):  # not Linux, or no file descriptor is left
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
