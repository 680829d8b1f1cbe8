"""Joins the processes of torchrun, and kills one of them until they have been restarted so many times.

torchrun ... -m tests.support.jobs.lives RESTARTS
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

from gpipe.recipes.world import find_world, joined

if __name__ == "__main__":
    with joined(find_world(os.environ)) as world:
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"life {world.restarts} rank {world.rank} of {int(total)}", flush=True)
        if world.restarts < int(sys.argv[1]):
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # until torchrun ends it
        dist.barrier()
