"""Trains with Monarch, which runs train.py in a mesh of processes.

    python examples/clusters/monarch_train.py

A process of Monarch outlives a script that failed in it. train.py therefore uses `with gpipe.GPipe(...) as pipe`,
which reports the failure to the other processes at once.
"""

import os

from monarch.actor import this_host
from monarch.spmd import SPMDActor

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")

if __name__ == "__main__":
    processes = this_host().spawn_procs(per_host={"gpus": int(os.environ.get("WORKERS", "2"))})
    actors = processes.spawn("train", SPMDActor)
    first = actors.slice(**dict.fromkeys(processes._labels, 0))
    address, port = first.get_host_port.call_one(None).get()
    actors.main.call(address, port, [SCRIPT]).get()
    processes.stop().get()
