"""Batches of images out of files, read ahead by worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpipe.datasets.augment import Augmentation, augment, central_box, random_box
from gpipe.datasets.digits import Images
from gpipe.datasets.folder import ImageFolder

START = "spawn"  # a copy of a process in which threads run, as those of a pipe do, could wait forever for their locks


@dataclass(frozen=True)
class Order:
    """Which rows to read, and the key of what is drawn for them; an epoch of None is evaluation, without draws."""

    rows: tuple[int, ...]
    epoch: int | None


@dataclass(frozen=True)
class Source(Dataset[Images]):
    """Reads whole batches: a function of the order, the same in every process."""

    folder: ImageFolder
    augmentation: Augmentation
    seed: int

    def __getitem__(self, order: Order) -> Images:
        pixels = torch.from_numpy(np.stack([self._pixels(row, order.epoch) for row in order.rows]))
        images = (pixels.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1).contiguous()
        classes = torch.tensor([self.folder.labels[row] for row in order.rows])
        if order.epoch is not None:
            rows = torch.tensor(order.rows)
            images = augment(images, rows, self.augmentation, seed=self.seed, epoch=order.epoch)
        return Images(images, classes)

    def _pixels(self, row: int, epoch: int | None) -> NDArray[np.uint8]:
        """Returns the pixels [size, size, 3] of a box of an image."""
        from PIL.Image import Resampling

        image, _ = self.folder[row]
        how = self.augmentation
        if epoch is None:
            box = central_box(*image.size)
        else:
            box = random_box(*image.size, row, least_area=how.least_area, seed=self.seed, epoch=epoch)
        return np.asarray(image.resize((how.size, how.size), Resampling.BILINEAR, box=box))


class Reader:
    """Reads batches of images in `workers` processes, which begin with the first batch and live until `close()`.

    The bits are the same for any number of workers, also for 0, which reads in the process itself. Workers are fresh
    processes: a script that uses them keeps what it does under `if __name__ == "__main__":`.

    Raises:
        ValueError: `workers` is negative.
    """

    def __init__(
        self, folder: ImageFolder, augmentation: Augmentation | None = None, *, workers: int = 0, seed: int = 0
    ) -> None:
        if workers < 0:
            raise ValueError(f"workers is {workers}; give a number of processes, or 0 to read in this one")
        self._source = Source(folder, augmentation or Augmentation(), seed)
        self._orders: list[Order] = []
        self._reading: object = None
        self._loader = _load(self._source, self._orders, workers) if workers else None

    def read(self, batches: Sequence[Tensor], *, epoch: int = 0, train: bool) -> Iterator[Images]:
        """Reads batches given by their rows, [N] each: augmented by (seed, epoch, row) to train, else as they are.

        Raises:
            RuntimeError: Another reading has begun since this one did; a reader does one at a time.
            ValueError: A file cannot be decoded; the message has its path.
        """
        self._reading = reading = object()
        self._orders[:] = [Order(tuple(rows.tolist()), epoch if train else None) for rows in batches]
        for images in self._loader or map(self._source.__getitem__, tuple(self._orders)):
            yield images
            if self._reading is not reading:
                raise RuntimeError(
                    "a reader does one reading at a time: finish this one first, or use another reader"
                )

    def close(self) -> None:
        """Ends the worker processes; what is read later is read in this one."""
        self._loader, self._reading = None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_batches(
    folder: ImageFolder,
    batches: Sequence[Tensor],
    *,
    workers: int = 0,
    seed: int = 0,
    epoch: int = 0,
    train: bool,
    augmentation: Augmentation | None = None,
) -> Iterator[Images]:
    """Reads batches given by their rows, [N] each, once: what `Reader` does without keeping its workers.

    Images are [N, 3, size, size] in float32, in [-1, 1].
    """
    with Reader(folder, augmentation, workers=workers, seed=seed) as reader:
        yield from reader.read(batches, epoch=epoch, train=train)


def _load(source: Source, orders: list[Order], workers: int) -> "DataLoader[Images]":
    return DataLoader(
        source,
        batch_size=None,  # an order is a batch
        sampler=orders,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context=START,
        generator=torch.Generator(),  # the default one would be drawn from, and belongs to others
    )
