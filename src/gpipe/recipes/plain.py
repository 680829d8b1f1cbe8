"""Times a step of the plain loop: the same layers without a pipeline."""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from gpipe.recipes.job import precision
from gpipe.recipes.recipe import Batch, Recipe

REPEATS = 3  # and one before them to warm up


def measure_plain_step(recipe: Recipe[Any], micro_batches: int, device: torch.device) -> float:
    """Returns the median seconds of forward and backward of a mini-batch, micro-batch by micro-batch, no remat.

    Layers that the recipe builds anew do it, on one device, with one thread on the CPU; torch's randomness stays as
    it was.
    """
    seconds: list[float] = []
    with one_thread(), torch.random.fork_rng([] if device.type == "cpu" else [device]):
        plain = gpipe.Sequential(*recipe.layers()).to(device).train()
        parts = _split(recipe.sample(replicas=1), micro_batches, device)
        for _ in range(1 + REPEATS):
            start = perf_counter()
            _plain_step(plain, parts, recipe)
            seconds.append(perf_counter() - start)
    return median(seconds[1:])


def _split(batch: Batch, micro_batches: int, device: torch.device) -> list[Batch]:
    """The micro-batches of a mini-batch whose inputs and targets are tensors, or tuples of them."""

    def parts(value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            return list(value.to(device).tensor_split(min(micro_batches, len(value))))
        return list(zip(*map(parts, value), strict=True))

    return [Batch(*both) for both in zip(parts(batch.inputs), parts(batch.targets), strict=True)]


def _plain_step(plain: nn.Module, parts: list[Batch], recipe: Recipe[Any]) -> None:
    plain.zero_grad()
    device = next(plain.parameters()).device
    for part in parts:
        with precision(recipe.options, device):
            loss = recipe.loss(plain(part.inputs), part.targets) / len(parts)
        loss.backward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets the calling thread compute alone, so that no helpers of its own compete with the ranks for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
