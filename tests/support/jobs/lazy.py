"""Jobs with models of which each process builds and holds its own part alone."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.jobs.too_big import limited
from tests.support.processes.digests import digest

WIDTH, LAYERS, SEED = 2048, 24, 9
LAYER = 4 * WIDTH * (WIDTH + 1)  # bytes
ROOM = 20 * LAYER  # bytes: six layers with their gradients and one gradient more take 13; threads' stacks count too
Json = Any


def makers(width: int = WIDTH) -> list[Callable[[], nn.Module]]:
    """24 layers of 16 MiB each."""
    return [lambda: nn.Linear(width, width)] * LAYERS


def build_in_little_memory(rank: int, world: int) -> Json:
    """Builds and trains a model that does not fit; says so, and the digests of its weights before.

    Each rank needs memory for the weights and the gradients of six layers; the whole model has 24.
    """
    with gpipe.GPipe(makers(4), world, 2, driver="process") as small:  # whatever torch takes by itself at first
        small.step(torch.ones(2, 4), torch.ones(2, 4), F.mse_loss)
    with limited(ROOM):
        pipe = gpipe.GPipe(makers(), world, 2, seed=SEED, driver="process")
        digests = {name: digest(parameter) for name, parameter in pipe.named_parameters()}
        pipe.step(torch.ones(2, WIDTH), torch.zeros(2, WIDTH), F.mse_loss)
        pipe.close()
        del pipe
        refused = False
        try:
            whole = [make() for make in makers()]
            del whole
        except (RuntimeError, MemoryError):
            refused = True
    return [refused, digests]


def draws_around(rank: int, world: int) -> Json:
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    gpipe.GPipe(makers(4), world, 2, seed=SEED, driver="process").close()
    return bool(torch.equal(before, torch.get_rng_state()))


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        if self.weight.device.type != "meta":
            raise ZeroDivisionError("no weights today")

    def forward(self, x: Tensor) -> Tensor:
        return x


def fails_on_one(rank: int, world: int, index: int) -> None:
    layers: list[Any] = makers(4)
    layers[index] = Fails
    gpipe.GPipe(layers, world, 2, seed=SEED, driver="process")
