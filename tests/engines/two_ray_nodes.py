"""Trains with examples/clusters/ray_train.py on a Ray cluster with two nodes, two ranks a node: two replicas of two.

    python tests/engines/two_ray_nodes.py FOLDER

Both nodes run on this host. FOLDER has the scripts.
"""

import os
import subprocess
import sys

from ray.cluster_utils import Cluster  # type: ignore[import-not-found]  # Ray is optional

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        settings = os.environ | {"RAY_ADDRESS": cluster.address, "WORKERS": "4"}
        status = subprocess.call([sys.executable, f"{sys.argv[1]}/ray_train.py"], env=settings)
    finally:
        cluster.shutdown()
    sys.exit(status)
