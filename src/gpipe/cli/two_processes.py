"""Two processes train a step of one network: what `gpipe doctor` has torchrun start."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import gpipe

LIMIT = timedelta(seconds=60)


def main() -> None:
    """Prints the loss, on rank 0."""
    dist.init_process_group("gloo", timeout=LIMIT)
    layers = [lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 4)]
    with gpipe.GPipe(layers, 2, 4, seed=0, driver="process") as pipe:
        loss = pipe.step(torch.ones(8, 8), torch.zeros(8, 4), nn.functional.mse_loss)
    if dist.get_rank() == 0:
        print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
