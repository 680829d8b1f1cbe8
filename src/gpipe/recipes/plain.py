"""Times a step of the plain loop: the same layers without a pipeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch
from torch import nn

from gpipe.datasets import Images
from gpipe.recipes.loop import Loss

REPEATS = 3  # and one before them to warm up


def measure_plain_step(
    make: Callable[[], Sequence[nn.Module]], batch: Images, micro_batches: int, loss_fn: Loss, device: torch.device
) -> float:
    """Returns the median seconds of forward and backward of a mini-batch, micro-batch by micro-batch, no remat.

    Layers that `make` makes do it, on one device, with one thread on the CPU; torch's randomness stays as it was.
    """
    seconds: list[float] = []
    with one_thread(), torch.random.fork_rng([] if device.type == "cpu" else [device]):
        plain = nn.Sequential(*make()).to(device).train()
        for _ in range(1 + REPEATS):
            start = perf_counter()
            _plain_step(plain, batch, micro_batches, loss_fn, device)
            seconds.append(perf_counter() - start)
    return median(seconds[1:])


def _plain_step(plain: nn.Sequential, batch: Images, micro_batches: int, loss_fn: Loss, device: torch.device) -> None:
    plain.zero_grad()
    sections = min(micro_batches, len(batch))
    images, classes = (tensor.to(device).tensor_split(sections) for tensor in (batch.images, batch.classes))
    for own_images, own_classes in zip(images, classes, strict=True):
        loss = loss_fn(plain(own_images), own_classes) * (len(own_classes) / len(batch))
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
