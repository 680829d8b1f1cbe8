"""What a user would run under torchrun: trains without end, or until one of its layers is stuck.

    torchrun --nproc-per-node 2 -m tests.support.jobs.worker FOLDER STUCK

Each rank leaves a file `ready_<rank>` in FOLDER after its first steps. STUCK is the rank whose layer then sleeps for
ever, -1 for none.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.jobs.training import batch, build, faulty_layer, make
from tests.support.plain_loop import squares
from tests.support.processes.faults import Fault


def main(folder: str, stuck: str) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    layer = faulty_layer(int(stuck), world) if int(stuck) >= 0 else -1
    pipe = make(build(Fault("sleep", "forward", layer)), world)
    inputs, targets = batch(0)
    while True:
        pipe.step(inputs, targets, squares)
        Path(folder, f"ready_{rank}").touch()
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
