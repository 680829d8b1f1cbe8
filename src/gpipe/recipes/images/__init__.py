"""AmoebaNet on images, as section 4 of the GPipe paper trains it: scikit-learn's digits, or a folder of images."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.recipes.data import (
    Augmentation,
    ImageFolder,
    Images,
    Reader,
    batches,
    cutout,
    flip,
    jitter,
    load_digits,
    load_folder,
)
from gpipe.recipes.data.folder import select
from gpipe.recipes.display import watched
from gpipe.recipes.learning import cosine, exponential
from gpipe.recipes.models import amoebanet_b, amoebanet_d, drop_path_keep, set_keep
from gpipe.recipes.options.images import DIGITS, ImagesOptions
from gpipe.recipes.recipe import Batch, Evaluation, Recipe, Share, load

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


SHOWN = 25
"""Classes, above which the terminal shows no confusion table."""
FEW = 5


@dataclass(frozen=True, eq=False)
class Counts:
    """What became of classified images.

    Attributes:
        confusion: How many of each class (row) were taken for which (column), [classes, classes].
        among_five: How many had their class among the five that were thought most likely.
    """

    confusion: Tensor
    among_five: int

    @property
    def images(self) -> int:
        """How many there were."""
        return int(self.confusion.sum())

    @property
    def top1(self) -> float:
        """The share of images that were classified rightly."""
        return int(self.confusion.diag().sum()) / self.images

    @property
    def top5(self) -> float:
        """The share of images whose class was among the five thought most likely."""
        return self.among_five / self.images


def count(classified: Iterable[tuple[Tensor, Tensor]], classes: int) -> Counts:
    """Counts over logits [N, classes] and the true classes [N].

    >>> counts = count([(torch.tensor([[2.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1]))], classes=2)
    >>> counts.confusion.tolist(), counts.top1, counts.top5
    ([[1, 0], [1, 0]], 0.5, 1.0)
    """
    confusion, among_five = torch.zeros(classes * classes, dtype=torch.int64), 0
    for logits, right in classified:
        confusion += torch.bincount(right * classes + logits.argmax(dim=1), minlength=classes * classes)
        best = logits.topk(min(FEW, classes), dim=1).indices
        among_five += int((best == right[:, None]).any(dim=1).sum())
    return Counts(confusion.reshape(classes, classes), among_five)


def to_evaluation(counts: Counts, classes: Sequence[str]) -> Evaluation:
    """The numbers, and the confusion table where it can be read."""
    numbers = {"top1": counts.top1, "top5": counts.top5}
    lines = [
        f"{counts.images} held-out images, each as a whole:",
        f"top-1 {counts.top1:.2%}, top-5 {counts.top5:.2%}",
    ]
    if len(classes) <= SHOWN:
        lines += ["", *confusion_lines(counts.confusion, classes)]
    details = {"images": counts.images, "classes": list(classes), "confusion": counts.confusion.tolist()}
    return Evaluation(numbers, details, "\n".join(lines))


def confusion_lines(confusion: Tensor, classes: Sequence[str]) -> list[str]:
    r"""A line for each class: what its images were taken for.

    >>> print(*confusion_lines(torch.tensor([[3, 0], [1, 2]]), ["cat", "dog"]), sep="\n")
    is \ taken for  cat  dog
               cat    3    .
               dog    1    2
    """
    width = max(len(f"{int(confusion.max())}"), *map(len, classes)) + 2
    head = "is \\ taken for"
    first = max(len(head), *map(len, classes))
    rows = [
        f"{name:>{first}}" + "".join(f"{number or '.':>{width}}" for number in row)
        for name, row in zip(classes, confusion.tolist(), strict=True)
    ]
    return [f"{head:>{first}}" + "".join(f"{name:>{width}}" for name in classes), *rows]


NETWORKS = {"amoebanet-d": (amoebanet_d, "AmoebaNet-D"), "amoebanet-b": (amoebanet_b, "AmoebaNet-B")}


class ImagesRecipe(Recipe[ImagesOptions]):
    """AmoebaNet-B or -D on a folder of images, or on the digits.

    Args:
        options: All its settings.
    """

    name: ClassVar[str] = "images"

    def __init__(self, options: ImagesOptions) -> None:
        super().__init__(options)
        self.source: Source = open_source(options)
        self.steps_per_epoch = self.source.rows // options.batch_size

    @property
    def title(self) -> str:
        """The network and its size."""
        return f"{NETWORKS[self.options.model][1]} ({self.options.layers}, {self.options.filters})"

    def layers(self) -> list[nn.Module]:
        """Builds the network."""
        o = self.options
        make, _ = NETWORKS[o.model]
        classes, aux_head = len(self.source.classes), o.aux_head > 0
        return make(o.layers, o.filters, classes, aux_head, dropout=o.dropout, image_size=o.image_size)

    def sample(self, replicas: int) -> Batch:
        """The first images of a mini-batch."""
        rows = torch.arange(self.options.batch_size // replicas)
        images = next(iter(self.source.train([rows], 1, Share())))
        return Batch(images.images, images.classes)

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        """Makes the mini-batches of an epoch."""
        o = self.options
        order = batches(self.source.rows, o.batch_size, seed=o.seed, epoch=epoch)[first:]
        for images in self.source.train([share.of(rows) for rows in order], epoch, share):
            yield Batch(images.images, images.classes)

    def loss(self, output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        """Cross-entropy, and that of the auxiliary head in its weight."""
        smoothing = self.options.label_smoothing
        if isinstance(output, Tensor):
            return F.cross_entropy(output, targets, label_smoothing=smoothing)
        own, auxiliary = (F.cross_entropy(logits, targets, label_smoothing=smoothing) for logits in output)
        return own + self.options.aux_head * auxiliary

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD or RMSProp; weights decay, but neither BatchNorm's nor biases."""
        o, all_ = self.options, list(parameters)
        groups = [
            {"params": [one for one in all_ if one.dim() > 1], "weight_decay": o.weight_decay},
            {"params": [one for one in all_ if one.dim() <= 1], "weight_decay": 0.0},
        ]
        if o.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=o.learning_rate, momentum=o.momentum, nesterov=o.momentum > 0)
        return torch.optim.RMSprop(
            groups, lr=o.learning_rate, alpha=o.rmsprop_decay, eps=o.rmsprop_epsilon, momentum=o.momentum
        )

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Rises, then falls as a cosine or exponentially."""
        o = self.options
        if o.decay == "cosine":
            return o.learning_rate * cosine(step, steps, o.warm_up * steps)
        every = o.decay_epochs * self.steps_per_epoch
        return o.learning_rate * exponential(step, every, o.decay_rate, o.warm_up * steps)

    def before_step(self, pipe: gpipe.GPipe, step: int, steps: int) -> None:
        """Drops more and more paths over the training."""
        if self.options.drop_path < 1:
            set_keep(pipe, drop_path_keep(step, steps, self.options.drop_path))

    @property
    def data(self) -> str:
        """Tells the names and classes of the images of a folder."""
        return self.source.data

    @property
    def averaging(self) -> float:
        """How much of itself the moving average of the weights keeps at each step."""
        return self.options.ema

    def measure(self, pipe: gpipe.GPipe) -> Mapping[str, float]:
        """The share of held-out images that are classified rightly."""
        return {"accuracy": count(self._classified(pipe), len(self.source.classes)).top1}

    def evaluate(self, pipe: gpipe.GPipe) -> Evaluation:
        """Top-1, top-5 and a confusion table over the held-out images, each seen once."""
        parts = watched(self._classified(pipe), "images", self.source.held_out_parts)
        return to_evaluation(count(parts, len(self.source.classes)), self.source.classes)

    @torch.no_grad()
    def _classified(self, pipe: gpipe.GPipe) -> Iterator[tuple[Tensor, Tensor]]:
        for images in self.source.held_out(Share(reads_inputs=pipe.reads_inputs)):
            logits = pipe(images.images, gather=True)
            yield logits.float().cpu(), images.classes

    def fit(self, state: Mapping[str, Tensor], layers: Sequence[nn.Module]) -> None:
        """Gives layers the weights of another run; the softmax layers are new, of the size of these classes."""
        softmax = [name for name, layer in nn.Sequential(*layers).named_modules() if isinstance(layer, nn.Linear)]
        load(state, layers, [f"{name}.{kind}" for name in softmax for kind in ("weight", "bias")])


class DigitsRecipe(ImagesRecipe):
    """The same, with what suits the digits."""

    name: ClassVar[str] = "digits"
