"""Trains with Ray Train, which starts the processes, and starts them again after a failure.

    python examples/clusters/ray_train.py

Ray creates the process group, so the function must not call `init_process_group`. All nodes must share the folder of
the checkpoints.
"""

import os
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from train import train


def main(settings: dict[str, str]) -> None:
    """Runs in each worker."""
    train(settings["checkpoints"])


if __name__ == "__main__":
    checkpoints = os.path.abspath(os.environ.get("CHECKPOINTS", "checkpoints"))
    use_gpu = os.environ.get("USE_GPU") == "1"
    TorchTrainer(
        main,
        train_loop_config={"checkpoints": checkpoints},
        scaling_config=ScalingConfig(num_workers=int(os.environ.get("WORKERS", "2")), use_gpu=use_gpu),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=2)),
    ).fit()
