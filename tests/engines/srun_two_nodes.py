"""Trains with examples/clusters/srun.sh on a SLURM cluster with two nodes, one rank a node.

    python -m tests.engines.srun_two_nodes FOLDER

Both nodes run on this host, in network namespaces. FOLDER has the scripts.
"""

import sys
import tempfile
from pathlib import Path

from tests.support.processes.slurm import slurm, start
from two_hosts.hosts import two_hosts
from two_hosts.relay import WIRE

SRUN = ["srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit", "--unbuffered", "--immediate=60"]

if __name__ == "__main__":
    scripts = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts, slurm(hosts, Path(folder)) as env:
        env |= {"GLOO_SOCKET_IFNAME": WIRE, "GPIPE_INTERFACE": WIRE}
        command = [*SRUN, str(scripts / "srun.sh"), "python", str(scripts / "train.py")]
        status = start(hosts, 0, "host0", Path(folder), command, env=env).wait()
    sys.exit(status)
