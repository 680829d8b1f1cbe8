"""Where images come from: scikit-learn's digits, held in memory, or a folder, read by processes of their own."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from gpipe.recipes.data import (
    Augmentation,
    ImageFolder,
    Images,
    Reader,
    cutout,
    flip,
    jitter,
    load_digits,
    load_folder,
)
from gpipe.recipes.data.folder import select
from gpipe.recipes.options.images import DIGITS, ImagesOptions
from gpipe.recipes.recipe import Share

EVALUATED = 256
"""Images that are evaluated at once."""


class Source(Protocol):
    """Labelled images to train on, and others held out.

    Attributes:
        classes: The names of the classes, in the order of their numbers.
        rows: How many images there are to train on.
        held_out_parts: In how many parts images that are held out come.
        data: Tells the images to train on from others.
    """

    classes: tuple[str, ...]
    rows: int
    held_out_parts: int
    data: str

    def train(self, batches: Sequence[Tensor], epoch: int, share: Share) -> Iterator[Images]:
        """Yields the images of each mini-batch, given by its rows, changed as the options say."""

    def held_out(self, share: Share) -> Iterator[Images]:
        """Yields all images that are held out."""


def open_source(options: ImagesOptions) -> Source:
    """Opens the images that the options name.

    Raises:
        ValueError: The folder is not as it should be, or there are too few images.
        ImportError: The library that has or reads them is not installed.
    """
    source: Source = DigitImages(options) if options.image_folder is None else FolderImages(options)
    if len(source.classes) < 2:
        raise ValueError(f"there is one class, {source.classes[0]}, and nothing to tell apart: give two or more")
    if source.rows < options.batch_size:
        raise ValueError(
            f"--batch-size is {options.batch_size}, and there are {source.rows} images to train on: choose fewer"
        )
    return source


class DigitImages:
    """The digits that the options name."""

    def __init__(self, options: ImagesOptions) -> None:
        self._options = options
        chosen = tuple(map(int, options.classes)) or None
        self._digits = load_digits(options.image_size, classes=chosen, per_class=options.per_class, seed=options.seed)
        self.classes = options.classes or tuple(map(str, range(DIGITS)))
        self.rows = len(self._digits.train)
        self.data = "digits"
        self.held_out_parts = ceil(len(self._digits.held_out) / EVALUATED)

    def train(self, batches: Sequence[Tensor], epoch: int, share: Share) -> Iterator[Images]:
        """Yields the images of each mini-batch; elsewhere than at the first layer they stay as they are."""
        for rows in batches:
            batch = self._digits.train[rows]
            yield replace(batch, images=self._changed(batch.images, rows, epoch)) if share.reads_inputs else batch

    def _changed(self, images: Tensor, rows: Tensor, epoch: int) -> Tensor:
        o = self._options
        if o.jitter:
            images = jitter(images, rows, seed=o.seed, epoch=epoch)
        if o.flip:
            images = flip(images, rows, seed=o.seed, epoch=epoch)
        return cutout(images, rows, o.cutout, seed=o.seed, epoch=epoch) if o.cutout else images

    def held_out(self, share: Share) -> Iterator[Images]:
        """Yields the digits that are held out."""
        held_out = self._digits.held_out
        for first in range(0, len(held_out), EVALUATED):
            yield held_out[first : first + EVALUATED]


class FolderImages:
    """The images of a folder."""

    def __init__(self, options: ImagesOptions) -> None:
        o = options
        assert o.image_folder is not None
        found = select(load_folder(o.image_folder), o.classes or None, o.per_class, o.seed)
        how = Augmentation(o.image_size, least_area=o.crop, flip=o.flip, cutout=o.cutout)
        self._size = o.image_size
        self._train, self._held_out = found.train, found.held_out
        self._train_reader = Reader(found.train, how, workers=o.workers, seed=o.seed)
        self._held_out_reader = Reader(found.held_out, how, workers=min(1, o.workers), seed=o.seed)
        self.classes = found.classes
        self.rows = len(found.train)
        named = repr((found.train.names, found.train.labels)).encode()
        self.data = hashlib.sha256(named).hexdigest()
        self.held_out_parts = ceil(len(found.held_out) / EVALUATED)

    def train(self, batches: Sequence[Tensor], epoch: int, share: Share) -> Iterator[Images]:
        """Yields the images of each mini-batch; elsewhere than at the first layer, blank ones."""
        if share.reads_inputs:
            return self._train_reader.read(batches, epoch=epoch, train=True)
        return self._blank(self._train, batches)

    def held_out(self, share: Share) -> Iterator[Images]:
        """Yields the images that are held out."""
        batches = torch.arange(len(self._held_out)).split(EVALUATED)
        if share.reads_inputs:
            return self._held_out_reader.read(batches, train=False)
        return self._blank(self._held_out, batches)

    def _blank(self, images: ImageFolder, batches: Sequence[Tensor]) -> Iterator[Images]:
        labels = torch.tensor(images.labels)
        for rows in batches:
            yield Images(torch.zeros(1, 3, self._size, self._size).expand(len(rows), -1, -1, -1), labels[rows])
