"""What a user would run under torchrun: joins, waits until it is told to go on, makes a pipe, and trains without end.

python -m tests.support.jobs.late_worker FOLDER
"""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from tests.support.jobs.training import batch, build, make
from tests.support.plain_loop import squares
from tests.support.processes.faults import Fault


def main(folder: str) -> None:
    """Leaves `joined_<rank>` and `trains_<rank>` in the folder; goes on from the first when `go` is there."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    Path(folder, f"joined_{rank}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    pipe = make(build(Fault("", "")), world)
    while True:
        pipe.step(*batch(0), squares)
        Path(folder, f"trains_{os.environ['RANK']}").touch()
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
