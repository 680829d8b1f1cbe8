"""Jobs that end in every way there is, to test the harness itself."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from tests.support.processes.marks import mark


def add_up(rank: int, world: int, factor: int) -> list[object]:
    """What all ranks give together, and who this one is."""
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    return [int(total), world, os.environ["WORLD_SIZE"], torch.get_num_threads(), os.getpid()]


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
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
