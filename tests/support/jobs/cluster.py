"""A training of three steps over the processes of torchrun, one a partition, or in this one: leaves its weights.

torchrun ... -m tests.support.jobs.cluster FILE
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import gpipe


def train(file: str, partitions: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8)]
    over = dist.is_initialized()
    pipe = gpipe.GPipe(layers, partitions, 4, seed=1, driver="process" if over else None)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(3):
        pipe.step(torch.randn(16, 8), torch.randn(16, 8), mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    gpipe.save_weights(file, pipe)
    pipe.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1], dist.get_world_size())
    dist.destroy_process_group()
