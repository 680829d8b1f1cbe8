"""What a user would run under torchrun: joins, makes a pipe, and trains without end, or until a layer is stuck.

    torchrun --nproc-per-node 2 -m tests.support.jobs.worker FOLDER STUCK

Each rank leaves a file `joined_<rank>` in FOLDER, waits there for `go`, and leaves `trains_<rank>` after its first
steps. STUCK is the rank whose layer then sleeps for ever, -1 for none.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.jobs.training import batch, build, faulty_layer, make
from tests.support.plain_loop import squares
from tests.support.processes.faults import Fault
from tests.support.processes.marks import wait_for


def main(folder: str, stuck: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    Path(folder, f"joined_{rank}").touch()
    wait_for(Path(folder, "go"))
    layer = faulty_layer(int(stuck), world) if int(stuck) >= 0 else -1
    pipe = make(build(Fault("sleep", "forward", layer)), world)
    while True:
        pipe.step(*batch(0), squares)
        Path(folder, f"trains_{rank}").touch()
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
