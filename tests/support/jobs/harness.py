"""Jobs that end in every way there is, to test the harness itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.processes.marks import FOLDER, mark


def add_up(rank: int, world: int, factor: int) -> list[object]:
    """What all ranks give together, and who this one is."""
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    return [int(total), world, os.environ["WORLD_SIZE"], torch.get_num_threads(), os.getpid()]


def by_environment(rank: int, world: int) -> int:
    """The process group that the environment describes."""
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()  # nobody leaves while another is still connecting
    return dist.get_world_size() * 10 + dist.get_rank()


class OddError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"odd {code}")


def raises(rank: int, world: int, who: int) -> None:
    """One rank raises while the others wait for a message from it, which fails once it is gone."""
    if rank == who:
        mark()
        time.sleep(0.05)
        error = OddError(code=7)
        error.add_note("noted")
        raise error
    dist.recv(torch.zeros(1), who)


def ends(rank: int, world: int, who: int, how: str) -> str:
    """One rank ends in some way, the others answer."""
    if rank == who:
        mark()
        match how:
            case "os._exit":
                os._exit(0)
            case "sys.exit":
                sys.exit(0)
            case "sleep":
                time.sleep(600)
            case _:
                os.kill(os.getpid(), getattr(signal, how))
                time.sleep(600)
    return "fine"


def leaves_a_process(rank: int, world: int) -> int:
    """Starts something that outlives it."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def unspeakable(rank: int, world: int) -> object:
    """Returns what JSON cannot say."""
    return {1, 2}


def shouts(rank: int, world: int, text: str) -> None:
    """Writes to stdout, which carries no answers."""
    print(text, flush=True)


def modes_of_the_meeting(rank: int, world: int) -> list[str]:
    """The modes of the folders where ranks meet."""
    here = Path(os.environ[FOLDER])
    return [oct(path.stat().st_mode & 0o777) for path in (here, here.parent)]
