"""Trains a pipe with one process per partition, and resumes from its newest checkpoint.

    torchrun --nproc-per-node 2 examples/clusters/train.py

The other scripts in this folder start the same function with other launchers. PARTITIONS processes hold one replica
of the model. With more processes, there are more replicas.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import gpipe

PARTITIONS, ROWS = 2, 32


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of this replica. A data loader would read them."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, 32, generator=generator)
    replicas, replica = dist.get_world_size() // PARTITIONS, dist.get_rank() // PARTITIONS
    return inputs[replica::replicas], inputs[replica::replicas, :10].argmax(dim=1)


def train(checkpoints: str, steps: int = 20) -> float:
    """Trains to a number of steps, in all processes, and returns the last loss."""
    torch.manual_seed(0)  # Every process starts with the same weights.
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    loss = torch.tensor(float("nan"))
    with gpipe.GPipe(layers, PARTITIONS, micro_batches=4, driver="process") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        if gpipe.find_checkpoint(checkpoints, pipe):
            gpipe.load(checkpoints, pipe, optimizer)
        while pipe.step_number < steps:
            loss = pipe.step(*batch(pipe.step_number), cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {pipe.step_number}: loss {loss:.6f}", flush=True)
            if pipe.step_number % 5 == 0:
                gpipe.save(checkpoints, pipe, optimizer)
    return float(loss)


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    train(os.environ.get("CHECKPOINTS", "checkpoints"))
    dist.destroy_process_group()
