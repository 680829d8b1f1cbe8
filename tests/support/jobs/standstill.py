"""What a rank does on one of two hosts while that of the other is kept from going on, under torchrun.

    torchrun ... -m tests.support.jobs.standstill FOLDER FAULT TIMEOUT

Rank 1 is "stopped" by a signal in a layer, "held" by a layer that keeps the interpreter's lock, "slow" in one that
does not, or "busy" outside of a step, until rank 0 has told what it knows of it. Then both go on; or the wire is
"cut", which the test does and says, and both fail. Rank 0 leaves `told`, what it said, and each rank its loss or
error in `rank_<number>.json`.

Meanwhile rank 0 sends more than the network takes from it, and waits for longer than a host may be silent.
"""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpipe
from gpipe.distributed import endpoint, linking
from tests.support.jobs.two_hosts import meet
from tests.support.plain_loop import squares
from tests.support.processes.marks import wait_for

STEPS, MICRO_BATCHES = 2, 16
SIZE = 2**20  # elements of a message: all of a step are more than slots, sockets and windows hold
LONG_WAIT, ANSWER = 5.0, 4.0  # seconds until rank 0 says something, and of these for rank 1 to answer
SILENCE = 3.0  # seconds after which a host that answers nothing is gone


class Held(nn.Module):
    """In the last step stands still in a way of its own."""

    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__()
        self.folder, self.fault, self.visits = folder, fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.visits += 1
        if self.visits == MICRO_BATCHES * (STEPS - 1) + 1:
            stand_still(self.folder, self.fault)
        return x


def stand_still(folder: Path, fault: str) -> None:
    """Until rank 0 has told of it."""
    if fault in ("slow", "cut"):
        wait_for(folder / ("told" if fault == "slow" else "cut"))
    elif fault == "stopped":
        go_on = "import os, signal, sys, time\nwhile not os.path.exists(sys.argv[1]):\n  time.sleep(0.02)\n"
        go_on += "os.kill(int(sys.argv[2]), signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-c", go_on, str(folder / "told"), str(os.getpid())])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "held":
        told, usleep = str(folder / "told").encode(), ctypes.PyDLL(None).usleep  # which keeps the lock
        access = ctypes.PyDLL(None).access
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e6)
        while access(told, os.F_OK):
            usleep(20_000)
        sys.setswitchinterval(interval)


class Told(logging.Handler):
    """Leaves what is said in a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        part = self.folder / "told.part"
        part.write_text(record.getMessage())
        part.rename(self.folder / "told")


def main(name: str, fault: str, timeout: str) -> None:
    folder = Path(name)
    torch.set_num_threads(1)
    rank = meet(folder)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    layers = [nn.Sequential(nn.Linear(4, 4)), Held(folder, fault if rank else "")]
    linking.LONGEST_SILENCE = SILENCE
    pipe = gpipe.GPipe(layers, [1, 1], MICRO_BATCHES, remat="never", driver="process")
    batch = torch.ones(MICRO_BATCHES, SIZE // 4, 4), torch.zeros(MICRO_BATCHES, SIZE // 4, 4)
    pipe.step(*batch, squares)
    if not rank:
        vars(endpoint).update(LONG_WAIT_SECONDS=LONG_WAIT, ANSWER_SECONDS=ANSWER)
        logging.getLogger("gpipe").addHandler(Told(folder))
    elif fault == "busy":
        wait_for(folder / "told")
    try:
        said: dict[str, object] = {"loss": float(pipe.step(*batch, squares))}
    except gpipe.RemoteError as error:
        said = {"error": str(error)}
        (folder / "told").touch()  # for the other to go on
    Path(folder, f"rank_{rank}.part").write_text(json.dumps(said))
    Path(folder, f"rank_{rank}.part").rename(folder / f"rank_{rank}.json")
    wait_for(folder / "seen")


if __name__ == "__main__":
    main(*sys.argv[1:])
